"""Runs the benchmarks: `python tools/bench/bench.py run`."""

import argparse
import importlib
import os
import platform
import sys
import time
from pathlib import Path

from shmacc_bench.parts import PARTS


def main(arguments: list[str] | None = None) -> int:
    """Measure shmacc beside what one would use otherwise; print tables in Markdown."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    run = verbs.add_parser("run", help="single operations and rounds")
    run.add_argument("--quick", action="store_true", help="what has goals, in fewer turns")
    run.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART",
                     help=f"of {', '.join(PARTS)}")  # fmt: skip
    run.set_defaults(does=_run)
    compare = verbs.add_parser("compare", help="train one model by each way, with deaths")
    compare.add_argument("--ways", nargs="+", metavar="WAY", help="names of modules in ways/")
    compare.add_argument("--turns", type=int, default=3, help="the median counts")
    compare.set_defaults(does=_compare)
    asked = parser.parse_args(arguments)
    asked.does(asked)
    return 0


def _run(asked: argparse.Namespace) -> None:
    missed: list[str] = []
    print(_machine(), flush=True)
    for part in asked.parts:
        begun = time.monotonic()
        try:
            module = importlib.import_module(f"shmacc_bench.parts.{part}")
            for table in module.measure(asked.quick):
                print(table, flush=True)
                missed += table.missed
        except ImportError as error:
            print(f"({part} is left out: {error})", file=sys.stderr)
        print(f"({part}: {time.monotonic() - begun:.0f} s)", file=sys.stderr)
    print("\n".join(["Goals that were missed:", *(missed or ["none"])]))


def _compare(asked: argparse.Namespace) -> None:
    from shmacc_bench.compare import training  # it needs torch

    print(_machine())
    print(training.compare(asked.ways or training.WAYS, asked.turns))


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{len(os.sched_getaffinity(0))} cores of {models[0] if models else platform.machine()}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f} before.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
