"""Arrays and tables that only updates change, and their checkpoints."""
