"""How a process opens a segment, and how it leaves it."""
