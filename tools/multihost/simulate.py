"""Simulates rounds over up to hundreds of hosts, and prints tables."""

from __future__ import annotations

import logging

from shmacc_simulate.suite import show

if __name__ == "__main__":
    logging.getLogger("shmacc").setLevel(logging.ERROR)  # void steps are in the tables
    show()
