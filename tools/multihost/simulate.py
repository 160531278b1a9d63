"""Simulates rounds over many hosts, and writes the tables and plots. See ``--help``."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from shmacc_simulate import rates
from shmacc_simulate.suite import write

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> None:
    """Simulate rounds over up to hundreds of hosts, and write the tables and plots."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "simulation")
    parser.add_argument("--rates", action="store_true", help="measure this machine's rates instead")
    asked = parser.parse_args(arguments)
    if asked.rates:
        for kind, found in rates.measure().items():
            for name, rate in found.items():
                print(f"{kind} {name}: {rate / 1e9:.2f} GB/s")
        return
    logging.getLogger("shmacc").setLevel(logging.ERROR)  # void steps are in the tables
    began = time.monotonic()
    write(asked.output)
    print(f"{time.monotonic() - began:.0f} s; the results are in {asked.output}")


if __name__ == "__main__":
    main()
