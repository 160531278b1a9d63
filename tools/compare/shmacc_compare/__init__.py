"""Trains the same models on the same data by shmacc and by what one would take otherwise."""
