"""What a segment is called, and what stands in it."""
