"""The compared ways to train with several processes: a module each, as short as possible."""
