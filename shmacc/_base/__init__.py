"""What a segment is made of, byte for byte, and what it is called."""
