"""Every call that waits for a lock has a timeout, because a stopped process may hold the lock."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.lock_holder import held
from helpers.segment_layout import lane_byte
from helpers.support import LONG

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GROUP, PARAMS = "g", "p"
Both = dict[str, Any]
CALLS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "restore": (GROUP, lambda both, _, **t: both[GROUP].restore(both["state of g"], **t)),
    "set_global_step": (GROUP, lambda both, _, **t: both[GROUP].set_global_step(7, **t)),
    "advance_step": (GROUP, lambda both, _, **t: both[GROUP].advance_step(7, **t)),
    "unseal": (GROUP, lambda both, _, **t: both[GROUP].unseal(**t)),
    "state": (GROUP, lambda both, _, **t: both[GROUP].state(**t)),
    "snapshot": (GROUP, lambda both, _, **t: both[GROUP].snapshot(**t)),
    "contributors": (GROUP, lambda both, _, **t: both[GROUP].contributors(**t)),
    "take": (GROUP, lambda both, _, **t: both[GROUP].take(1, **t)),
    "apply": (GROUP, lambda both, _, **t: both[GROUP].apply({}, 9, **t)),
    "restore of parameters": (
        PARAMS,
        lambda both, _, **t: both[PARAMS].restore(both["state of p"], **t),
    ),
    "state of parameters": (PARAMS, lambda both, _, **t: both[PARAMS].state(**t)),
    "snapshot of parameters": (PARAMS, lambda both, _, **t: both[PARAMS].snapshot(**t)),
    "load, the group": (GROUP, lambda both, path, **t: shmacc.load(path, named(both), **t)),
    "load, the parameters": (PARAMS, lambda both, path, **t: shmacc.load(path, named(both), **t)),
    "save, the group": (GROUP, lambda both, path, **t: shmacc.save(path, named(both), **t)),
    "save, the parameters": (PARAMS, lambda both, path, **t: shmacc.save(path, named(both), **t)),
}


def named(both: Both) -> Both:
    return {name: both[name] for name in (GROUP, PARAMS)}


def content(both: Both) -> list[Any]:
    states = [both[name].state(timeout=LONG) for name in (GROUP, PARAMS)]
    return [{key: array.tolist() for key, array in state.items()} for state in states]


@pytest.fixture
def both() -> Iterator[Both]:
    with (
        Parameters({"w": np.zeros(3)}, PARAMS, optimizer=optim.SGD(1.0)) as params,
        AccumulatorGroup(params.member_specs(), GROUP, lanes=2) as group,
    ):
        states = {"state of g": group.state(), "state of p": params.state()}
        group.apply({"w": np.ones(3)}, 0)
        with group.round(1) as taken:
            params.update(taken)
        group.apply({"w": np.ones(3)}, 1)
        yield {GROUP: group, PARAMS: params, **states}
        group.unlink()
        params.unlink()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_by_its_timeout_while_a_stopped_process_has_the_lock(
    both: Both, tmp_path: Path, call: str
) -> None:
    path = tmp_path / "saved"
    shmacc.save(path, named(both))
    before, saved = content(both), path.read_bytes()
    name, make = CALLS[call]
    with ExitStack() as stack:
        for lane in range(2 if name == GROUP else 1):
            stack.enter_context(held(name, lane_byte(lane)))
        for timeout in (0, 0.05):
            with pytest.raises(errors.DeadlineExceededError):
                make(both, path, timeout=timeout)
    assert content(both) == before
    assert path.read_bytes() == saved
    for wrong in (-1, math.nan, "1", True):
        with pytest.raises(errors.InvalidArgumentError, match="timeout"):
            make(both, path, timeout=wrong)
    make(both, path, timeout=LONG)  # it was given up wholly, and can be made
    if call != "take":
        make(both, path, timeout=None)


def test_every_public_method_has_a_timeout_or_waits_for_nobody() -> None:
    """The listed methods of accumulators and parameters wait for nobody."""
    no_wait = "cancel close finish get items keys values member_specs num_accumulated stats unlink"
    for kind in (
        shmacc.SparseConditionalAccumulator,
        shmacc.ConditionalAccumulator,
        AccumulatorGroup,
        Parameters,
    ):
        for name, method in inspect.getmembers(kind, callable):
            if not name.startswith("_") and name not in no_wait.split():
                assert "timeout" in inspect.signature(method).parameters, (kind, name)
