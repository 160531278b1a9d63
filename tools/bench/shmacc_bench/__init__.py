"""Measures shmacc beside its alternatives: `make bench` and `make compare`."""
