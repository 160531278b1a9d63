"""A reader without the lock sees what was committed at one instant.

Tables are read while a chief adds and removes rows, grows a table, is stopped, or is killed. Each
row holds its id and version, so that the tests can check every number that was read.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.busy import busy
from helpers.stepping_tracer import Mark, needs_ptrace
from helpers.stepping_walk import stops
from helpers.support import EVERY_INSTANT, until, update_once
from helpers.training import training

import shmacc
from shmacc import _core, init, optim
from shmacc._base import names
from shmacc._segment.stats import stats_of

NAME: Final = "looked-at"
SHAPES: Final = [(1,), (2, 3), (4, 5, 6), (7,) * 4]
LOOKS: Final = 2_000
WIDTH: Final = 24
# Ids that stay, and others that come and go.
STAY: Final = np.arange(40, dtype=np.int64) * 2**50 + 7
GO: Final = np.arange(60, dtype=np.int64) + 2**40
NOBODY: Final = -1.0
# The width of a row that takes long to read, and the number of points where readers are stopped.
_WIDE: Final = 512
_STOPS: Final = 400 if EVERY_INSTANT else 12
_FORKS: Final = 3
# With this many ids coming and going, every second update crowds the index.
_CROWD: Final = 500
VERSIONS: Final = 1000.0
SPEC: Final = shmacc.TableSpec((WIDTH,), "float64", initial=init.Constant(NOBODY))


def numbers_of(ids: Any) -> Any:
    """Return the number that each id's row holds."""
    known = np.concatenate([STAY, GO])
    return np.argsort(known)[np.searchsorted(np.sort(known), ids)] + 1.0


def rows_of(ids: Any, version: float) -> Any:
    return np.repeat((numbers_of(ids) * VERSIONS + version % VERSIONS)[:, None], WIDTH, axis=1)


def judge(params: shmacc.Parameters) -> None:
    """Read all ids once, and check each row."""
    table = params["t"]
    stay, go = table[STAY], table[GO]
    assert (np.floor(stay / VERSIONS) == numbers_of(STAY)[:, None]).all()
    there = go != NOBODY
    assert (there.all(axis=1) == there.any(axis=1)).all()
    assert (np.floor(go / VERSIONS) == numbers_of(GO)[:, None])[there].all()
    assert table.contains(STAY).all()
    assert (table.last_updated(STAY) >= 0).all()
    ids = table.ids()
    assert (ids[1:] > ids[:-1]).all()
    assert np.isin(STAY, ids).all()
    assert np.isin(ids, np.concatenate([STAY, GO])).all()


@pytest.fixture(name="params")
def _params() -> Iterator[shmacc.Parameters]:
    with training({"t": SPEC}, optim.SGD(1), ("params", "group")) as (params, _):
        _set(params, STAY, 0)
        yield params


def _set(params: shmacc.Parameters, ids: Any, version: int, remove: Any = ()) -> None:
    with shmacc.AccumulatorGroup.attach("group") as group:
        if group.num_accumulated() == 0:
            group.apply({}, group.global_step)
        with group.round(1) as taken:
            params.update(taken, {"t": (ids, rows_of(ids, version))}, remove={"t": remove})


def _chief(*, pipe: Pipe) -> None:
    """Update for ever; rows come, go and return, in other places."""
    rng = np.random.default_rng(0)
    there = np.empty(0, np.int64)
    with shmacc.Parameters.attach("params") as params:
        pipe.say()
        for version in range(1, 10**9):
            ids = np.concatenate([STAY[rng.random(len(STAY)) < 0.5], GO[rng.random(len(GO)) < 0.3]])
            remove = there[rng.random(len(there)) < 0.5]
            _set(params, ids, version, remove)
            there = params["t"].ids()
            there = there[np.isin(there, GO)]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_readers_beside_a_chief_that_is_stopped_or_killed_see_whole_rows(
    params: shmacc.Parameters, end: signal.Signals
) -> None:
    for _ in range(4):
        with Apart(_chief).ready() as chief:
            for _ in range(5):
                judge(params)
            chief.signal(end)
            for _ in range(20):
                judge(params)
            chief.kill()
        params.snapshot()
        judge(params)


def _again(params: shmacc.Parameters) -> None:
    """Run a child forked beside reading threads: read by the parent's handle, and by a new one."""
    judge(params)
    with shmacc.Parameters.attach("params") as again:
        judge(again)
    judge(params)


def _with_threads(params: shmacc.Parameters) -> None:
    with busy(*[lambda: judge(params)] * 3):
        for _ in range(_FORKS):
            run_apart(_again, params)


@pytest.mark.threads
@pytest.mark.beyond_asan  # a child may be forked while its allocator holds a lock
def test_threads_read_whole_rows_while_their_process_forks(params: shmacc.Parameters) -> None:
    with Apart(_chief).ready() as chief:
        run_apart(_with_threads, params)
        chief.kill()


@contextmanager
def _table(shape: tuple[int, ...], ids: Any) -> Iterator[Callable[..., None]]:
    """Make a table with version 1 of `ids`; yield a function that replaces its rows."""
    spec = shmacc.TableSpec(shape, "float64", initial=init.Constant(NOBODY))
    with training({"t": spec}, optim.SGD(1), ("params", "group")) as (params, group):

        def replace(version: int, there: Any, gone: Any = ()) -> None:
            rows = np.full((len(there), *shape), version, np.float64)
            values = {"t": (np.array(there, np.int64), rows)}
            update_once(params, group, {}, values, remove={"t": gone})

        replace(1, ids)
        yield replace


def _read_row(number: int, width: int, versions: set[float], mark: Mark) -> None:
    with shmacc.Parameters.attach("params") as mine:
        row, ids = np.empty(width), np.array([number])
        rows, into = mine["t"]._access().rows, row.view(np.uint8)
        rows(ids, 0, into)
        mark()
        rows(ids, 0, into)
        mark()
        assert row.min() == row.max(), row
        assert row[0] in versions


@needs_ptrace
def test_a_reader_stopped_in_a_row_sees_no_other_ids_row() -> None:
    """Meanwhile the row's id is removed, another id uses its place, and the first id returns."""
    read = partial(_read_row, 5, _WIDE, {NOBODY, 1, 3})
    with _table((_WIDE,), [5]) as replace:
        for number, _ in enumerate(stops(read, _STOPS, 0.1, 0.75)):
            replace(1, [], [5])
            replace(2, [6])
            replace(2, [], [6])
            replace(1 if number % 2 else 3, [5])


@needs_ptrace
def test_a_reader_stopped_while_indexes_are_built_finds_its_row() -> None:
    """Its index is overwritten meanwhile, so a miss in it does not prove that the row is absent."""
    read = partial(_read_row, 2**40, 1, {1})
    with _table((), [2**40]) as replace:
        gone = np.empty(0, np.int64)
        for _ in stops(read, _STOPS, 0.2, 0.65):
            for _ in range(5):
                new = np.arange(_CROWD) + (gone[0] + 1000 if len(gone) else 0)
                replace(2, new, gone)
                gone = new


def _turn(*, pipe: Pipe) -> None:
    gradients = [np.ones(shape, np.float32) for shape in SHAPES]
    acc: Any = shmacc.attach(NAME)
    pipe.say("turning")
    while True:
        for gradient in gradients:
            acc.apply_grad(gradient, shmacc.NEVER_STALE)
            acc.take_grad(1)


def test_a_reader_never_mixes_the_shapes_of_two_rounds() -> None:
    """Each round has another shape; every second round uses the same place in the header."""
    with shmacc.ConditionalAccumulator("f4", None, NAME, unlink_on_close=True):
        view = _core.view(names.segment_name(NAME).path)[2]
        assert view is not None
        with Apart(_turn).ready():
            seen: set[Any] = set()

            def look() -> bool:
                for _ in range(LOOKS):
                    shape = view.state()["round_shape"]
                    seen.add(None if shape is None else tuple(shape))
                return seen >= set(SHAPES)

            until(look)
        assert seen <= {None, *SHAPES}


def _count(mark: Mark) -> None:
    acc: Any = shmacc.attach(NAME)
    with acc:
        acc._handle.state()
        mark()
        state = acc._handle.state()
        mark()
        seen = stats_of(state)
        assert seen.applied == seen.taken + seen.discarded + seen.num_accumulated, seen


def _apply_to_both(acc: Any) -> None:
    for contributor in range(2):
        acc.apply_grad([1.0], shmacc.NEVER_STALE, contributor=contributor)


@needs_ptrace
def test_a_reader_does_not_add_counts_of_two_rounds() -> None:
    """The reader stands still between two lanes."""
    with shmacc.ConditionalAccumulator("f4", None, NAME, lanes=2, unlink_on_close=True) as acc:
        _apply_to_both(acc)
        # Stop the reader only before it asks the kernel who is alive.
        for _ in stops(_count, _STOPS, 0.04, 0.25):
            acc.take_grad(2)
            _apply_to_both(acc)
