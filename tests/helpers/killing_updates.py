"""A chief dies in an update of parameters, and readers and the next chief judge what they find.

Two segments take part: the parameters, and the group whose round updates them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from helpers import numpy_initial
from helpers.apart import run_apart
from helpers.killing_images import Image
from helpers.killing_scenes import path
from helpers.numpy_optimizers import by_name, constrained
from helpers.segment_file import SegmentFile
from helpers.stepping_tracer import Mark, mark_call
from helpers.stepping_walk import Images, instants, walk
from helpers.support import update_once

from shmacc import AccumulatorGroup, Parameters, TableSpec, _core, init, optim

Operation = Callable[[Parameters, AccumulatorGroup], object]

PARAMS: Final = "params"
GROUP: Final = "group"
WIDTH: Final = 3
_TABLE: Final = TableSpec((WIDTH,), initial=init.Uniform(-1, 1, seed=5))

Gradient = dict[str, Any]
State = tuple[tuple[str, bytes], ...]
# The parameters' states: before the update, after it, and after it if the round has one more
# gradient.
Known = tuple[State, State, State]


@dataclass(frozen=True)
class UpdateScene:
    """An update in which the chief dies.

    Attributes:
        name: The scene's name.
        optimizer: The optimizer of both arrays: "table" of five rows, "one" of seven numbers.
        lanes: The group's number of lanes.
        skips: Whether the chief skips the round.
        values: New contents that the chief sets, without an optimizer.
        more: Further arguments of the update.
    """

    name: str
    optimizer: optim.Optimizer
    lanes: int = 1
    skips: bool = False
    values: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self) -> tuple[Parameters, AccumulatorGroup]:
        """Return parameters after a first round, and a group with a gradient for the second."""
        table = np.arange(15, dtype=np.float32).reshape(5, WIDTH)
        arrays = {"table": table, "one": np.ones(7)}
        params = Parameters(arrays, PARAMS, optimizer=by_name(self.optimizer, arrays))
        group = AccumulatorGroup(params.member_specs(["table"]), GROUP, lanes=self.lanes)
        update_once(params, group, self.gradient(1))
        assert group.apply(self.gradient(2), 1)
        return params, group

    def gradient(self, seed: int) -> Gradient:
        """Return a gradient of three rows of "table", and of all of "one"."""
        rng = np.random.default_rng(seed)
        return {
            "table": ([0, 3, 4], rng.standard_normal((3, WIDTH)).astype(np.float32)),
            "one": rng.standard_normal(7),
        }

    def is_touched(self, known: Known) -> bool:
        """Whether a reader sees contents that differ from those before the update."""
        return contents() != contents_in(known[0])

    def update(self, params: Parameters, taken: Any) -> bool:
        return params.skip(taken) if self.skips else params.update(taken, self.values, **self.more)

    def one_round(self, params: Parameters, group: AccumulatorGroup) -> bool:
        with group.round(1, timeout=1) as taken:
            return self.update(params, taken)

    def act(self, mark: Mark) -> None:
        """Act as a chief that marks the beginning and the end of the extension's `update`."""
        with AccumulatorGroup.attach(GROUP) as group, Parameters.attach(PARAMS) as params:
            mark_call(_core, "update", mark)
            self.one_round(params, group)


@dataclass(frozen=True)
class TableScene(UpdateScene):
    """An update of a table in which the chief dies.

    Attributes:
        there: The ids whose rows the first round has.
        gone: The ids that the first round removes.
        changed: The ids whose rows the second round has; the chief dies in its update.
        removed: The ids that the second round removes.
    """

    there: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()

    def make(self) -> tuple[Parameters, AccumulatorGroup]:
        """Return parameters after a first round, and a group with a gradient for the second."""
        params = Parameters({"t": _TABLE}, PARAMS, optimizer=self.optimizer)
        group = AccumulatorGroup(params.member_specs(), GROUP, lanes=self.lanes)
        update_once(params, group, {"t": _rows(self.there, 1)}, remove={"t": self.gone})
        assert group.apply(self.gradient(2), 1)
        return params, group

    def gradient(self, seed: int) -> Gradient:
        return {"t": _rows(self.changed, seed)}

    def update(self, params: Parameters, taken: Any) -> bool:
        if self.skips:
            return params.skip(taken)
        return params.update(taken, self.values, remove={"t": self.removed}, **self.more)

    def is_touched(self, known: Known) -> bool:
        """Check each row that a reader gets; return whether any row has changed in the update."""
        before, after = (_rows_of(state) for state in known[:2])
        ids = np.array(sorted(before.keys() | after.keys()), np.int64)
        certain = before.keys() & after.keys()
        with Parameters.attach(PARAMS) as params:
            table = params["t"]
            assert certain <= set(table.ids().tolist()) <= set(ids.tolist())
            found, rows = table.contains(ids), table[ids]
        first = numpy_initial.rows(_TABLE.initial, ids, _TABLE.row_shape)
        first = constrained(self.optimizer.constraint, first)
        expected = []
        for number, row, is_there, initial in zip(ids.tolist(), rows, found, first, strict=True):
            allowed = [of.get(number, initial) for of in (before, after)]
            assert is_there or number not in certain
            if number not in certain:
                allowed.append(initial)
            assert all(any(x == one[k] for one in allowed) for k, x in enumerate(row)), number
            expected.append(before.get(number, initial))
        return bool(rows.tobytes() != np.array(expected).tobytes())


def _rows(ids: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((len(ids), WIDTH))
    return np.array(ids, np.int64), values.astype(np.float32)


def _rows_of(state: State) -> dict[int, Any]:
    saved = dict(state)
    ids = np.frombuffer(saved["0.ids"], np.int64)
    rows = np.frombuffer(saved["0.rows"], np.float32).reshape(-1, WIDTH)
    return dict(zip(ids.tolist(), rows, strict=True))


def images(scene: UpdateScene, *operations: Operation) -> Images:
    """Make the scene, do the operations, remove both names; return both segments' images."""
    made: Images = run_apart(_images, scene, operations)
    return made


def _images(scene: UpdateScene, operations: tuple[Operation, ...]) -> Images:
    params, group = scene.make()
    with params, group:
        for operation in operations:
            operation(params, group)
    found = {name: Image.of(path(name)) for name in (PARAMS, GROUP)}
    with Parameters.attach(PARAMS) as again, AccumulatorGroup.attach(GROUP) as own:
        again.unlink()
        own.unlink()
    return found


def state(params: Parameters) -> State:
    return tuple((key, saved.tobytes()) for key, saved in params.state().items())


def states(scene: UpdateScene) -> Known:
    found: Known = run_apart(_states, scene)
    return found


def _states(scene: UpdateScene) -> Known:
    found = []
    for more in (False, True):
        params, group = scene.make()
        with params, group:
            if not more:
                found.append(state(params))
            else:
                assert group.apply(scene.gradient(3), 1)
            assert scene.one_round(params, group)
            found.append(state(params))
            params.unlink()
            group.unlink()
    return found[0], found[1], found[2]


def testify(scene: UpdateScene, known: Known) -> bool:
    """Act as the next chief: check that the update is in wholly or not at all; remove both names.

    Returns:
        Whether the update was there.
    """
    before, after, after_more = known
    touched = scene.is_touched(known)
    with AccumulatorGroup.attach(GROUP) as group:
        accepted = group.apply(scene.gradient(3), 1)
        # A gradient that may have been computed from changed contents must be refused.
        assert not (accepted and touched)
        with Parameters.attach(PARAMS) as params:
            assert params.snapshot()[0] in {1, 2}
            was_in = params.step == 2
            assert state(params) == (after if was_in else before)
            assert not (was_in and accepted)
            with group.round(1, timeout=1) as taken:
                assert taken.count == 1 + accepted
                assert scene.update(params, taken) is not was_in
            assert state(params) == (after_more if accepted else after)
            assert (params.step, group.global_step, group.num_accumulated()) == (2, 2, 0)
            assert update_once(params, group, scene.gradient(4))
            params.unlink()
        group.unlink()
    return was_in


def contents() -> list[bytes]:
    """Return the bytes of both arrays, even if an update of them is half done."""
    found = []
    with SegmentFile(path(PARAMS)) as file:
        for member, size in enumerate((15 * 4, 7 * 8)):
            file.look_at(0, member)
            found.append(file.read(file.table.region("rows 0"), size))
    return found


def contents_in(known: State) -> list[bytes]:
    saved = dict(known)
    return [saved["0.array"], saved["1.array"]]


def judge_every_instruction(scene: UpdateScene) -> None:
    """Judge what a death at each instruction of an update would leave."""
    before, known = images(scene), states(scene)
    looks = walk(scene.act, before, images(scene, scene.one_round), PARAMS, to_mark=True)
    found = [(testify(scene, known), look.step) for look in instants(looks)]
    assert found == sorted(found), "taken back again"
    assert found[-1][0]
