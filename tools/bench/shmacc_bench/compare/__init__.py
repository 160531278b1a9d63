"""`make compare`: trains one model in each of the ways that a user can choose."""
