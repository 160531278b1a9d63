"""Walks the world of hosts every way: the protocol holds, and each rule left out leads to a fault.

python tools/multihost/search.py            # all but the large searches: an hour
python tools/multihost/search.py --quick    # only the searches that the tests make
python tools/multihost/search.py --large    # all searches: hours
python tools/multihost/search.py --kinds pair --failures 1 --machines 3 --without cut
"""

from __future__ import annotations

import argparse
import logging
import sys

from shmacc_hosts.cases import CASES, Case
from shmacc_hosts.faults import CHOICES, EVENTS
from shmacc_hosts.rules import RULES


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only what the tests search")
    parser.add_argument("--large", action="store_true", help="the large searches, too")
    parser.add_argument("--limit", type=int, default=2_000_000, help="the most states")
    parser.add_argument("--kinds", help=f"one search, of {', '.join(sorted({*EVENTS, *CHOICES}))}")
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--without", default="", help=f"a rule of {', '.join(RULES)}")
    parser.add_argument("--start", default="", help="steps that come first, by their names")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if given.kinds:
        of = (given.kinds, given.failures, given.start, given.without, given.steps, given.machines)
        return not Case(*of).run(given.limit)
    sizes = {"quick"} if given.quick else {"quick", "", *(["large"] if given.large else [])}
    chosen = [case for case in CASES if case.size in sizes]
    wrong = [case for case in chosen if not case.run(given.limit)]
    print(f"{len(chosen)} searches; not as expected: {wrong or 'nothing'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
