"""Every call returns by its timeout, whatever a stopped process has locked.

docs/guarantees.md: "A process stopped *inside* an apply or take delays the others while it is
stopped; their timeouts work."
"""

import inspect
import itertools
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.lock_holder import held
from helpers.stepping_tracer import Mark, Traced, refusal
from helpers.support import LONG, update_once

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

NAME: Final = "stood.on"
SPECS: Final = {"rows": IndexedSlicesSpec((None, 2), "f4"), "array": TensorSpec((2,), "f4")}
KINDS: Final[dict[str, Callable[[str | None], Any]]] = {
    "sparse": lambda name: SparseConditionalAccumulator("f4", (None, 2), name),
    "dense": lambda name: ConditionalAccumulator("f4", (2,), name),
    "group": lambda name: AccumulatorGroup(SPECS, name, lanes=2),
    "parameters": lambda name: Parameters({"a": np.zeros(3)}, name, optimizer=optim.SGD(1.0)),
}


def _apply(acc: Any, **more: Any) -> object:
    rows = [1], np.ones((1, 2), np.float32)
    if isinstance(acc, AccumulatorGroup):
        return acc.apply({"rows": rows, "array": [1, 2]}, acc.global_step, **more)
    gradient = rows if isinstance(acc, SparseConditionalAccumulator) else ([1, 2],)
    return acc.apply_grad(*gradient, local_step=acc.global_step, **more)


def _in_a_round(acc: Any, **more: Any) -> None:
    with acc.round(1, **more):
        pass


def _apply_partial(acc: Any, count: int, **more: Any) -> object:
    kind = {SparseConditionalAccumulator: "sparse", ConditionalAccumulator: "dense"}
    with KINDS[kind.get(type(acc), "group")](None) as other:
        for _ in range(count):
            _apply(other)
        partial = other.take_partial(count)
    return acc.apply_partial(partial, acc.global_step, **more)


# A call gets a segment, a saved state of it, and a file with that state.
Call = Callable[..., object]
ANY: Final[dict[str, Call]] = {
    "snapshot": lambda it, *_, **t: it.snapshot(**t),
    "state": lambda it, *_, **t: it.state(**t),
    "restore": lambda it, state, _, **t: it.restore(state, **t),
    "save": lambda it, _, path, **t: shmacc.save(path, {"it": it}, **t),
    "load": lambda it, _, path, **t: shmacc.load(path, {"it": it}, **t),
}
OF_ACCUMULATORS: Final[dict[str, Call]] = {
    "apply": lambda acc, *_, **t: _apply(acc, **t),
    "apply of a contributor": lambda acc, *_, **t: _apply(acc, contributor=3, **t),
    "apply_partial": lambda acc, *_, **t: _apply_partial(acc, 2, **t),
    "apply_partial of nothing": lambda acc, *_, **t: _apply_partial(acc, 0, **t),
    "take": lambda acc, *_, **t: acc.take(1, **t),
    "take_partial": lambda acc, *_, **t: acc.take_partial(1, **t),
    "take_partial of anything": lambda acc, *_, **t: acc.take_partial(0, **t),
    "round": lambda acc, *_, **t: _in_a_round(acc, **t),
    "contributors": lambda acc, *_, **t: acc.contributors(**t),
    "set_global_step": lambda acc, *_, **t: acc.set_global_step(7, **t),
    "advance_step": lambda acc, *_, **t: acc.advance_step(7, **t),
    "unseal": lambda acc, *_, **t: acc.unseal(**t),
}
CASES: Final = [
    *itertools.product(("sparse", "dense", "group"), ANY | OF_ACCUMULATORS),
    *itertools.product(("parameters",), ANY),
]


def content(*segments: Any) -> list[Any]:
    states = [segment.state(timeout=LONG) for segment in segments]
    return [{key: array.tolist() for key, array in state.items()} for state in states]


@pytest.mark.parametrize(("kind", "call"), CASES, ids=lambda each: each)
def test_a_call_ends_by_its_timeout_while_a_stopped_process_has_the_lock(
    tmp_path: Path, kind: str, call: str
) -> None:
    path, make = tmp_path / "saved", (ANY | OF_ACCUMULATORS)[call]
    with KINDS[kind](NAME) as it:
        state = it.state()
        if kind != "parameters":
            _apply(it)
        shmacc.save(path, {"it": it})
        before, saved = content(it), path.read_bytes()
        with ExitStack() as stack:
            for lane in range(2 if kind == "group" else 1):
                stack.enter_context(held(NAME, layout.lane_byte(lane)))
            for timeout in (0, 0.05):
                with pytest.raises(errors.DeadlineExceededError):
                    make(it, state, path, timeout=timeout)
        assert content(it) == before
        assert path.read_bytes() == saved
        make(it, state, path, timeout=LONG)  # the calls that timed out left nothing half done
        it.unlink()


def test_an_apply_of_a_wrong_shape_ends_by_its_timeout() -> None:
    """The gradient may be stale, which the call can see only under the lock."""
    gradient = [1], np.ones((1, 3), np.float32)
    with KINDS["sparse"](NAME) as acc:
        with held(NAME), pytest.raises(errors.DeadlineExceededError):
            acc.apply_grad(*gradient, timeout=0.05)
        with pytest.raises(errors.InvalidArgumentError):
            acc.apply_grad(*gradient, timeout=LONG)
        acc.unlink()


# Public methods that are in neither dict above.
ELSEWHERE: Final = {
    *("apply_grad", "apply_indexed_slices_grad", "take_grad", "take_indexed_slices_grad"),
    "attach",  # test_attach_timeout.py
    *("wait_step", "steps"),  # take no lock
    *("take_async", "round_async", "wait_step_async", "steps_async"),  # the same in a thread
}
WITHOUT_A_WAIT: Final = {
    *("cancel", "close", "finish", "get", "items", "keys", "values", "member_specs"),
    *("num_accumulated", "stats", "unlink"),
}


def test_every_public_method_has_a_tested_timeout_or_never_waits() -> None:
    timed = {"update", "skip", *ELSEWHERE, *(call.split()[0] for call in ANY | OF_ACCUMULATORS)}
    found: set[str] = set()
    kinds = SparseConditionalAccumulator, ConditionalAccumulator, AccumulatorGroup, Parameters
    for one in (shmacc, *kinds):
        for name, method in inspect.getmembers(one, inspect.isroutine):
            if name.startswith("_") or name in WITHOUT_A_WAIT:
                continue
            has = "timeout" in inspect.signature(method).parameters
            assert has or one is shmacc, (one, name)
            found |= {name} if has else set()
    assert found == timed


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


@pytest.mark.parametrize("segment", ["params", NAME])
@pytest.mark.parametrize("call", [shmacc.save, shmacc.load])
def test_a_save_or_load_of_group_and_parameters_ends_by_its_timeout(
    segment: str, call: Any, both: tuple[AccumulatorGroup, Parameters], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    named: dict[str, Any] = dict(zip(("g", "p"), both, strict=True))
    shmacc.save(path, named)
    before, saved = content(*both), path.read_bytes()
    with held(segment), pytest.raises(errors.DeadlineExceededError):
        call(path, named, timeout=0.05)
    assert content(*both) == before
    assert path.read_bytes() == saved
    call(path, named, timeout=LONG)


@pytest.mark.skipif(refusal() is not None, reason=f"no tracing here: {refusal()}")
@pytest.mark.parametrize("call", ["update", "skip"])
def test_an_update_is_made_though_a_worker_stops_in_an_apply(
    call: str, both: tuple[AccumulatorGroup, Parameters]
) -> None:
    """The update's commit does not need the worker's lock; the block's end waits for it."""
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
    assert update_once(params, group, {"a": np.ones(3)})
    assert params["a"].tolist() == [number - 1 for number in made]
