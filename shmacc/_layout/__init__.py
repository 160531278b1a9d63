"""The names of segments, and their layout."""
