"""The extension's reports of segments have exactly the keys and types of their TypedDicts."""

import contextlib
import os
import threading
import types
import typing
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import LONG, until
from helpers.training import training

import shmacc
from shmacc import _core, errors, inspection
from shmacc._base import layout, names, reports
from shmacc._segment import removal

NAME: Final = "reported"
ROWS: Final = np.array([1, 4]), np.ones((2, 3), np.float32)
MEMBERS: Final = {"rows": shmacc.IndexedSlicesSpec((None, 3)), "all": shmacc.TensorSpec((2,))}


def differences(value: Any, hint: Any, where: str = "") -> Iterator[str]:
    """Yield where a value does not fit a type. A bool is no int; a TypedDict must have all keys."""
    if isinstance(hint, types.UnionType):
        found = [list(differences(value, each, where)) for each in typing.get_args(hint)]
        yield from found[0] if all(found) else ()
        return
    is_dict = typing.is_typeddict(hint)
    if type(value) is not (dict if is_dict else typing.get_origin(hint) or hint):
        yield f"{where}: {type(value)}"
    elif is_dict:
        hints = typing.get_type_hints(hint)
        yield from (f"{where}: {key!r}" for key in value.keys() ^ hints.keys())
        for key in value.keys() & hints.keys():
            yield from differences(value[key], hints[key], f"{where}.{key}")
    elif type(value) is tuple:
        for each, of_each in zip(value, typing.get_args(hint), strict=True):
            yield from differences(each, of_each, f"{where}()")
    elif type(value) is list:
        for each in value:
            yield from differences(each, typing.get_args(hint)[0], f"{where}[]")


def check(value: Any, hint: Any) -> None:
    assert list(differences(value, hint, getattr(hint, "__name__", str(hint)))) == []


def check_view(tables: int) -> dict[str, list[Any]]:
    """Check all reports of a view against their types; return the reports that may be empty."""
    with contextlib.closing(removal.view(names.segment_name(NAME))) as view:
        check(view.config(), reports.LaneMemberConfig)
        check(view.tables(), list[reports.LaneMember])
        assert len(view.tables()) == tables
        each: _core.SegmentView
        for each in (view, *(view.table(t["lane"], t["member"]) for t in view.tables())):
            check(each.state(), reports.LaneMemberState)
            assert each.state()["counters"].keys() == set(inspection.Stats.COUNTERS)
        check(view.participants(), list[reports.Participant])
        check(view.waiters(), list[reports.Waiter])
        check(view.events(), list[reports.Event])
        check(view.departures(), list[reports.Departed])
        return {
            "participants": view.participants(),
            "waiters": view.waiters(),
            "events": view.events(),
            "rounds": [view.state()["round"]] if view.state()["round"] else [],
        }


MAKE: Final[list[tuple[Any, tuple[Any, ...], int]]] = [
    (shmacc.SparseConditionalAccumulator, ("float32", (None, 3)), 4),
    (shmacc.ConditionalAccumulator, ("bfloat16", None), 4),
    (shmacc.AccumulatorGroup, (MEMBERS,), 6),
]


def _apply(acc: Any, contributor: int | None = None) -> None:
    if isinstance(acc, shmacc.AccumulatorGroup):
        acc.apply({"rows": ROWS, "all": np.ones(2)}, 0, contributor=contributor)
    elif isinstance(acc, shmacc.SparseConditionalAccumulator):
        acc.apply_grad(*ROWS, contributor=contributor)
    else:
        acc.apply_grad(np.ones(4))


@pytest.mark.parametrize(("make", "arguments", "tables"), MAKE)
def test_accumulator_reports_fit_types(make: Any, arguments: tuple[Any, ...], tables: int) -> None:
    with make(*arguments, NAME, lanes=2, capacity=200, unlink_on_close=True) as acc:
        _apply(acc, contributor=7)
        check(acc._handle.config(), reports.Config)
        check(acc._handle.state(), reports.State)
        quiet = check_view(tables)
        assert quiet["participants"]
        assert not any(quiet[kind] for kind in ("waiters", "events", "rounds"))
        acc.take_partial(num_required=1, seal=True)
        acc.unseal()
        with type(acc).attach(NAME) as other:
            _apply(other)
            acc.apply_partial(other.take_partial())
        with acc.round(1), _waiting(acc):
            check(acc._handle.state(), reports.State)
            assert all(check_view(tables).values())


@contextlib.contextmanager
def _waiting(acc: Any) -> Iterator[None]:
    """Let a take wait in a thread during the block; then cancel it."""

    def take() -> None:
        with pytest.raises(errors.CancelledError):
            acc.take(100, timeout=LONG)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        until(lambda: acc.stats().waiting == 1)
        yield
    finally:
        acc.cancel()
        thread.join()


def test_reports_of_ended_processes_have_the_declared_types() -> None:
    def fail() -> None:
        with shmacc.AccumulatorGroup.attach(NAME) as group, group.round(1):
            group.apply({}, 0)
            raise ValueError("no data")

    def die() -> None:
        group = shmacc.AccumulatorGroup.attach(NAME)
        group.apply({}, 0)
        os._exit(0)

    with shmacc.AccumulatorGroup(MEMBERS, NAME, unlink_on_close=True) as group:
        group.apply({}, 0)
        with pytest.raises(ValueError, match="no data"):
            run_apart(fail)
        pid = os.fork()
        if pid == 0:
            die()
        os.waitpid(pid, 0)
        shmacc.AccumulatorGroup.attach(NAME).close()
        check_view(3)
        with contextlib.closing(removal.view(names.segment_name(NAME))) as view:
            found = sorted((gone["died"], gone["reason"]) for gone in view.departures())
            assert found == [(False, "ValueError: no data"), (True, "")]
            assert "ValueError: no data" in {event["reason"] for event in view.events()}


def test_reports_of_shared_arrays_have_the_declared_types() -> None:
    contents = {"vectors": np.ones((2, 3)), "step": np.array(4), "mask": np.zeros(3, np.bool_)}
    with shmacc.SharedArrays(contents, NAME, unlink_on_close=True) as arrays:
        check(arrays._handle.config(), reports.Config)
        check(arrays._handle.state(), reports.State)
        assert check_view(4)["participants"]


def test_reports_of_parameters_have_the_declared_types() -> None:
    contents = {"all": np.ones(2, np.float32)}
    optimizer = shmacc.optim.SGD(0.5)
    with training(contents, optimizer, ("parameters", NAME)) as (params, group):
        check(params._handle.config(), reports.Config)
        group.apply({"all": np.ones(2)}, 0)
        with group.round(1) as taken:
            params.update(taken)
            check(group._handle.state(), reports.State)
            assert group._handle.state()["update"] is not None
            check_view(2)


def test_activities_in_python_have_the_same_names_as_in_the_extension() -> None:
    assert set(layout.Activity) == set(layout.ACTIVITY_NAMES.values())
