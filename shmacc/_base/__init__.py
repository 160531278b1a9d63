"""The bytes that a segment consists of, and the names of its files."""
