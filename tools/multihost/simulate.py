"""Simulates rounds over many hosts, and prints tables. See ``--help``."""

from __future__ import annotations

import argparse
import logging

from shmacc_simulate import rates
from shmacc_simulate.suite import show


def main(arguments: list[str] | None = None) -> None:
    """Simulate rounds over up to hundreds of hosts, and print tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rates", action="store_true", help="measure this machine's rates instead")
    if parser.parse_args(arguments).rates:
        for kind, found in rates.measure().items():
            for name, rate in found.items():
                print(f"{kind} {name}: {rate / 1e9:.2f} GB/s")
        return
    logging.getLogger("shmacc").setLevel(logging.ERROR)  # void steps are in the tables
    show()


if __name__ == "__main__":
    main()
