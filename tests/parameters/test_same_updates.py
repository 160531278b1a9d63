"""Copies of parameters on several hosts stay equal bit by bit if they make the same updates."""

import ctypes
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.numpy_optimizers import by_name
from helpers.support import LONG

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, init, optim
from shmacc._base import layout
from shmacc._base.lineage import Lineage
from shmacc._parameters import copies
from shmacc._parameters.change_checks import Asked

OPTIMIZERS: Final = [
    optim.SGD(0.1), optim.SGD(0.1, momentum=0.9, nesterov=True), optim.Adagrad(0.1),
    optim.Adagrad(0.1, rowwise=True, weight_decay=0.01), optim.RMSprop(0.1, momentum=0.5),
    optim.Adam(0.1), optim.Adam(0.1, as_torch=True), optim.AdamW(0.1), optim.Ftrl(0.1),
    optim.SGD(0.1, constraint=optim.UnitNorm()), optim.Adam(0.1, constraint=optim.MaxNorm(1.5)),
    optim.AdamW(0.1, constraint=optim.NonNeg()),
    optim.Adagrad(0.1, constraint=optim.Clip(-0.5, 0.5)),
]  # fmt: skip
FIRST: Final = Lineage(5, 0, 99)
_TABLE: Final = TableSpec((3,), initial=init.Normal(0, 1, seed=4))
_CONTENTS: Final = {
    "rows": np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5),
    "one": np.linspace(1, 2, 7),
    "table": _TABLE,
}


def updates_of(number: int) -> Asked:
    """Return the arguments of an update: gradients, and rows that it removes or forgets."""
    rng = np.random.default_rng(number)
    ids = rng.choice(20, 9, replace=False)
    rows = np.sort(rng.choice(8, 4, replace=False))
    return Asked(
        gradients={
            "rows": (rows, rng.standard_normal((4, 5))),
            "one": rng.standard_normal(7),
            "table": (ids, rng.standard_normal((9, 3))),
        },
        remove={"table": ids[:3]},
        forget={"table": 4},
    )


class Copies:
    """Copies of the same parameters, as several hosts have them."""

    def __init__(self, stack: ExitStack, optimizer: optim.Optimizer, number: int = 2) -> None:
        self.all: list[Parameters] = []
        self._stack, self._optimizer = stack, optimizer
        for _ in range(number):
            self.add()
        state = self.all[0].state()
        for each in self.all:
            assert copies.replace(each, state, FIRST, 0)
        self.lineage = FIRST

    def add(self) -> Parameters:
        """Return another copy, which has no state yet."""
        optimizers = by_name(self._optimizer, _CONTENTS)
        made = self._stack.enter_context(Parameters(_CONTENTS, optimizer=optimizers))
        self.all.append(made)
        return made

    def update(self, asked: Asked, **more: Any) -> set[Lineage]:
        """Make an update in all copies; return their lineages."""
        step = self.all[0].step
        travels = pickle.dumps(copies.prepare(self.all[0], {}, step, asked, **more))
        number = self.lineage.number + 1
        made = set()
        for each in self.all:
            update = pickle.loads(travels)
            was_made, lineage = copies.make(each, update, (5, number), self.lineage)
            assert was_made
            assert copies.look(each) == (lineage, step + 1, step + 1)
            made.add(lineage)
        self.lineage = next(iter(made))
        return made

    def states(self) -> list[dict[str, bytes]]:
        return [{key: saved.tobytes() for key, saved in p.state().items()} for p in self.all]


@pytest.fixture(name="stack")
def _stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_every_optimizer_is_tried() -> None:
    assert {type(each) for each in OPTIMIZERS} == set(optim.KINDS)
    constraints = {type(each.constraint).__name__ for each in OPTIMIZERS if each.constraint}
    assert constraints == set(layout.CONSTRAINTS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_copies_give_the_same_bits_as_rounds(stack: ExitStack, optimizer: optim.Optimizer) -> None:
    these = Copies(stack, optimizer)
    optimizers = by_name(optimizer, _CONTENTS)
    params = stack.enter_context(Parameters(_CONTENTS, optimizer=optimizers))
    group = stack.enter_context(AccumulatorGroup({"count": shmacc.TensorSpec((), "float32")}))
    for number in range(6):
        asked = updates_of(number)
        assert group.apply({"count": 1.0}, number)
        with group.round(1):
            assert params.update({}, **asked._asdict())
        assert len(these.update(asked)) == 1
        if number == 2:
            # A joining host gets another copy's state, and stores table rows in another order.
            copy, state = copies.state(these.all[1])
            assert copies.replace(these.add(), state, copy.lineage, copy.step)
        expected = {key: saved.tobytes() for key, saved in params.state().items()}
        assert these.states() == [expected] * len(these.all)


def test_an_update_is_made_once_and_after_its_predecessor_only(stack: ExitStack) -> None:
    these = Copies(stack, optim.Adam(0.1))
    params = these.all[0]
    update = copies.prepare(params, {}, 0, updates_of(0))
    later = copies.prepare(params, {}, 1, updates_of(1))
    made, lineage = copies.make(params, update, (5, 1), FIRST)
    assert made
    state = these.states()[0]
    assert copies.make(params, update, (5, 1), FIRST) == (False, lineage)
    for parent in (FIRST, lineage._replace(number=7), lineage._replace(digest=7)):
        with pytest.raises(errors.FailedPreconditionError, match="last update is 1 of term 5"):
            copies.make(params, later, (5, 2), parent)
    assert copies.look(params) == (lineage, 1, 1)
    assert these.states()[0] == state
    assert copies.make(params, later, (6, 1), lineage)[0]


def test_replace_gives_a_copy_any_state_of_another_lineage(stack: ExitStack) -> None:
    these = Copies(stack, optim.Adagrad(0.1))
    one, other = these.all
    update = copies.prepare(one, {}, 0, updates_of(0))
    copies.make(one, update, (5, 1), FIRST)
    copy, state = copies.state(one)
    assert copies.replace(other, state, copy.lineage, 12)
    assert copies.look(other) == (copy.lineage, 12, 1)
    assert not copies.replace(other, state, copy.lineage, 13)
    assert copies.look(other).begun == 12
    assert copies.replace(other, state, copy.lineage._replace(digest=1), 3)
    assert copies.look(other).begun == 12  # the step that has begun does not decrease
    first, second = these.states()
    assert first == second
    with pytest.raises(errors.InvalidArgumentError):
        copies.replace(other, state, Lineage(0, 0), 14)
    with pytest.raises(errors.InvalidArgumentError):
        copies.replace(other, {}, Lineage(9, 9), 14)


@pytest.mark.parametrize(("name", "like", "gradient"), [
    ("rows", np.zeros((9, 5), np.float32), ([8], np.ones((1, 5)))),
    ("rows", np.zeros((8, 4), np.float32), ([3], np.ones((1, 4)))),
    ("rows", np.zeros((8, 6), np.float32), ([3], np.ones((1, 6)))),
    ("one", np.zeros(6), np.ones(6)), ("one", np.zeros(8), np.ones(8)),
    ("table", TableSpec((2,)), ([3], np.ones((1, 2)))),
], ids=["more rows", "narrower", "wider", "smaller", "larger", "a table's row"])  # fmt: skip
@pytest.mark.parametrize("as_values", [False, True], ids=["gradient", "contents"])
def test_an_update_of_other_parameters_is_refused(
    stack: ExitStack, name: str, like: Any, gradient: Any, *, as_values: bool
) -> None:
    these = Copies(stack, optim.SGD(0.5), 1)
    before = these.states()
    optimizer = optim.SGD(0.5)
    others = stack.enter_context(Parameters(_CONTENTS | {name: like}, optimizer=optimizer))
    asked = Asked(**{"values" if as_values else "gradients": {name: gradient}})
    update = copies.prepare(others, {}, 0, asked)
    with pytest.raises(errors.InvalidArgumentError):
        copies.make(these.all[0], update, (5, 1), FIRST)
    assert these.states() == before


@pytest.mark.parametrize("how", ["update", "skip", "restore"])
def test_any_other_change_makes_a_copy_lose_its_lineage(stack: ExitStack, how: str) -> None:
    these = Copies(stack, optim.SGD(0.5), 1)
    params = these.all[0]
    these.update(updates_of(0))
    if how == "restore":
        params.restore(params.state())
    else:
        group = stack.enter_context(AccumulatorGroup({"count": shmacc.TensorSpec((), "float32")}))
        group.set_global_step(1)
        group.apply({"count": 1.0}, 1)
        with group.round(1):
            getattr(params, how)({})
    assert copies.look(params).lineage == (0, 0, 0)
    assert copies.look(params).begun == 1
    with pytest.raises(errors.FailedPreconditionError, match="none that it knows"):
        copies.make(params, copies.prepare(params, {}, 2), (5, 2), these.lineage)


def test_the_digest_shows_a_copy_that_differs(stack: ExitStack) -> None:
    these = Copies(stack, optim.SGD(0.5))
    state = these.all[1].state()
    rows = state["0.array"].copy()
    rows[3, 2] += 1
    assert copies.replace(these.all[1], state | {"0.array": rows}, FIRST._replace(digest=3), 0)
    assert copies.replace(these.all[1], state | {"0.array": rows}, FIRST, 0)  # not detected yet
    gradient = {"rows": ([2, 3], np.ones((2, 5)))}
    assert len(these.update(Asked(gradients={"one": np.ones(7)}))) == 1
    assert len(these.update(Asked(gradients=gradient))) == 2
    for each in these.all:  # digests differ from now on: each depends on the previous digest
        before = copies.look(each).lineage
        copies.make(each, copies.prepare(each, {}, 2), (5, 3), before)
    one, other = (copies.look(each).lineage for each in these.all)
    assert one != other


def test_the_digest_covers_everything_that_an_update_changes(stack: ExitStack) -> None:
    these = Copies(stack, optim.Adam(0.5), 1)
    zeros = {"rows": ([1, 2], np.zeros((2, 5), np.float32)), "one": np.zeros(7)}
    table = (np.array([1, 2]), np.zeros((2, 3)))
    found = set()
    state = these.all[0].state()
    for asked in (
        Asked(), Asked(gradients=zeros),
        Asked(gradients={"rows": ([1, 3], np.zeros((2, 5)))}), Asked(values=zeros),
        Asked(values={"one": np.full(7, -0.0)}), Asked(gradients={"table": table}),
        Asked(values={"table": table}),
        Asked(values={"table": (np.array([1, 3]), table[1])}),
        Asked(values={"table": table}, remove={"table": [1]}),
        Asked(values={"table": table}, remove={"table": [2]}),
    ):  # fmt: skip
        copies.replace(these.all[0], state, FIRST, 0)
        these.lineage = FIRST
        found |= these.update(asked)
        copies.replace(these.all[0], state, Lineage(8, 8), 0)
    assert len(found) == 10


def test_all_nans_give_the_same_digest(stack: ExitStack) -> None:
    these = Copies(stack, optim.SGD(0.5))
    found = set()
    for each, bits in zip(these.all, (0x7FF8000000000000, 0xFFF8000000000001), strict=True):
        gradient = np.full(7, bits, np.uint64).view(np.float64)
        update = copies.prepare(each, {}, 0, Asked(gradients={"one": gradient}))
        found.add(copies.make(each, update, (5, 1), FIRST)[1])
        assert np.isnan(each["one"]).all()
    assert len(found) == 1


def test_an_update_uses_the_bias_corrections_that_it_is_given(stack: ExitStack) -> None:
    these = Copies(stack, optim.Adam(0.5))
    update = copies.prepare(these.all[0], {}, 0, Asked(gradients={"one": np.ones(7)}))
    (change,) = update.changes
    assert change.corrections == (1 - 0.9, np.sqrt(1 - 0.999))
    other = update._replace(changes=[change._replace(corrections=(1.0, 1.0))])
    found = {copies.make(these.all[0], update, (5, 1), FIRST)[1]}
    found.add(copies.make(these.all[1], other, (5, 1), FIRST)[1])
    assert len(found) == 2


_REPLAY: Final = """
import pickle, sys
from shmacc import Parameters
from shmacc._base.lineage import Lineage
from shmacc._parameters import copies

for contents, optimizer, state, first, updates in pickle.load(sys.stdin.buffer):
    with Parameters(contents, optimizer=optimizer) as params:
        lineage = Lineage(*first)
        copies.replace(params, state, lineage, 0)
        for number, update in enumerate(updates, start=1):
            _, lineage = copies.make(params, update, (5, number), lineage)
    print(lineage.digest)
"""


def test_a_processor_without_fma_gives_the_same_bits(stack: ExitStack) -> None:
    """Without FMA, the C library computes powers in another way."""
    told, digests = [], []
    for optimizer in OPTIMIZERS:
        these = Copies(stack, optimizer, 1)
        state, updates = these.all[0].state(), []
        for number in range(12):
            step = these.all[0].step
            updates.append(copies.prepare(these.all[0], {}, step, updates_of(number)))
            these.update(updates_of(number))
        told.append((_CONTENTS, by_name(optimizer, _CONTENTS), state, tuple(FIRST), updates))
        digests.append(str(these.lineage.digest))
    replayed = subprocess.run(
        [sys.executable, "-P", "-c", _REPLAY],
        input=pickle.dumps(told),
        stdout=subprocess.PIPE,
        env=os.environ | {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F"},
        timeout=LONG,
        check=True,
    )
    assert replayed.stdout.decode().split() == digests


# The floating-point control word in fenv_t of glibc and musl: its index, the bits that round up,
# and the bits that flush subnormal numbers to zero.
_CONTROL: Final = {"x86_64": (7, 2 << 13, 0x8040), "aarch64": (0, 1 << 22, 1 << 24)}


def _in_other_ways(bits: str) -> tuple[list[bytes], list[float]]:
    """Make updates in a floating-point mode; return the states and what the mode does."""
    where, up, flush = _CONTROL[platform.machine()]
    c = ctypes.CDLL(None)
    c = c if hasattr(c, "fesetenv") else ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_uint32 * 16)()
    with ExitStack() as stack:
        these = Copies(stack, optim.Adam(0.1), 1)
        tiny = np.full(7, 1e-310)
        prepared = [
            copies.prepare(these.all[0], {}, 0, updates_of(0)),
            copies.prepare(these.all[0], {}, 1, Asked(values={"one": tiny})),
            copies.prepare(these.all[0], {}, 2, Asked(gradients={"one": tiny})),
        ]
        assert c.fegetenv(environment) == 0
        environment[where] |= {"up": up, "flush": flush, "": 0}[bits]
        assert c.fesetenv(environment) == 0
        lineage = FIRST
        for number, update in enumerate(prepared, start=1):
            _, lineage = copies.make(these.all[0], update, (5, number), lineage)
        seen = [1.0 + float.fromhex("0x1p-60") - 1.0, float(np.float64(1e-310) * 1.0)]
        after = (ctypes.c_uint32 * 16)()
        assert c.fegetenv(after) == 0
        assert after[where] & (up | flush) == environment[where] & (up | flush)
        environment[where] &= ~(up | flush)
        c.fesetenv(environment)
        return [each for state in these.states() for each in state.values()], seen


@pytest.mark.skipif(platform.machine() not in _CONTROL, reason="which bits is not known")
def test_floating_point_modes_set_by_a_library_change_no_bit() -> None:
    states, seen = run_apart(_in_other_ways, "")
    assert seen == [0, 1e-310]
    for bits in ("up", "flush"):
        others, seen_there = run_apart(_in_other_ways, bits)
        assert seen_there != seen, "nothing was set"
        assert others == states
