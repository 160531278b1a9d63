"""Runs the scenarios: in each step every peer has its turn, as with the cases."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shmacc_bench.fleet import Fleet, Member, PeerFailedError
from shmacc_bench.peers.base import UnsupportedError
from shmacc_bench.results import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shmacc_bench.scenarios import Plan


def run_scenarios(
    fleet: Fleet, plans: Mapping[str, Plan], *, quick: bool, tell: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each scenario found about each peer, or the problem that kept it from it."""
    for name, plan in plans.items():
        steps: dict[str, list[dict[str, Any]]] = {}
        problems: dict[str, str] = {}
        members = fleet.ready(plan.peers)
        for peer, member in members.items():
            tell(f"{name}: starting {peer}")
            _ask(problems, peer, member, "start", name, quick)
        for step in range(plan.quick_steps if quick else plan.steps):
            tell(f"{name}: step {step + 1}")
            for peer, member in members.items():
                if peer not in problems:
                    measured = _ask(problems, peer, member, "step")
                    steps.setdefault(peer, []).extend([measured] if measured else [])
        for peer, member in members.items():
            _ask({}, peer, member, "finish")
        summary = importlib.import_module(f"shmacc_bench.scenarios.{name}").summary
        yield (
            name,
            {
                peer: plain(summary(steps[peer]))
                if steps.get(peer)
                else {"problem": problems.get(peer, "nothing measured")}
                for peer in members
            },
        )


def _ask(
    problems: dict[str, str], peer: str, member: Member, request: str, *arguments: object
) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] | None = member.ask(request, *arguments)
    except (UnsupportedError, PeerFailedError) as problem:
        problems[peer] = (str(problem).strip().splitlines() or [type(problem).__name__])[-1]
        return None
    return answer
