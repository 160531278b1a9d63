"""A segment that a process has open: how it is opened, and how it is left."""
