"""Accumulators: processes apply gradients, and take them as rounds."""
