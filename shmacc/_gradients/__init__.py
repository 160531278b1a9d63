"""A caller's data, checked and converted before any lock."""
