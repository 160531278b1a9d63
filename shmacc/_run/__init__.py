"""Starts a chief and workers, and restarts those that are killed."""
