"""How a process gets a segment, and leaves it."""
