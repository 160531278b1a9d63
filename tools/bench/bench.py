"""Runs the benchmarks: `python tools/bench/bench.py run`. See the package shmacc_bench."""

from __future__ import annotations

from shmacc_bench.cli import app

if __name__ == "__main__":
    app()
