"""Measures shmacc beside what one would use otherwise: `make bench` and `make compare`."""
