"""Parameters are shared arrays that only updates change, once a round."""

import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.support import update_once

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
    optim,
)

TABLE = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture
def params() -> Iterator[Parameters]:
    """Yield parameters with a table and a vector, which SGD trains, and untrained words."""
    with Parameters(
        {"table": TABLE, "vector": TensorSpec((4,), "float64"), "words": np.arange(3)},
        "params",
        optimizer={"table": optim.SGD(1), "vector": optim.SGD(0.5, 0.5)},
    ) as made:
        yield made
        made.unlink()


@pytest.fixture
def group(params: Parameters) -> Iterator[AccumulatorGroup]:
    """Yield a group for gradients of the table and the vector."""
    specs = params.member_specs(sparse=["table"])
    del specs["words"]
    with AccumulatorGroup(specs, "group", reduction_type="SUM", unlink_on_close=True) as made:
        yield made


def full(number: float) -> dict[str, Any]:
    """Return a gradient for two rows of the table and for the whole vector."""
    return {"table": ([1, 5], np.full((2, 3), number, np.float32)), "vector": np.full(4, number)}


def one_round(params: Parameters, group: AccumulatorGroup, number: float, **how: Any) -> bool:
    return update_once(params, group, full(number), **how)


def test_an_update_changes_rows_in_place(params: Parameters, group: AccumulatorGroup) -> None:
    table, expected = params["table"], TABLE.copy()
    assert params.step == 0
    assert one_round(params, group, 2)
    expected[[1, 5]] -= 2
    np.testing.assert_array_equal(table, expected)
    np.testing.assert_array_equal(params["vector"], [-1] * 4)
    np.testing.assert_array_equal(params.slots["vector"]["momentum"], [2] * 4)
    assert (params.step, group.global_step) == (1, 1)


def test_patterns_set_learning_rates_of_arrays(params: Parameters, group: AccumulatorGroup) -> None:
    """Arrays that match no pattern keep their optimizer's rate. A rate holds for one update."""
    one_round(params, group, 1, learning_rate={"ta*": 10})
    np.testing.assert_array_equal(params["table"][1], TABLE[1] - 10)
    vector = params["vector"].copy()
    assert vector.any()
    one_round(params, group, 1, learning_rate={"table": 1, "*": 0})
    np.testing.assert_array_equal(params["table"][1], TABLE[1] - 11)
    np.testing.assert_array_equal(params["vector"], vector)
    one_round(params, group, 1, learning_rate=10)
    one_round(params, group, 1)
    np.testing.assert_array_equal(params["table"][1], TABLE[1] - 22)


def test_patterns_set_the_optimizers_of_arrays() -> None:
    """The first matching pattern decides. A bracket, as in JAX's names, is no wildcard."""
    arrays = dict.fromkeys(["['a']['w']", "['b']['w']", "a", "c.w"], np.ones(2))
    by = {"['b']*": optim.SGD(1), "[*": optim.SGD(2), "a": optim.SGD(3), "*": optim.SGD(4)}
    with Parameters(arrays, optimizer=by) as params:
        assert list(params.optimizers.values()) == [optim.SGD(n) for n in (2, 1, 3, 4)]
    with Parameters(arrays, optimizer={"c*": optim.SGD(1)}) as params:
        assert [name for name, optimizer in params.optimizers.items() if optimizer] == ["c.w"]
    for wrong, words in (
        ({"*": optim.SGD(1), "a": optim.SGD(2)}, r"for 'a', which is no array, or each has an ear"),
        ({"d": optim.SGD(1)}, r"for 'd', which is no array$"),
        ({1: optim.SGD(1)}, r"a name was 1"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=words):
            Parameters(arrays, optimizer=wrong)  # type: ignore[arg-type]


def test_a_bad_learning_rate_is_refused(params: Parameters, group: AccumulatorGroup) -> None:
    bad: list[Any] = [-1, float("nan"), "fast", True, {"table": -1}, {"tables": 1}]
    group.apply(full(1), 0)
    with group.round(1) as taken:
        for rate in bad:
            with pytest.raises(errors.InvalidArgumentError, match="learning_rate"):
                params.update(taken, learning_rate=rate)
        assert group.stats().update is None
        params.update(taken)


def test_an_update_may_give_new_contents_instead_of_using_an_optimizer(
    params: Parameters, group: AccumulatorGroup
) -> None:
    new = np.arange(4.0)
    rows = ([6, 0], np.full((2, 3), 7.0))
    one_round(params, group, 1, values={"vector": new, "table": rows, "words": [4, 5, 6]})
    expected = TABLE.copy()
    expected[[0, 6]] = 7
    np.testing.assert_array_equal(params["table"], expected)
    np.testing.assert_array_equal(params["vector"], new)
    np.testing.assert_array_equal(params["words"], [4, 5, 6])
    np.testing.assert_array_equal(params.slots["vector"]["momentum"], [0] * 4)

    # New contents may be views of the arrays.
    moved = {"table": (range(2, 6), params["table"][1:5]), "vector": params["vector"]}
    one_round(params, group, 1, values=moved)
    expected[2:6] = expected[1:5].copy()
    np.testing.assert_array_equal(params["table"], expected)

    # New contents may be no rows at all.
    one_round(params, group, 1, values={"table": ([], [])})
    np.testing.assert_array_equal(params["table"], expected)


def test_a_single_accumulators_round_updates_one_array() -> None:
    with Parameters({"w": np.zeros(2)}, optimizer=optim.SGD(1)) as params:
        with ConditionalAccumulator("float64", (2,)) as acc:
            acc.apply_grad([1, 2])
            with acc.round(1) as taken:
                assert params.update(taken)
        np.testing.assert_array_equal(params["w"], [-1, -2])
        with SparseConditionalAccumulator("float64", (2,)) as rows:
            rows.set_global_step(1)
            rows.apply_grad([1], [5.0], local_step=1)
            with rows.round(1) as taken:
                assert params.update({"w": taken})
        np.testing.assert_array_equal(params["w"], [-1, -7])


def test_a_single_accumulators_update_must_name_its_array(params: Parameters) -> None:
    with ConditionalAccumulator("float64", (4,)) as acc:
        acc.apply_grad(np.ones(4))
        with acc.round(1) as taken:
            with pytest.raises(errors.InvalidArgumentError, match="3 arrays: say of which"):
                params.update(taken)
            assert params.update({"vector": taken})
    with ConditionalAccumulator("float32", (4,)) as acc:
        acc.apply_grad(np.ones(4))
        with acc.round(1) as taken, pytest.raises(errors.InvalidArgumentError, match="float64"):
            params.update({"vector": taken})
    np.testing.assert_array_equal(params["vector"], [-0.5] * 4)


@pytest.mark.parametrize(("gradient", "values", "what"), [
    ({"table": ([8], np.ones((1, 3)))}, {}, "'table' has no row 8: it has 8"),
    ({"vector": np.ones(5)}, {}, "'vector' must have shape"),
    ({}, {"table": ([1, 1], np.ones((2, 3)))}, "Row 1 of array 'table' is given twice"),
    ({}, {"table": ([-1], np.ones((1, 3)))}, "no row -1"),
    ({}, {"table": np.ones((8, 2))}, "'table' must have shape"),
    ({}, {"table": np.ones((8, 3), complex)}, "do not convert to float32"),
    ({}, {"other": 1}, "no array 'other'"),
    ({}, {"table": (1, 2, 3)}, r"an array or \(indices, rows\)"),
    ({"words": np.ones(3, np.int64)}, {}, "'words' has no optimizer"),
])  # fmt: skip
def test_a_bad_update_changes_nothing_and_makes_nothing_final(
    params: Parameters, gradient: dict[str, Any], values: dict[str, Any], what: str
) -> None:
    specs: dict[str, Any] = {
        "table": shmacc.IndexedSlicesSpec((None, 3)),
        "vector": TensorSpec(None, "float64"),
        "words": TensorSpec((3,), "int64"),
    }
    with AccumulatorGroup(specs) as wide:
        wide.apply(gradient, 0)
        with wide.round(1) as taken, pytest.raises(errors.InvalidArgumentError, match=what):
            params.update(taken, values)
        assert wide.global_step == 1  # the block ended like one without an update
    np.testing.assert_array_equal(params["table"], TABLE)
    assert params.step == 0


def test_an_update_needs_an_open_round(params: Parameters, group: AccumulatorGroup) -> None:
    group.apply(full(1), 0)
    with group.round(1) as taken:
        pass
    for wrong in (taken, group.snapshot(), {}, None, {"table": 1}):
        with pytest.raises(errors.FailedPreconditionError, match="in the block of a round"):
            params.update(wrong)  # type: ignore[arg-type]


def test_an_update_without_gradients_is_refused_with_the_remedy(params: Parameters) -> None:
    """If no array has a gradient, the chief's mapping is empty and does not show its round."""
    with (
        AccumulatorGroup({"loss": TensorSpec(())}) as group,
        AccumulatorGroup({"loss": TensorSpec(())}) as other,
    ):
        group.apply({"loss": 1}, 0)
        other.apply({"loss": 1}, 0)
        with group.round(1) as taken:
            with (
                other.round(1),
                pytest.raises(
                    errors.FailedPreconditionError, match=r"2 open: params\.update\(taken\.only"
                ),
            ):
                params.update({name: taken[name] for name in taken if name in params})
            assert params.update({name: taken[name] for name in taken if name in params})
    assert params.step == 1
    np.testing.assert_array_equal(params["table"], TABLE)


def test_an_update_of_an_old_round_is_refused(params: Parameters, group: AccumulatorGroup) -> None:
    group.set_global_step(7)
    one_round(params, group, 1)
    assert params.step == 8
    group.set_global_step(3)
    group.apply(full(1), 3)
    past = pytest.raises(errors.FailedPreconditionError, match="of step 8, so they are past")
    with group.round(1) as taken, past:
        params.update(taken)


def test_arrays_and_slots_are_read_only_everywhere(params: Parameters) -> None:
    again = Parameters.attach("params")
    with again, SharedArrays.attach("params") as arrays, shmacc.attach("params") as any_kind:
        assert type(any_kind) is Parameters
        for own in (params, again, arrays, any_kind):
            with pytest.raises(ValueError, match="read-only"):
                own["table"][0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                own["table"].flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            params.slots["vector"]["momentum"][0] = 1
        with pytest.raises(errors.InvalidArgumentError, match="which only updates change"):
            SharedArrays.attach("params", writable=True)
        with pytest.raises(errors.InvalidArgumentError, match="which only updates change"):
            SharedArrays({"table": TABLE}, "params")
        with pytest.raises(errors.InvalidArgumentError, match="kind parameters"):
            ConditionalAccumulator("float32", (), "params")


def test_shared_arrays_are_no_parameters() -> None:
    with SharedArrays({"a": [1.0]}, "arrays", unlink_on_close=True):
        with pytest.raises(
            errors.InvalidArgumentError, match=r"shared arrays \(shmacc.SharedArrays"
        ):
            Parameters.attach("arrays")
        with pytest.raises(errors.InvalidArgumentError, match="kind arrays"):
            Parameters({"a": [1.0]}, "arrays")


@pytest.mark.usefixtures("params")
def test_attached_parameters_have_the_creators_optimizers() -> None:
    with Parameters.attach("params") as again:
        own = {"table": optim.SGD(1), "vector": optim.SGD(0.5, 0.5), "words": None}
        assert again.optimizers == own


def test_bad_optimizers_are_refused() -> None:
    for optimizer, what in (
        (optim.SGD(1), "float32 or float64, but array 'n' has int64"),
        ({"m": optim.SGD(1)}, "for 'm', which is no array"),
        ({"n": 0.1}, "object of shmacc.optim's"),
        (type("Own", (optim.SGD,), {})(1), "object of shmacc.optim's"),
        (optim.SGD, "object of shmacc.optim's"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=what):
            Parameters({"n": [1]}, optimizer=optimizer)  # type: ignore[arg-type]


def test_parameters_pickle(params: Parameters, group: AccumulatorGroup) -> None:
    again = pickle.loads(pickle.dumps(params))
    with again:
        one_round(again, group, 1)
        np.testing.assert_array_equal(params["table"][1], TABLE[1] - 1)


def test_a_snapshot_is_a_copy(params: Parameters, group: AccumulatorGroup) -> None:
    one_round(params, group, 1)
    step, arrays = params.snapshot()
    assert step == 1
    assert arrays.keys() == params.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, params[name])
    one_round(params, group, 1)
    np.testing.assert_array_equal(arrays["table"][1], TABLE[1] - 1)


def test_a_state_survives_savez(params: Parameters, group: AccumulatorGroup) -> None:
    one_round(params, group, 1)
    file = io.BytesIO()
    state: dict[str, Any] = params.state()
    np.savez(file, **state)
    one_round(params, group, 3)
    file.seek(0)
    with np.load(file) as loaded:
        params.restore(loaded)
    assert {name: array.tobytes() for name, array in params.state().items()} == {
        name: array.tobytes() for name, array in state.items()
    }


def test_a_state_of_other_parameters_is_refused(params: Parameters) -> None:
    state = params.state()
    for optimizer in (optim.SGD(1), optim.Adam(1)):
        refused = pytest.raises(errors.InvalidArgumentError, match="state of array")
        with Parameters({"table": TABLE}, optimizer=optimizer) as other, refused:
            other.restore(state)
    for key in ("0.array", "step", "arrays", "1.momentum", "updates"):
        broken = {name: value for name, value in state.items() if name != key}
        with pytest.raises(errors.InvalidArgumentError, match=f"no '{key}'"):
            params.restore(broken)
    with pytest.raises(errors.InvalidArgumentError, match=r"'1\.momentum' is float32"):
        params.restore({**state, "1.momentum": np.zeros(4, np.float32)})


def test_member_specs_describe_the_gradients_of_arrays() -> None:
    with Parameters({"a": np.zeros((2, 3)), "b": np.float32(0), "c": [True]}) as params:
        specs = params.member_specs(["a"])
        expected = {"a": shmacc.IndexedSlicesSpec((2, 3), "float64"), "b": TensorSpec(())}
        assert repr(specs) == repr(expected)
        assert repr(TensorSpec((2,), "qint8")) == "TensorSpec((2,), 'qint8')"
        for sparse, what in ((["d"], "no array 'd'"), ("b", "has no rows")):
            with pytest.raises(errors.InvalidArgumentError, match=what):
                params.member_specs(sparse)


def test_closed_parameters_raise(group: AccumulatorGroup) -> None:
    again = Parameters.attach("params")
    again.close()
    group.apply(full(1), 0)
    closed = (again.snapshot, again.state, lambda: again.step, lambda: again.slots)
    with group.round(1) as taken:
        for call in (*closed, lambda: again.update(taken)):
            with pytest.raises(errors.FailedPreconditionError, match="closed"):
                call()
