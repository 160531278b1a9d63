"""Runs the benchmarks: `python tools/bench/bench.py run`. See the package shmacc_bench."""

from __future__ import annotations

import sys

from shmacc_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
