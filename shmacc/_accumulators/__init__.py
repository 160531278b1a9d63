"""Gradients come in, rounds go out."""
