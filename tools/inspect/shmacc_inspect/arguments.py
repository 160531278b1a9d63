"""What each verb does, and its arguments. Imports no library, so that help is printed at once."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shmacc_inspect import NAMESPACE_VARIABLE, formatting
from shmacc_inspect.sorting import SORTS, SORTS_OF_LIST

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORTEST: Final = 0.05  # seconds; the shortest interval
_NAMES: Final = (
    "a shared_name; RUN/NAME, one in a run; a segment's whole name in /dev/shm (shmacc....); or a "
    "glob in quotes"
)
_MOST: Final = 10**9  # the largest number that an option accepts
_LONGEST: Final = 10 * 365 * 86400.0  # seconds

Condition = tuple[str, int]


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        description: What it does, in full.
        examples: Command lines.
        declare: Declares its arguments, named as the parameters of its module's `run`.
    """

    description: str
    examples: str
    declare: Callable[[argparse.ArgumentParser], None]

    @property
    def summary(self) -> str:
        """What it does, in one line of the help."""
        first = self.description.partition(".\n")[0]
        return first[0].lower() + first[1:].partition(";")[0].partition(":")[0]


def _add_names(parser: argparse.ArgumentParser, *, without: str | None = None) -> None:
    """Declare NAME ...; `without`: what omitting it means (None: it must be given)."""
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+" if without is None else "*",
        help=_NAMES if without is None else f"{_NAMES}; without: {without}",
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every verb: -n, -A and --json."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="in this namespace and the runs started in it, or in those that a glob in quotes "
        f"matches, instead of that of {NAMESPACE_VARIABLE}",
    )
    group.add_argument(
        "-A",
        "--all-namespaces",
        dest="everywhere",
        action="store_true",
        help=f"in all namespaces, although {NAMESPACE_VARIABLE} is set",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON (docs/inspect-json.md)")


def _add_yes(parser: argparse.ArgumentParser) -> None:
    """Declare --yes."""
    parser.add_argument(
        "--yes", action="store_true", help="do it; without this, only say what would be done"
    )


def _seconds(least: float = 0.0) -> Callable[[str], float]:
    """Return an argument type for lengths of time of at least `least` seconds."""

    def length_of_time(text: str) -> float:
        try:
            value = formatting.parse_duration(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        if not least <= value <= _LONGEST or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not at least {least:g} s, or too long")
        return value

    return length_of_time


def _count(least: int) -> Callable[[str], int]:
    """Return an argument type for numbers that are at least `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {_MOST}")
        return int(text)

    return number


def _condition(text: str) -> Condition:
    what, equals, number = text.partition("=")
    if text == "gone":
        return what, 0
    if what in {"step", "count"} and equals:
        return what, _count(0)(number)
    raise argparse.ArgumentTypeError(f"{text!r} is none of step=N, count=N and gone")


def _list(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, without="all")
    parser.add_argument(
        "--orphaned", action="store_true", help="only those that no living process has attached"
    )
    parser.add_argument("--stalled", action="store_true", help="only those that stand still")
    parser.add_argument("--mine", action="store_true", help="only those of this user")
    parser.add_argument(
        "--sort",
        choices=SORTS_OF_LIST,
        default="name",
        help="what to sort by (name); numbers from the largest",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="only names, one a line")


def _show(parser: argparse.ArgumentParser) -> None:
    _add_names(parser)
    parser.add_argument(
        "--rows",
        metavar="K",
        type=_count(0),
        default=0,
        help="the K rows that most gradients of this round touched",
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="norm, largest, NaN and infinite numbers of the round's sums",
    )
    parser.add_argument(
        "--layout", action="store_true", help="its memory: offset, size and fill of each region"
    )


def _watch(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, without="all")
    parser.add_argument(
        "--interval",
        metavar="TIME",
        type=_seconds(_SHORTEST),
        default=1.0,
        help="how often to look: 0.5, 10s, 5m (1)",
    )
    parser.add_argument("--count", metavar="N", type=_count(1), help="end after so many intervals")
    parser.add_argument("--sort", choices=SORTS, default="state", help="what to sort by (state)")


def _check(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, without="all segments, and what is left of others")
    parser.add_argument("-q", "--quiet", action="store_true", help="only what is wrong, no notes")


def _clean(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, without="all")
    parser.add_argument(
        "--older-than",
        metavar="TIME",
        type=_seconds(),
        default=0.0,
        help="only what was last used longer ago: 90s, 10m, 2h, 3d",
    )
    parser.add_argument(
        "--private", action="store_true", help="only private accumulators', which no job uses again"
    )
    _add_yes(parser)


def _remove(parser: argparse.ArgumentParser) -> None:
    _add_names(parser)
    _add_yes(parser)
    parser.add_argument(
        "--force", action="store_true", help="also if it is in use, damaged, or of another version"
    )


def _cancel(parser: argparse.ArgumentParser) -> None:
    _add_names(parser)
    _add_yes(parser)


def _wait(parser: argparse.ArgumentParser) -> None:
    _add_names(parser)
    parser.add_argument(
        "--for",
        dest="condition",
        metavar="CONDITION",
        type=_condition,
        required=True,
        help="step=N: the step is at least N; count=N: at least N gradients are accumulated; "
        "gone: nothing has the name any more, or another segment has it",
    )
    parser.add_argument(
        "--timeout", metavar="TIME", type=_seconds(), help="for so long at most: 90s, 10m, 2h"
    )


def _metrics(parser: argparse.ArgumentParser) -> None:
    _add_names(parser, without="all")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        help="serve them by HTTP until Ctrl-C or SIGTERM; port 0 picks one",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="write them to this file, in one piece, for a textfile collector",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let --listen serve other machines: without encryption, to anybody who asks",
    )


VERBS: Final = {
    "list": Verb(
        """\
List segments, one row each.

A row has the segment's kind, round, attached processes, waiting takes, memory and state. A terminal
that is too narrow gets fewer columns; a pipe gets all of them, each one word. Segments of runs that
were started in the namespace are among them, as RUN/NAME.""",
        """\
  shmacc-inspect list
  shmacc-inspect list 'emb*' --sort bytes
  shmacc-inspect list --orphaned --mine
  shmacc-inspect list --stalled
  shmacc-inspect list --quiet --orphaned 'job7-*' | xargs -r shmacc-inspect remove --yes
  shmacc-inspect list --json | jq '.segments[] | select(.attached_dead > 0) | .name'""",
        _list,
    ),
    "show": Verb(
        """\
Describe segments in full: processes, waiting takes, lock, counters, and the verdict.

It takes and changes nothing, and waits for no lock.""",
        """\
  shmacc-inspect show embeddings
  shmacc-inspect show embeddings --rows 20 --values
  shmacc-inspect show shmacc.alice:embeddings 'tower.*'
  shmacc-inspect show embeddings --json | jq .lock""",
        _show,
    ),
    "watch": Verb(
        """\
Watch segments live: progress, rates, drops, and stragglers.

On a terminal, a screen with the rounds' progress towards what the waiting take requires, steps,
gradients and bytes a second, and the processes that have not applied in this round. In a pipe,
one line per interval and segment. A NAME that is removed is waited for; what a glob finds comes
and goes.""",
        """\
  shmacc-inspect watch
  shmacc-inspect watch embeddings 'tower.*' --interval 0.5
  shmacc-inspect watch --sort waited
  shmacc-inspect watch embeddings --interval 10 --count 6 >> progress.log
  shmacc-inspect watch --json | jq 'select(.stragglers != [])'

Keys: q quit; up, down, j, k, page up, page down, home, end, 1-9 pick a segment;
s sorts by the next column.""",
        _watch,
    ),
    "check": Verb(
        """\
Verify every invariant of segments.

The exit status is 1 if one is broken. It is 4 if nothing is wrong but something could not be read,
or compared.

Compares records, counters, sizes, rows and index, semaphores and names, and looks for leftovers,
stopped holders of locks, names that were removed while in use, and runs that are stopped, gone or
in a crash loop. Changes nothing, and waits for no lock. WRONG means that somebody has to act; a
note is worth knowing, and needs no action.""",
        """\
  shmacc-inspect check
  shmacc-inspect check --quiet 'job7-*' bias
  shmacc-inspect check --quiet || [ $? = 4 ] || page-somebody
  shmacc-inspect check --json | jq -r '.findings[].remedy'""",
        _check,
    ),
    "clean": Verb(
        """\
Remove segments that no living process uses; without --yes, only list them.

Also removes semaphores whose segment is gone. Death is proved by the kernel, never guessed, and
proved again at the moment of removal; what could not be judged is left and listed. Of a run that
lives nothing is removed; of one that is gone all, or nothing. Two cleaners at once do each other no
harm.""",
        """\
  shmacc-inspect clean                           what would be removed, and what not
  shmacc-inspect clean --yes
  shmacc-inspect clean --yes --older-than 2h 'job7-*'""",
        _clean,
    ),
    "remove": Verb(
        """\
Remove segments and their semaphores; without --yes, only name them.

Refuses one that living processes have attached, unless --force is given: these go on using it until
they close, and the next process that opens the name makes a new one. It refuses, too, what is in a
run that lives, or only a part of a named run that is gone. Of several, either all are removed or,
if one is refused, none.""",
        """\
  shmacc-inspect remove embeddings              what would be removed
  shmacc-inspect remove embeddings --yes
  shmacc-inspect remove embeddings 'tower.*' --yes --force""",
        _remove,
    ),
    "cancel": Verb(
        """\
End every waiting take with CancelledError; without --yes, only list them.

Nothing is consumed: the gradients stay for the next take. It needs no lock, so it also works
while the process that holds the lock is stopped: a take that waits for that lock, and so has no
entry in the queue yet, is cancelled too.""",
        """\
  shmacc-inspect cancel embeddings              which takes would be cancelled
  shmacc-inspect cancel embeddings --yes
  shmacc-inspect cancel 'job7.*' --yes""",
        _cancel,
    ),
    "wait": Verb(
        """\
Wait for a step, for gradients, or for the end of a segment.

Returns as soon as it has come about for all of them: exit status 0. It is 124 if that takes longer
than --timeout, and 3 if one is not there or goes away meanwhile. Attaches to nothing and delays
nobody: it looks many times a second.""",
        """\
  shmacc-inspect wait embeddings --for step=1000 --timeout 2h && cp -r checkpoints /archive
  shmacc-inspect wait embeddings --for count=8
  shmacc-inspect wait 'job7.*' --for gone --timeout 10m || page-somebody""",
        _wait,
    ),
    "metrics": Verb(
        """\
Print Prometheus metrics of segments; write them to a file, or serve them.

Counters and gauges with the labels `name` and `namespace`, or `run` and `role`. Needs
prometheus_client (`pip install prometheus_client`); --json does not.""",
        """\
  shmacc-inspect metrics
  shmacc-inspect metrics --output /var/lib/node_exporter/shmacc.prom
  shmacc-inspect metrics --listen 127.0.0.1:9470
  shmacc-inspect metrics --listen 10.0.0.7:9470 --insecure""",
        _metrics,
    ),
}
