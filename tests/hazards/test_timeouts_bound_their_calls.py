"""Every call returns by its timeout, whatever a stopped process has locked.

docs/guarantees.md: "A process stopped *inside* an apply or take delays the others while it is
stopped; their timeouts work."
"""

from __future__ import annotations

import inspect
import os
import select
import signal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.lock_holder import held
from helpers.stepping_tracer import Traced, refusal
from helpers.support import LONG

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    Parameters,
    SparseConditionalAccumulator,
    TensorSpec,
    _core,
    errors,
    optim,
)
from shmacc._base import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from helpers.stepping_tracer import Mark

NAME: Final = "stood.on"
ROWS: Final = [1], np.ones((1, 2), np.float32)
SPECS: Final = {"rows": IndexedSlicesSpec((None, 2), "f4"), "array": TensorSpec((2,), "f4")}
KINDS: Final[dict[type, Callable[[str | None], Any]]] = {
    SparseConditionalAccumulator: lambda name: SparseConditionalAccumulator("f4", (None, 2), name),
    ConditionalAccumulator: lambda name: ConditionalAccumulator("f4", (2,), name),
    AccumulatorGroup: lambda name: AccumulatorGroup(SPECS, name),
}


def _apply(acc: Any, **more: Any) -> object:
    if isinstance(acc, AccumulatorGroup):
        return acc.apply({"rows": ROWS, "array": [1, 2]}, acc.global_step, **more)
    gradient = ROWS if isinstance(acc, SparseConditionalAccumulator) else ([1, 2],)
    return acc.apply_grad(*gradient, local_step=acc.global_step, **more)


def _in_a_round(acc: Any, **more: Any) -> None:
    with acc.round(1, **more):
        pass


def _apply_partial(acc: Any, count: int, **more: Any) -> object:
    with KINDS[type(acc)](None) as other:
        for _ in range(count):
            _apply(other)
        partial = other.take_partial(count)
    return acc.apply_partial(partial, acc.global_step, **more)


# Of an accumulator and a path.
CALLS: Final[tuple[Callable[..., object], ...]] = (
    lambda acc, _, **more: _apply(acc, **more),
    lambda acc, _, **more: _apply(acc, contributor=3, **more),
    lambda acc, _, **more: _apply_partial(acc, 2, **more),
    lambda acc, _, **more: _apply_partial(acc, 0, **more),
    lambda acc, _, **more: acc.take(1, **more),
    lambda acc, _, **more: acc.take_partial(1, **more),
    lambda acc, _, **more: acc.take_partial(0, **more),
    lambda acc, _, **more: _in_a_round(acc, **more),
    lambda acc, _, **more: acc.snapshot(**more),
    lambda acc, _, **more: acc.contributors(**more),
    lambda acc, _, **more: acc.state(**more),
    lambda acc, path, **more: shmacc.save(path, {"it": acc}, **more),
)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_on_an_accumulator_end_by_their_timeout(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"
    with KINDS[kind](NAME) as acc:
        _apply(acc)
        with held(NAME):
            for call in CALLS:
                with pytest.raises(errors.DeadlineExceededError):
                    call(acc, path, timeout=0.05)
        assert acc.stats().num_accumulated == 1
        assert not path.exists()
        for call in CALLS:
            call(acc, path, timeout=LONG)
            if acc.num_accumulated() == 0:
                _apply(acc)
        acc.unlink()


def test_a_gradient_that_does_not_fit_ends_by_its_timeout() -> None:
    """It may be stale, which only the lock can tell."""
    gradient = [1], np.ones((1, 3), np.float32)
    with KINDS[SparseConditionalAccumulator](NAME) as acc:
        with held(NAME), pytest.raises(errors.DeadlineExceededError):
            acc.apply_grad(*gradient, timeout=0.05)
        with pytest.raises(errors.InvalidArgumentError):
            acc.apply_grad(*gradient, timeout=LONG)
        acc.unlink()


def test_calls_on_parameters_end_by_their_timeout(tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"
    with Parameters({"a": np.zeros(3)}, NAME) as params:
        calls: tuple[Callable[..., object], ...] = (
            params.snapshot,
            params.state,
            lambda **more: shmacc.save(path, {"it": params}, **more),
        )
        with held(NAME):
            for call in calls:
                with pytest.raises(errors.DeadlineExceededError):
                    call(timeout=0.05)
        assert not path.exists()
        for call in calls:
            call(timeout=LONG)
        params.unlink()


# Those that are tried here, and those that wait without a lock or are tried elsewhere.
TRIED: Final = {
    *("apply", "apply_grad", "apply_indexed_slices_grad", "apply_partial"),
    *("take", "take_grad", "take_indexed_slices_grad", "take_partial", "round"),
    *("snapshot", "contributors", "state", "save"),
    *("update", "skip"),  # below, and in test_waits.py
    "attach",  # test_attach_timeout.py
    *(
        "restore",
        "load",
        "set_global_step",
        "advance_step",
        "unseal",
    ),  # test_timeouts_of_every_call.py
    *("wait_step", "steps"),  # take no lock
    *("take_async", "round_async", "wait_step_async", "steps_async"),  # the same in a thread
}


def test_every_call_with_a_timeout_is_tested() -> None:
    timed = {
        name
        for one in (shmacc, *KINDS, Parameters)
        for name in dir(one)
        if inspect.isroutine(found := getattr(one, name))
        if not name.startswith("_") and "timeout" in inspect.signature(found).parameters
    }
    assert timed == TRIED


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[AccumulatorGroup, Parameters]]:
    with (
        Parameters({"a": np.zeros(3)}, "params", optimizer=optim.SGD(1.0)) as params,
        AccumulatorGroup(params.member_specs(), NAME, lanes=request.param) as group,
    ):
        group.apply({"a": np.ones(3)}, 0)
        yield group, params
        params.unlink()
        group.unlink()


@pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}")
@pytest.mark.parametrize("call", ["update", "skip"])
def test_an_update_is_made_though_a_worker_stops_in_an_apply(
    call: str, both: tuple[AccumulatorGroup, Parameters]
) -> None:
    """Its commit needs no lock of the worker's; the block's end waits for that lock."""
    group, params = both
    reader, writer = os.pipe()
    view = _core.view(names.segment_name(NAME).path)[2]
    assert view is not None
    lane = group.lanes - 1

    def one_round(_: Mark) -> None:
        with group.round(1) as taken:
            done = getattr(params, call)(taken, timeout=0.05)
            os.write(writer, b"made" if done else b"was in")
        os.write(writer, b"ended")

    def is_between() -> bool:
        return group.stats().update == "begun" and not view.lock_state(lane)[0]

    def hear() -> bytes:
        assert select.select([reader], [], [], LONG)[0], "the chief waits on"
        return os.read(reader, 100)

    with Traced(one_round) as chief:
        chief.run_until(is_between)
        with held(NAME, layout.lane_byte(lane)):
            chief.stop()
            os.kill(chief.pid, signal.SIGCONT)
            assert hear() == b"made"
            assert params.step == 1
            assert group.stats().update == "begun"
        assert hear() == b"ended"
        assert chief.end() == 0
    view.close()
    os.close(reader)
    os.close(writer)
    stats = group.stats()
    assert (stats.global_step, stats.update, stats.round_pid, stats.taken) == (1, None, None, 1)
    made = [0.0] * 3 if call == "skip" else [-1.0] * 3
    assert params["a"].tolist() == made
    group.apply({"a": np.ones(3)}, 1)
    with group.round(1) as taken:
        assert params.update(taken)
    assert params["a"].tolist() == [number - 1 for number in made]
