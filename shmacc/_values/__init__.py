"""A caller's numbers and row numbers, checked and converted before any lock."""
