"""What the public API hands out and takes in."""
