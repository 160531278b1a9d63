"""Makes every public call on a segment that the test may have damaged.

A process called the victim makes the calls. It has a small /dev/shm of its own, so that a wrong
size cannot use up the machine's memory. If a signal kills the victim, the test fails.
"""

import contextlib
import logging
import os
import pickle
import random
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from helpers.apart import Apart, Pipe
from helpers.damage import Damage
from helpers.segment_file import SegmentFile
from helpers.support import SANITIZED

import shmacc
from shmacc import inspection, testing
from shmacc._base import names
from shmacc._core import RoundResult

SHM_BYTES: Final = 64 << 20
PATIENCE: Final = 120.0 if SANITIZED else 30.0
VICTIM, OTHER, WITNESS = "victim", "other", "witness"

# These calls look at every process of the machine: only one scenario in `_SELDOM` makes them.
_SLOW: Final = ("inspection.check", "inspection.describe")
_SELDOM: Final = 4
_THREAD_PATIENCE: Final = 30.0

# Seconds that an apply waits: damage may make a round seem open, or the capacity full, for ever.
_PATIENCE: Final = 0.05


@dataclass(frozen=True)
class Scenario:
    """A segment to be damaged, and how it is used.

    Attributes:
        kind: "sparse", "dense" or "group" (with one member of each kind).
        dtype: The dtype of the accumulator, or of both members.
        shape: The shape of a row, or of the dense array.
        applies: How many gradients the segment holds.
        taken: Whether a round was taken before these gradients were applied.
        attached: Whether the victim has the segment open when it is damaged.
        waiting: Whether a thread of the victim waits in the queue (only if `attached`).
        order: The seed for the order of the calls.
        lanes: The number of lanes.
        contributors: Whether the gradients have contributors.
    """

    kind: str = "sparse"
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    applies: int = 2
    taken: bool = False
    attached: bool = True
    waiting: bool = False
    order: int = 0
    lanes: int = 1
    contributors: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a call ended: `error` is the exception's class, or "" if the call returned."""

    call: str
    error: str
    fine: bool
    detail: str


class Victim:
    """Runs calls on damaged segments in another process; starts a new one after its death."""

    def __init__(self, address_space: int = 4 << 30) -> None:
        """Limit the calls to this many more bytes of address space."""
        self._address_space = address_space
        self._process: Apart | None = None

    def outcomes(self, scenario: Scenario, *damages: Damage) -> list[Outcome]:
        """Make the segment, damage it, make every call; return how each call ended."""
        if self._process is None:
            self._process = Apart(_serve, self._address_space, shm=SHM_BYTES)
        process = self._process
        try:
            process.say(scenario)
            root = f"/proc/{process.pid}/root"
            victim, other = process.hear(PATIENCE)
            with SegmentFile(root + victim) as file, SegmentFile(root + other) as another:
                for damage in damages:
                    damage.do(file, another)
            process.say()
            outcomes: list[Outcome] = process.hear(PATIENCE)
        except BaseException:
            process.kill()
            self._process = None
            raise
        return outcomes

    def end(self) -> None:
        """End the process, which first checks that nothing was written to another segment."""
        if self._process is not None:
            with self._process as process:
                process.say(None)
                process.result(PATIENCE)


def _serve(address_space: int, *, pipe: Pipe) -> None:
    """For each scenario: make its segment, wait for the damage, make every call, report."""
    logging.disable()  # a call that sets a lower step logs a warning
    if not SANITIZED:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + address_space,) * 2)
    witness = make(Scenario(), WITNESS)
    rounds = 0
    while (scenario := pipe.hear()) is not None:
        acc = make(scenario, VICTIM)
        other = make(_another_kind(scenario), OTHER)
        files = names.segment_name(VICTIM).path, names.segment_name(OTHER).path
        if scenario.attached:
            pipe.turn(files)
            outcomes = _attached(scenario, acc)
        else:
            acc.close()
            pipe.turn(files)
            outcomes = _at_rest(scenario)
        outcomes += _afterwards(scenario)
        other.close()
        rounds += 1
        assert witness.apply_grad([rounds], [[rounds] * 3], local_step=shmacc.NEVER_STALE)
        pipe.say(outcomes)
    _check_witness(witness, rounds)
    for name in testing.leaked_names():
        os.unlink(f"{names.SHM_DIRECTORY}/{name}")  # noqa: PTH108


def make(scenario: Scenario, name: str) -> Any:
    acc = _construct(scenario, name)
    if scenario.taken:
        _apply(acc, scenario, range(40))
        acc.take(1, timeout=0)
    for i in range(scenario.applies):
        _apply(acc, scenario, range(i, i + 20), i if scenario.contributors else None)
    return acc


def _another_kind(scenario: Scenario) -> Scenario:
    kind = "sparse" if scenario.kind == "dense" else "dense"
    return Scenario(kind=kind, dtype="int64", shape=(5, 2), applies=1)


def _is_sparse(acc: Any) -> bool:
    return isinstance(acc, shmacc.SparseConditionalAccumulator)


def _apply(acc: Any, scenario: Scenario, rows: range, contributor: int | None = None) -> bool:
    # Do not use `scenario.kind`: the damage may have changed the kind that `attach` found.
    array = np.ones(scenario.shape, np.uint8)
    slices = rows, np.ones((len(rows), *scenario.shape), np.uint8)
    terms: Any = {"contributor": contributor, "timeout": _PATIENCE}
    step = shmacc.NEVER_STALE
    if isinstance(acc, shmacc.AccumulatorGroup):
        whole = {
            name: slices if isinstance(spec, shmacc.IndexedSlicesSpec) else array
            for name, spec in acc.members.items()
        }
        return acc.apply(whole, step, **terms)
    if _is_sparse(acc):
        return bool(acc.apply_grad(*slices, local_step=step, **terms))
    return bool(acc.apply_grad(array, local_step=step, **terms))


def _apply_stale(acc: Any, scenario: Scenario) -> bool:
    if isinstance(acc, shmacc.AccumulatorGroup):
        return acc.apply({}, -(2**63))
    slices = [1], np.ones((1, *scenario.shape), "u1")
    return bool(acc.apply_grad(*(slices if _is_sparse(acc) else ([1],)), local_step=-(2**63)))


def _have_a_round(acc: Any) -> None:
    with acc.round(1, timeout=0) as taken:
        _tell("in the round", lambda: taken)


def _look_divided(acc: Any, scenario: Scenario) -> None:
    """Read a round divided among shards, as a host's forwarder does."""
    size = int(np.prod(scenario.shape))
    whole = [size // 3, size // 3, size]
    ends = {"sparse": [[0] * 3], "dense": [whole], "group": [[0] * 3, whole]}[scenario.kind]
    taken = RoundResult(advance=False, seal=False, ends=np.array(ends, np.int64))
    acc._handle.look(taken, None)
    for columns in taken.columns():
        for column in columns:
            column.sum()


def _partial(scenario: Scenario) -> Any:
    one = replace(scenario, taken=False, applies=1, lanes=1)
    with make(one, "") as acc:
        return acc.take_partial(1, timeout=0)


def _tell(call: str, function: Callable[[], Any]) -> Outcome:
    try:
        result = function()
    except shmacc.errors.ShmaccError as error:
        return Outcome(call, type(error).__name__, fine=True, detail=str(error)[:300])
    except BaseException as error:  # noqa: BLE001 - any exception is a result
        return Outcome(call, type(error).__name__, fine=False, detail=repr(error)[:300])
    # Read the result's arrays: this crashes if they are not the caller's own memory.
    for value in vars(result).values() if hasattr(result, "__dict__") else ():
        if isinstance(value, np.ndarray):
            value.sum()
    return Outcome(call, "", fine=True, detail=repr(result)[:100])


def _operations(acc: Any, scenario: Scenario) -> dict[str, Callable[[], Any]]:
    return {
        "apply known rows": lambda: _apply(acc, scenario, range(4)),
        "apply new rows": lambda: _apply(acc, scenario, range(30, 60)),
        "apply many rows": lambda: _apply(acc, scenario, range(0, 6000, 2)),
        "apply stale": lambda: _apply_stale(acc, scenario),
        "apply a contributor's": lambda: _apply(acc, scenario, range(4), 1),
        "apply another's": lambda: _apply(acc, scenario, range(4), 2**40),
        "apply another shape": lambda: _apply(
            acc, replace(scenario, shape=(1, *scenario.shape)), range(2)
        ),
        "apply_partial": lambda: acc.apply_partial(
            _partial(scenario), shmacc.NEVER_STALE, timeout=_PATIENCE
        ),
        "take": lambda: acc.take(1, timeout=0),
        "take_grad": lambda: getattr(acc, "take_grad", acc.take)(1, timeout=0),
        "take, told of deaths": lambda: acc.take(2**40, timeout=0.01, on_death="raise"),
        "round": lambda: _have_a_round(acc),
        "snapshot": acc.snapshot,
        "look, divided": lambda: _look_divided(acc, scenario),
        "contributors": acc.contributors,
        "take more": lambda: acc.take(2**62, timeout=0.01),
        "take_partial": lambda: acc.take_partial(1, timeout=0),
        "take_partial sealing": lambda: (acc.take_partial(0, timeout=0, seal=True), acc.unseal()),
        "unseal": acc.unseal,
        "num_accumulated": acc.num_accumulated,
        "global_step": lambda: acc.global_step,
        "set_global_step": lambda: acc.set_global_step(5),
        "advance_step": lambda: acc.advance_step(9),
        "advance_step to the end": lambda: acc.advance_step(2**63 - 1),
        "wait_step": lambda: acc.wait_step(3, timeout=0),
        "wait_step long": lambda: acc.wait_step(2**63 - 2, timeout=0.01),
        "stats": acc.stats,
        "cancel": acc.cancel,
        "repr": lambda: repr(acc),
        "pickle": lambda: pickle.loads(pickle.dumps(acc)).close(),
    }


def _by_name(scenario: Scenario) -> dict[str, Callable[[], Any]]:
    return {
        "attach": lambda: shmacc.attach(VICTIM).close(),
        "construct": lambda: _construct(scenario, VICTIM).close(),
        "inspection.list_segments": inspection.list_segments,
        "inspection.describe": lambda: inspection.describe(VICTIM),
        "inspection.check": lambda: inspection.check(VICTIM),
        "inspection.most_touched": lambda: inspection.most_touched(VICTIM, 5),
        "inspection.summarise_values": lambda: inspection.summarise_values(VICTIM),
        "inspection.leftovers": lambda: inspection.leftovers(VICTIM),
        "inspection.cancel": lambda: inspection.cancel(VICTIM),
    }


def _construct(scenario: Scenario, name: str) -> Any:
    if scenario.kind == "group":
        specs = {
            "rows": shmacc.IndexedSlicesSpec(None, scenario.dtype),
            "array": shmacc.TensorSpec(None, scenario.dtype),
        }
        return shmacc.AccumulatorGroup(specs, name, lanes=scenario.lanes)
    if scenario.kind == "sparse":
        return shmacc.SparseConditionalAccumulator(scenario.dtype, None, name, lanes=scenario.lanes)
    return shmacc.ConditionalAccumulator(scenario.dtype, None, name, lanes=scenario.lanes)


def _all_of(calls: dict[str, Callable[[], Any]], order: int) -> list[Outcome]:
    if order % _SELDOM:
        calls = {call: function for call, function in calls.items() if call not in _SLOW}
    shuffled = list(calls.items())
    random.Random(order).shuffle(shuffled)
    return [_tell(call, function) for call, function in shuffled]


def operate(acc: Any, scenario: Scenario, order: int) -> list[Outcome]:
    """Make every operation on an accumulator; `order` is the seed for their order."""
    return _all_of(_operations(acc, scenario), order)


def _attached(scenario: Scenario, acc: Any) -> list[Outcome]:
    waited: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: waited.append(_tell("waiting take", lambda: acc.take(2**62, timeout=None)))
    )
    if scenario.waiting:
        thread.start()
    outcomes = _all_of(_operations(acc, scenario) | _by_name(scenario), scenario.order)
    outcomes.append(_tell("unlink", acc.unlink))
    outcomes.append(_tell("close", acc.close))
    outcomes.append(_tell("apply after close", lambda: _apply(acc, scenario, range(4))))
    if scenario.waiting:
        thread.join(_THREAD_PATIENCE)
        if thread.is_alive():
            waited.append(Outcome("waiting take", "waits on", fine=False, detail="after close"))
    return outcomes + waited


def _at_rest(scenario: Scenario) -> list[Outcome]:
    outcomes = _all_of(_by_name(scenario), scenario.order)
    acc = None
    with contextlib.suppress(shmacc.errors.ShmaccError):
        acc = shmacc.attach(VICTIM)
    if acc is not None:
        outcomes += operate(acc, scenario, scenario.order)
        outcomes.append(_tell("unlink", acc.unlink))
        outcomes.append(_tell("close", acc.close))
    return outcomes


def _afterwards(scenario: Scenario) -> list[Outcome]:
    """Check that, whatever the damage, the name can be removed and used again."""

    def clean_up() -> None:
        for leftover in inspection.leftovers(VICTIM):
            inspection.clean(leftover)

    def remove() -> None:
        with contextlib.suppress(shmacc.errors.NotFoundError):
            inspection.remove(VICTIM, force=True)
        assert not os.path.lexists(names.segment_name(VICTIM).path)

    def start_over() -> None:
        with make(replace(scenario, applies=2), VICTIM) as acc:
            assert acc.take(2, timeout=0).count == 2
            acc.unlink()

    outcomes = [
        _tell("inspection.clean", clean_up),
        _must(_tell("inspection.remove", remove)),
        _must(_tell("start over", start_over)),
    ]
    inspection.remove(OTHER, force=True)
    return outcomes


def _must(outcome: Outcome) -> Outcome:
    return replace(outcome, fine=not outcome.error)


def _check_witness(witness: Any, rounds: int) -> None:
    # `make` applied two gradients to the witness, on rows 0 to 19 and 1 to 20.
    taken = witness.take_partial(rounds + 2, timeout=0)
    expected = np.zeros(max(rounds, 20) + 1)
    expected[:20] += 1
    expected[1:21] += 1
    expected[1 : rounds + 1] += np.arange(1, rounds + 1)
    assert taken.indices.tolist() == list(range(expected.size))
    assert (taken.values == expected[:, None]).all(), "bytes were written outside the victim"
