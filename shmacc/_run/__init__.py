"""Starts a chief and workers, and starts again those that are killed."""
