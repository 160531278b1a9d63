"""Gradients that the chief changes in place, or passes to an update, go through the optimizers."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import state_of, update_once
from helpers.training import training

import shmacc
from shmacc import errors, init, optim

ROWS: Final = np.random.default_rng(3).standard_normal((4, 3))
REPEATED: Final = np.array([5, 1, 5, 3])
DENSE: Final = np.random.default_rng(4).standard_normal((6, 3))
# Each gradient gives the same bits, whether passed to an update or applied by a worker.
ALIKE: Final[dict[str, tuple[str, Any]]] = {
    "an array": ("dense", DENSE.astype(np.float32)), "float64": ("dense", DENSE),
    "float16": ("dense", DENSE.astype(np.float16)),
    "integers": ("dense", np.arange(18).reshape(6, 3)), "a list": ("dense", DENSE.tolist()),
    "not contiguous": ("dense", DENSE.T.copy().T), "rows": ("rows", ([1, 3], ROWS[:2])),
    "rows that repeat": ("rows", (REPEATED, ROWS.astype(np.float32))),
    "IndexedSlices": ("rows", shmacc.IndexedSlices(ROWS, REPEATED, (6, 3))),
    "a look-alike": ("rows", SimpleNamespace(indices=REPEATED, values=ROWS, dense_shape=None)),
    "no rows": ("rows", ([], [])),
    "new ids": ("table", (np.array([2**62, 7, 2**62, 0], np.uint64), ROWS)),
    "slices of a table": ("table", shmacc.IndexedSlices(ROWS, REPEATED)),
    "no ids": ("table", ([], np.empty((0, 3)))), "a number": ("number", 3),
}  # fmt: skip
OPTIMIZERS: Final = (optim.SGD(0.5), optim.Adam(0.1), optim.Adagrad(0.5, rowwise=True))


def make(optimizer: optim.Optimizer) -> tuple[shmacc.Parameters, shmacc.AccumulatorGroup]:
    contents: dict[str, Any] = {name: np.ones((6, 3), np.float32) for name in ("dense", "rows")}
    contents["table"] = shmacc.TableSpec((3,), initial=init.Uniform(-1, 1, seed=3))
    contents["number"] = np.array(1.0)
    by: Any = {"integers": None, "*": optimizer}
    params = shmacc.Parameters({**contents, "integers": np.zeros(2, int)}, optimizer=by)
    specs = params.member_specs(sparse=["rows"])
    group = shmacc.AccumulatorGroup({**specs, "loss": shmacc.TensorSpec(())}, reduction_type="SUM")
    return params, group


@pytest.fixture(name="both")
def _both() -> Iterator[tuple[shmacc.Parameters, shmacc.AccumulatorGroup]]:
    params, group = make(optim.SGD(0.5))
    with params, group:
        yield params, group


def of_params(taken: Any) -> dict[str, Any]:
    return {name: taken[name] for name in taken if name != "loss"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("case", ALIKE)
def test_a_given_gradient_counts_like_an_applied_one(case: str, optimizer: optim.Optimizer) -> None:
    """The given gradient replaces the round's gradient of the same member, if there is one."""
    name, given = ALIKE[case]
    if name == "number" and optimizer == OPTIMIZERS[2]:
        optimizer = optim.Adagrad(0.5)
    found = []
    for way in ("applied", "in the round", "alone"):
        params, group = make(optimizer)
        with params, group:
            others = {"dense": DENSE, "rows": ([0], ROWS[:1]), "table": ([9], ROWS[:1])}
            others["number"] = 1.0
            for turn in range(2):
                gradient = {
                    **others,
                    "loss": 1.0,
                    name: given if way == "applied" else others[name],
                }
                if way == "alone":
                    del gradient[name]
                assert group.apply(gradient, turn)
                with group.round(1) as taken:
                    more: dict[str, Any] = {} if way == "applied" else {"gradients": {name: given}}
                    assert params.update(of_params(taken), **more, learning_rate=0.25)
            found.append(state_of(params))
    assert found[0] == found[1] == found[2]


def test_take_results_may_be_given(both: tuple[shmacc.Parameters, shmacc.AccumulatorGroup]) -> None:
    """The given result may be a take of another accumulator, whose sums this group never had."""
    params, group = both
    with (
        shmacc.SparseConditionalAccumulator("float32", (None, 3)) as rows,
        shmacc.ConditionalAccumulator("float64", (6, 3)) as dense,
    ):
        rows.apply_grad(REPEATED, ROWS.astype(np.float32), local_step=0)
        dense.apply_grad(DENSE, local_step=0)
        taken_rows, taken = rows.take(1), dense.take(1)
    group.apply({"loss": 1.0}, 0)
    with group.round(1):
        given = {"rows": taken_rows, "table": taken_rows, "dense": taken}
        assert params.update({}, gradients=given)
    assert np.array_equal(params["dense"], np.float32(1) - np.float32(0.5) * DENSE.astype("f4"))
    assert params["table"].ids().tolist() == [1, 3, 5]
    assert np.array_equal(params["rows"][[1, 3, 5]], 1 - np.float32(0.5) * taken_rows.values)


BAD: Final[list[tuple[dict[str, Any], str]]] = [
    ({"dense": DENSE[:5]}, r"The gradient of array 'dense': .* expected \[6,3\], got \[5,3\]"),
    ({"dense": None}, "None was given"),
    ({"dense": "abc"}, "do not convert"),
    ({"dense": DENSE * 1j}, "same_kind"),
    ({"dense": np.full((6, 3), 1e300)}, "would become infinite in float32"),
    ({"dense": np.ma.masked_array(DENSE)}, "must not be a masked array"),
    ({"rows": ([6], ROWS[:1])}, "index is 6 exceeded 6"),
    ({"rows": ([-1], ROWS[:1])}, "must not be negative"),
    ({"rows": ([1.5], ROWS[:1])}, "must be integers"),
    ({"rows": ([1, 2], ROWS[:1])}, "Expected 2 non-empty input values, got 1"),
    ({"rows": ([1], ROWS[:1], 3)}, r"\(indices, values\), or something like IndexedSlices"),
    ({"table": DENSE}, r"table 'table': \(indices, values\), or something like IndexedSlices"),
    ({"table": ([1], [[1, 2]])}, "expected values dim 1 to be 3, got 2"),
    ({"table": (np.array([2**63], np.uint64), ROWS[:1])}, r"below 2\*\*63"),
    ({"number": ([0], [1.0])}, "is a number, and has no rows"),
    ({"integers": [1, 2]}, "Array 'integers' has no optimizer"),
    ({"loss": 1.0}, "There is no array 'loss'; there are 'dense'"),
    ({"none": 1.0}, "There is no array 'none'"),
    ([DENSE], "gradients must be a mapping .* but was a list"),  # type: ignore[list-item]
]


def test_bad_gradients_are_refused(both: tuple[shmacc.Parameters, shmacc.AccumulatorGroup]) -> None:
    params, group = both
    before = state_of(params)
    group.apply({"loss": 1.0, "dense": DENSE}, 0)
    with group.round(1) as taken:
        for given, text in BAD:
            with pytest.raises(errors.InvalidArgumentError, match=text):
                params.update(of_params(taken), gradients=given)
        for name, given in ALIKE.values():
            with pytest.raises(errors.InvalidArgumentError, match="in values and in gradients"):
                params.update(of_params(taken), {name: given}, gradients={name: given})
        assert group.stats().update is None  # the round is not final
        assert state_of(params) == before
        assert params.update(of_params(taken), gradients={})
        with pytest.raises(errors.FailedPreconditionError, match="a round has one"):
            params.update(of_params(taken), gradients={"dense": DENSE})


@pytest.mark.parametrize("given", [lambda p: p["dense"], lambda p: p["dense"][::-1].T[::-1].T])
def test_views_of_the_arrays_are_read_before_anything_changes(
    both: tuple[shmacc.Parameters, shmacc.AccumulatorGroup], given: Callable[[Any], Any]
) -> None:
    params, group = both
    group.apply({"loss": 1.0}, 0)
    with group.round(1):
        of_rows = (np.arange(6), params["dense"])
        gradients = {"dense": given(params), "rows": of_rows, "table": of_rows}
        assert params.update({}, gradients=gradients, learning_rate=1.0)
    assert not params["dense"].any()
    assert not params["rows"].any()


def _die(number: float) -> None:
    """Run a chief that passes a gradient to the update, and dies before its block ends."""
    with (
        shmacc.AccumulatorGroup.attach("group") as group,
        shmacc.Parameters.attach("params") as params,
        group.round(1) as taken,
    ):
        assert params.update(taken, gradients={"w": np.full(3, number)})
        assert not group.apply({"w": np.ones(3)}, 0)
        raise SystemExit  # the round stays final


def test_gradients_that_the_next_chief_gives_after_a_complete_update_are_ignored() -> None:
    """A complete update is not repeated, even if the next chief gives other gradients."""
    with training({"w": np.zeros(3)}, optim.SGD(1.0), ("params", "group")) as (params, group):
        group.apply({"w": np.ones(3)}, 0)
        with pytest.raises(SystemExit):
            run_apart(_die, 2.0)
        with group.round(5) as taken:
            assert not params.update(taken, gradients={"w": np.full(3, 7.0)})
        assert params["w"].tolist() == [-2, -2, -2]
        assert (params.step, group.global_step) == (1, 1)
        params.unlink()


def _taken_of_all_kinds() -> dict[str, Any]:
    with (
        shmacc.SparseConditionalAccumulator("float32", (None, 3)) as rows,
        shmacc.ConditionalAccumulator("float32", (2,)) as dense,
    ):
        found: dict[str, Any] = {}
        for name, call in (
            ("rows", lambda: rows.take(1)),
            ("partial of rows", lambda: rows.take_partial(1)),
            ("tuple", lambda: rows.take_grad(1)),
            ("slices", lambda: rows.take_indexed_slices_grad(1)),
            ("dense", lambda: dense.take(1)),
            ("partial", lambda: dense.take_partial(1)),
        ):
            rows.apply_grad([1], np.ones((1, 3)), local_step=rows.global_step)
            dense.apply_grad(np.ones(2), local_step=dense.global_step)
            found[name] = call()
            for acc in (rows, dense):
                acc.take_partial(0)
        return found


def test_an_augmented_assignment_changes_a_result_in_place() -> None:
    for kind, taken in _taken_of_all_kinds().items():
        field = "value" if hasattr(taken, "value") else "values"
        kept = getattr(taken, field)
        for record in (taken, pickle.loads(pickle.dumps(taken)), copy.deepcopy(taken)):
            exec(f"record.{field} *= 0.5; record.{field} += 1", {"record": record})  # noqa: S102
            assert np.all(getattr(record, field) == 1.5), kind
        assert getattr(taken, field) is kept
        if kind == "slices":
            continue  # like tf.IndexedSlices, this class is not frozen
        for name, other in ((field, kept.copy()), (field, None), ("count", 3), ("none", None)):
            with pytest.raises(FrozenInstanceError, match="cannot be set") as caught:
                setattr(taken, name, other)
            assert (f"taken.{name}[...] = other" in str(caught.value)) == (name == field)
        with pytest.raises(AttributeError):
            delattr(taken, field)


def test_an_update_uses_results_that_were_changed_in_place(
    both: tuple[shmacc.Parameters, shmacc.AccumulatorGroup],
) -> None:
    params, group = both
    full = {"dense": DENSE, "rows": ([1, 3], ROWS[:2]), "table": ([4, 9], ROWS[:2])}
    halves = {"dense": DENSE / 2, "rows": ([1, 3], ROWS[:2] / 2), "table": ([4, 9], ROWS[:2] / 2)}
    group.apply(full, 0)
    with group.round(1) as taken:
        taken["dense"].value *= 0.5
        taken["rows"].values *= 0.5
        taken["table"].values[...] = taken["table"].values / 2
        assert params.update(taken)
    other, its_group = make(optim.SGD(0.5))
    with other, its_group:
        assert update_once(other, its_group, halves)
        assert state_of(params) == state_of(other)
