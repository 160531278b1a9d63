"""Measures cases: in each round every peer has its turn, so that all see the same machine.

Turns, not single calls: a turn starts with calls that are not counted, so that nobody is timed on a
cache that the one before has filled. The order of the turns moves on by one in each round.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from shmacc_bench.fleet import Fleet, Member, PeerFailedError
from shmacc_bench.peers.base import UnsupportedError
from shmacc_bench.samples import Summary, paired_ratio, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shmacc_bench.cases import Case

MAIN_PEER = "shmacc"


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How long a case is measured."""

    rounds: int
    turn_ns: int
    most_samples: int  # in one turn
    peer_seconds: float  # a peer that has used this much sits the further rounds out
    fewest_rounds: int  # but not before it took part in so many


FULL = Effort(rounds=15, turn_ns=12_000_000, most_samples=200, peer_seconds=0.5, fewest_rounds=5)
QUICK = Effort(rounds=5, turn_ns=6_000_000, most_samples=100, peer_seconds=0.3, fewest_rounds=3)


@dataclasses.dataclass(slots=True)
class Measured:
    """What one peer did in one case: the nanoseconds of its turns, or why there are none."""

    answer: str = ""
    turns: list[list[float]] = dataclasses.field(default_factory=list)
    problem: str = ""

    def summary(self) -> Summary:
        """Return the distribution of all samples, in microseconds."""
        return summarise([sample / 1000 for turn in self.turns for sample in turn])


def run_cases(
    fleet: Fleet, cases: Sequence[Case], effort: Effort, tell: Callable[[str], None]
) -> Iterator[tuple[Case, dict[str, Measured]]]:
    """Measure the cases one after the other, each workload opened once by each peer."""
    for workload, group in itertools.groupby(cases, key=lambda case: case.workload):
        same = list(group)
        wanted = {name for case in same for name in case.peers}
        members = fleet.ready([name for name in fleet.about if name in wanted])
        opened: dict[str, Measured] = {}
        for name, member in members.items():
            opened[name] = measured = Measured()
            try:
                measured.answer = member.ask("open", workload)
            except (UnsupportedError, PeerFailedError) as problem:
                measured.problem = _first_words(problem)
        for case in same:
            tell(case.name)
            chosen = {name: member for name, member in members.items() if name in case.peers}
            yield case, _run_case(case, chosen, opened, effort)
        for member in members.values():
            _ask_quietly(member, "close")


def _run_case(
    case: Case, members: dict[str, Member], opened: dict[str, Measured], effort: Effort
) -> dict[str, Measured]:
    results = {
        name: Measured(answer=opened[name].answer, problem=opened[name].problem) for name in members
    }
    spent = dict.fromkeys(members, 0.0)
    for name, measured in results.items():
        if not measured.problem:
            _try(measured, members[name], "begin", case.operation.value)
    for round_number in range(effort.rounds):
        names = [name for name in members if not results[name].problem]
        start = round_number % max(1, len(names))
        for name in names[start:] + names[:start]:
            measured = results[name]
            if spent[name] > effort.peer_seconds and len(measured.turns) >= effort.fewest_rounds:
                continue
            turn = _try(measured, members[name], "block", effort.turn_ns, effort.most_samples)
            if turn is not None:
                measured.turns.append(turn)
                spent[name] += sum(turn) / 1e9
    return results


def _try(
    measured: Measured, member: Member, request: str, *arguments: object
) -> list[float] | None:
    """Ask, and keep a refusal or a failure with the measurement instead of ending the run."""
    try:
        answer: list[float] | None = member.ask(request, *arguments)
    except (UnsupportedError, PeerFailedError) as problem:
        measured.problem = _first_words(problem)
        return None
    return answer


def _ask_quietly(member: Member, request: str) -> None:
    try:
        member.ask(request)
    except (UnsupportedError, PeerFailedError):
        member.kill()  # what it could not close goes with it


def _first_words(problem: Exception) -> str:
    """Return the last line of a traceback, which has the error, or the message itself."""
    lines = str(problem).strip().splitlines()
    return lines[-1] if lines else type(problem).__name__


def ratios(results: dict[str, Measured]) -> dict[str, Summary]:
    """Return shmacc's time over each other peer's, paired by round: below 1 shmacc is faster."""
    mine = results.get(MAIN_PEER)
    if mine is None or not mine.turns:
        return {}
    found = {}
    for name, theirs in results.items():
        if name != MAIN_PEER and theirs.turns:
            ratio = paired_ratio(mine.turns, theirs.turns)
            if math.isfinite(ratio.median):
                found[name] = ratio
    return found
