"""Tables are parameters whose rows have ids; ids need not be known in advance."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import numpy_initial
from helpers.apart import run_apart
from helpers.support import state_of, update_once
from helpers.training import training

import shmacc
from shmacc import (
    AccumulatorGroup,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    TableSpec,
    errors,
    init,
    optim,
)

SPEC = TableSpec((3,), initial=init.Uniform(-1, 1, seed=3))
IDS = np.array([2**63 - 1, 5, 0, 2**40])


@pytest.fixture(name="params")
def _params() -> Iterator[Parameters]:
    contents = {"user": SPEC, "fc": np.zeros((3, 2), np.float32)}
    with Parameters(
        contents, "params", optimizer=optim.Adagrad(0.5), unlink_on_close=True
    ) as params:
        yield params


@pytest.fixture(name="group")
def _group(params: Parameters) -> Iterator[AccumulatorGroup]:
    with AccumulatorGroup(params.member_specs(), "group", unlink_on_close=True) as group:
        yield group


def train(params: Parameters, group: AccumulatorGroup, ids: Any = IDS, **update: Any) -> None:
    """Make an update from one gradient."""
    given = {"user": (ids, np.ones((len(ids), 3), np.float32))}
    assert update_once(params, group, given, **update)


def test_missing_ids_have_their_initial_rows(params: Parameters) -> None:
    table = params["user"]
    asked = np.array([[7, 2**62], [7, 7]])
    expected = numpy_initial.rows(SPEC.initial, asked, (3,))
    assert table[asked].tobytes() == expected.tobytes()
    assert table[asked].shape == (2, 2, 3)
    assert table[7].shape == (3,)
    assert table[[]].shape == (0, 3)
    assert (params.slots["user"]["accumulator"][asked] == np.float32(0.1)).all()
    assert len(table) == 0
    assert table.ids().size == 0
    assert not table.contains(asked).any()
    assert (table.last_updated(asked) == -1).all()
    assert bool(table)


def test_rows_are_made_by_the_update(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group)
    table = params["user"]
    assert table.ids().tolist() == sorted(IDS.tolist())
    assert (len(table), table.dtype, table.row_shape) == (4, np.float32, (3,))
    assert (table.initial, table.max_rows) == (SPEC.initial, None)
    assert 0 < table.nbytes < 1 << 20
    accumulator = np.float32(0.1) + np.float32(1)
    assert (params.slots["user"]["accumulator"][IDS] == accumulator).all()
    first = numpy_initial.rows(SPEC.initial, IDS, (3,))
    step = np.float32(0.5) / np.sqrt(accumulator)
    assert table[IDS].tobytes() == (first - step).tobytes()
    assert "user" in repr(table)


def test_each_row_has_its_last_updates_step(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group)
    train(params, group, np.array([5, 6]))
    table = params["user"]
    assert table.last_updated([5, 6, 0, 77]).tolist() == [1, 1, 0, -1]
    assert table.ids(updated_before=1).tolist() == [0, 2**40, 2**63 - 1]
    assert table.ids(updated_before=0).size == 0
    train(params, group, np.array([5]), remove={"user": table.ids(updated_before=1)})
    assert table.ids().tolist() == [5, 6]
    with pytest.raises(errors.InvalidArgumentError, match="updated_before must be an integer"):
        table.ids(updated_before=1.5)


def test_a_removed_id_gets_its_initial_row(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group)
    after_one = params["user"][IDS].tobytes()
    # The update that changes an id may remove it; ids to remove may be missing or repeated.
    train(params, group, remove={"user": [5, 5, 77]})
    train(params, group, remove={"user": IDS})
    assert len(params["user"]) == 0
    assert params["user"][IDS].tobytes() == numpy_initial.rows(SPEC.initial, IDS, (3,)).tobytes()
    train(params, group)
    assert params["user"][IDS].tobytes() == after_one


def _there_after(**update: Any) -> list[int]:
    """Make an update of each id n at step n, and one of ids 1 and 100; return the ids."""
    with training({"user": SPEC}, optim.SGD(1.0)) as (params, group):
        for step in range(6):
            train(params, group, np.array([step]), remove={"user": [3]})
        train(params, group, np.array([1, 100]), **update)
        found: list[int] = params["user"].ids().tolist()
        return found


@pytest.mark.parametrize(
    ("age", "left"), [(0, []), (1, [5]), (2, [4, 5]), (5, [2, 4, 5]), (6, [0, 2, 4, 5])]
)
def test_old_rows_are_forgotten(age: int, left: list[int]) -> None:
    """Rows of the round or of the call stay, even if the call replaces their gradient."""
    forget = {"user": np.int64(age)}
    assert _there_after(forget=forget) == sorted([1, *left, 100])
    given = {"user": ([0, 1], np.ones((2, 3), np.float32))}
    for way in ("values", "gradients"):
        assert _there_after(forget=forget, **{way: given}) == sorted({0, 1, *left})
    old = {"user": ([100], np.ones((1, 3), np.float32))}  # the round has id 1
    assert _there_after(forget=forget, gradients=old) == sorted({1, *left, 100})


def test_an_update_may_both_forget_and_remove_rows() -> None:
    assert _there_after(forget={"user": 2**63 - 1}) == [0, 1, 2, 4, 5, 100]
    assert _there_after(forget={"user": 1}, remove={"user": [5, 100, 0, 9]}) == [1]
    assert _there_after(forget={}, remove=None) == [0, 1, 2, 4, 5, 100]


def test_rows_that_the_chief_omits_are_kept(params: Parameters, group: AccumulatorGroup) -> None:
    for step, ids in enumerate((IDS, IDS[:1])):
        group.apply({"user": (ids, np.ones((len(ids), 3), np.float32))}, step)
        with group.round(1) as taken:
            assert params.update(taken if step == 0 else {}, forget={"user": 0})
    assert params["user"].ids().tolist() == [IDS[0]]
    assert params["user"].last_updated(IDS[:1]).tolist() == [0]


def test_a_forgotten_row_makes_room_in_a_full_table() -> None:
    with training({"user": TableSpec((3,), max_rows=2)}, optim.SGD(1.0)) as (params, group):
        train(params, group, np.array([1]))
        train(params, group, np.array([2]))
        with pytest.raises(errors.ResourceExhaustedError, match=r"\(remove=, forget=\)"):
            train(params, group, np.array([3]), forget={"user": 2})
        with group.round(1) as taken:
            assert params.update(taken, forget={"user": 1})
        assert params["user"].ids().tolist() == [2, 3]


def test_memory_of_removed_rows_is_reused(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group, np.arange(1000), remove={"user": np.arange(1000)})
    before = params["user"].nbytes
    for turn in range(1, 30):
        ids = np.arange(turn * 1000, (turn + 1) * 1000)
        train(params, group, ids, remove={"user": ids})
    assert params["user"].nbytes < 2 * before


def test_bad_ids_are_refused(params: Parameters, group: AccumulatorGroup) -> None:
    table = params["user"]
    slot = params.slots["user"]["accumulator"]
    bad: list[tuple[Any, str]] = [
        ([-1], "must not be negative, but one is -1"),
        ([0.5], "must be integers, but are float64"),
        ([True], "must be integers, but are bool"),
        (["a"], "must be integers"),
        (np.array([1, 2**63], np.uint64), r"ids & 0x7FFF_FFFF_FFFF_FFFF`, or `ids >> 1`"),
        ([2**63], "below 2\\*\\*63"),
    ]
    for ids, text in bad:
        for look in (table.__getitem__, table.contains, table.last_updated, slot.__getitem__):
            with pytest.raises(errors.InvalidArgumentError, match=text):
                look(ids)
    train(params, group, np.array([3, 5]))
    for dtype in (np.uint8, np.int32, np.uint64, ">i8"):
        assert table.contains(np.array([5, 4], dtype)).tolist() == [True, False]


def test_arrays_and_tables_refuse_each_others_calls(params: Parameters) -> None:
    assert repr(params.member_specs()["user"]) == "IndexedSlicesSpec((None, 3), 'float32')"
    assert ": user: table of float32 (3,), fc: float32 (3, 2)>" in repr(params)
    table: Any = params["user"]
    wrong = errors.InvalidArgumentError
    with pytest.raises(wrong, match=r"values=\{'user': \(ids, rows\)\}"):
        table[[1]] = 0
    with pytest.raises(wrong, match=r"remove=\{'user': ids\}"):
        del table[[1]]
    with pytest.raises(wrong, match=r"table\.ids\(\)"):
        list(table)
    with pytest.raises(TypeError, match="reversible"):
        reversed(table)
    with pytest.raises(wrong, match="contains"):
        assert 5 in table
    with pytest.raises(wrong, match="is no array"):
        np.asarray(table)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(wrong, match="pickle its parameters"):
            copied(table)


def test_values_set_old_and_new_rows(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group, np.array([5]))
    slots = params.slots["user"]["accumulator"]
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    train(params, group, np.array([6]), values={"user": ([9, 5], rows)})
    table = params["user"]
    assert table[[9, 5]].tobytes() == rows.tobytes()
    assert table.ids().tolist() == [5, 9]  # values replace the gradient, so id 6 is not made
    assert slots[[5, 9]].tolist() == [[np.float32(1.1)] * 3, [np.float32(0.1)] * 3]
    assert table.last_updated([5, 9]).tolist() == [1, 1]
    train(params, group, np.array([6]), values={"user": ([], [])})
    assert table.ids().tolist() == [5, 9]


def test_bad_updates_are_refused(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group)
    before = state_of(params)
    group.apply({"user": (IDS, np.ones((4, 3), np.float32))}, 1)
    rows = np.ones((2, 3), "f4")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"values": {"user": np.ones(3)}}, "must be given as \\(ids, rows\\)"),
        ({"values": {"user": None}}, "must be given as \\(ids, rows\\)"),
        ({"values": {"user": ([1, 1], rows)}}, "Id 1 of table 'user' is given"),
        ({"values": {"user": ([1], np.ones((1, 4)))}}, "shape \\[1,3\\], but has \\[1,4\\]"),
        ({"values": {"user": ([[1]], rows[:1])}}, "must be a vector"),
        ({"values": {"user": ([-1], rows[:1])}}, "must not be negative"),
        ({"remove": {"user": [-1]}}, "ids to remove of table 'user' must not be negative"),
        ({"remove": {"fc": [1]}}, "Array 'fc' keeps its rows"),
        ({"remove": {"none": [1]}}, "There is no array 'none'"),
        ({"forget": {"fc": 1}}, "Array 'fc' keeps its rows"),
        ({"forget": {"none": 1}}, "There is no array 'none'"),
        ({"forget": {"user": -1}}, "forgets a row must not be negative, but were -1"),
        ({"forget": {"user": True}}, "must be an integer, but was True"),
        ({"forget": {"user": 1.0}}, "must be an integer, but was 1.0"),
        ({"forget": {"user": None}}, "must be an integer, but was None"),
        ({"forget": {"user": 2**63}}, "must be from"),
        ({"forget": 3}, "forget must be a mapping .*, but was a int"),
        ({"remove": [1]}, "remove must be a mapping .*, but was a list"),
    ]
    with group.round(1) as taken:
        for update, text in bad:
            with pytest.raises(errors.InvalidArgumentError, match=text):
                params.update(taken, **update)
        assert group.stats().update is None  # the round is not final
        assert state_of(params) == before
        assert params.skip(taken)


def test_a_table_without_an_optimizer_is_changed_by_values_only() -> None:
    with training({"user": SPEC}, None, ("params", "group")) as (params, group):
        with pytest.raises(errors.InvalidArgumentError, match="Table 'user' has no optimizer"):
            train(params, group)
        with group.round(1) as taken:
            assert params.update(taken, {"user": ([4], np.ones((1, 3), np.float32))})
        assert params["user"][4].tolist() == [1, 1, 1]
        assert params.slots["user"] == {}


def test_a_full_table_refuses_new_rows() -> None:
    with training({"user": TableSpec((3,), max_rows=2)}, optim.SGD(1)) as (params, group):
        train(params, group, np.array([1, 2]))
        group.apply({"user": (np.array([2, 3]), np.ones((2, 3), np.float32))}, 1)
        before = params["user"][[1, 2, 3]].tobytes()
        with group.round(1) as taken:
            with pytest.raises(errors.ResourceExhaustedError, match="max_rows is 2") as caught:
                params.update(taken)
            assert "'user' would have 3 rows" in str(caught.value)
            assert group.stats().update is None  # the round is not final
            assert params["user"][[1, 2, 3]].tobytes() == before
            assert params.update(taken, remove={"user": [1]})
        assert params["user"].ids().tolist() == [2, 3]
        state = params.state()
        rows = np.repeat(state["0.rows"], 2, axis=0)
        state |= {"0.ids": np.arange(4), "0.last_steps": np.arange(4), "0.rows": rows}
        with pytest.raises(errors.ResourceExhaustedError, match="make the table with a larger"):
            params.restore(state)


def test_a_state_is_independent_of_row_order(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group, np.array([1, 2]))
    train(params, group, np.array([1, 2]), remove={"user": [1]})
    train(params, group, np.array([3]))
    kept = params.state()
    contents = {"user": SPEC, "fc": np.zeros((3, 2), np.float32)}
    with Parameters(contents, "other", optimizer=optim.Adagrad(0.5), unlink_on_close=True) as other:
        specs = other.member_specs()
        with AccumulatorGroup(specs, "others", unlink_on_close=True) as others:
            train(other, others, np.array([3, 70, 71]))
            other.restore(kept)
        assert state_of(other) == state_of(params)
        assert other["user"].last_updated([2, 3, 70]).tolist() == [1, 2, -1]


def test_states_that_do_not_fit_are_refused(params: Parameters, group: AccumulatorGroup) -> None:
    train(params, group)
    state = params.state()
    with Parameters({"user": np.zeros((4, 3), np.float32)}, "arrays", unlink_on_close=True) as own:
        with pytest.raises(errors.InvalidArgumentError, match="'user' is that of table of float32"):
            own.restore({**state, "arrays": np.array(["user"]), "specs": state["specs"][:1]})
        of_array = own.state()["specs"]
    with pytest.raises(errors.InvalidArgumentError, match="the parameters' is table of"):
        params.restore({**state, "specs": np.concatenate([of_array, state["specs"][1:]])})
    for key, wrong in {
        "0.rows": state["0.rows"][:2],
        "0.ids": state["0.ids"][::-1].copy(),
        "0.accumulator": state["0.accumulator"].astype(np.float64),
        "0.last_steps": state["0.last_steps"][:1],
        "0.last_steps ": state["0.last_steps"].astype(np.float64),
        "0.ids ": state["0.ids"] - 1,
    }.items():
        with pytest.raises(errors.InvalidArgumentError):
            params.restore({**state, key.strip(): wrong})
    assert state_of(params) == {name: array.tobytes() for name, array in state.items()}


def test_other_processes_read_the_same_rows(params: Parameters, group: AccumulatorGroup) -> None:
    def read(pickled: bytes) -> list[Any]:
        with Parameters.attach("params") as attached:
            by_name = [attached["user"].ids().tolist(), attached["user"][IDS].tobytes()]
        with pickle.loads(pickled) as theirs:
            table = theirs["user"]
            assert table.initial == SPEC.initial
            assert [table.ids().tolist(), table[IDS].tobytes()] == by_name
        return by_name

    train(params, group)
    table = params["user"]
    expected = [table.ids().tolist(), table[IDS].tobytes()]
    assert run_apart(read, pickle.dumps(params)) == expected


def test_shared_arrays_refuse_tables(params: Parameters) -> None:
    wrong = errors.InvalidArgumentError
    with pytest.raises(wrong, match="has a table, 'user', which is no shared array"):
        SharedArrays.attach(params.shared_name)
    contents: Any = {"user": SPEC}
    with pytest.raises(wrong, match="is no shared array: "):
        SharedArrays(contents, "arrays")
    with pytest.raises(wrong, match=r"is no array: table\[ids\] are rows, params.snapshot"):
        SharedArrays({"user": params["user"]}, "arrays")


def test_a_sparse_accumulator_may_have_a_tables_gradient() -> None:
    with (
        Parameters({"t": SPEC}, "params", optimizer=optim.SGD(1), unlink_on_close=True) as params,
        SparseConditionalAccumulator("f4", (None, 3), "sparse", unlink_on_close=True) as acc,
    ):
        acc.apply_grad([4], np.ones((1, 3)), local_step=0)
        with acc.round(1) as taken:
            assert params.update(taken, remove={"t": [5]})
        assert params["t"].ids().tolist() == [4]


def test_tables_of_closed_parameters_raise() -> None:
    params = Parameters({"t": SPEC}, "params", unlink_on_close=True)
    table = params["t"]
    params.close()
    for use in (table.ids, lambda: table[[1]], lambda: len(table), lambda: params["t"]):
        with pytest.raises(errors.FailedPreconditionError, match="are closed"):
            use()


def test_bad_specs_are_refused() -> None:
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ((None,), {}, "must be known"),
        ((-1,), {}, "must be >= 0"),
        ((3,), {"dtype": "int32"}, "float32 or float64, but int32"),
        ((3,), {"dtype": "bfloat16"}, "float32 or float64, but bfloat16"),
        ((3,), {"initial": 0.5}, "one of shmacc.init's"),
        ((3,), {"initial": init.Constant(1e300)}, "at most 3.4e\\+38"),
        ((3,), {"max_rows": 0}, "max_rows must be 1 to"),
    ]
    for shape, more, text in bad:
        with pytest.raises(errors.InvalidArgumentError, match=text):
            TableSpec(shape, **more)


def test_specs_are_frozen_and_comparable() -> None:
    one = TableSpec(3, np.float32, initial=init.Constant(), max_rows=None)  # type: ignore[arg-type]
    assert one == TableSpec((3,)) != TableSpec((3,), "float64")
    assert hash(one) == hash(TableSpec((3,)))
    assert "row_shape=(3,)" in repr(one)
    with pytest.raises(AttributeError):
        one.max_rows = 3  # type: ignore[misc]


@pytest.mark.parametrize("optimizer", [optim.Adam(0.1), optim.Adagrad(0.1, rowwise=True)])
def test_a_row_may_be_a_number_or_empty(optimizer: optim.Optimizer) -> None:
    contents = {"number": TableSpec((), "float64"), "empty": TableSpec((0,))}
    with training(contents, optimizer, ("params", "group")) as (params, group):
        rows = {"number": ([4, 5], np.ones(2)), "empty": ([4, 5], np.ones((2, 0), "f4"))}
        update_once(params, group, rows)
        assert params["number"][5].shape == ()
        assert params["number"][[5, 6]].shape == (2,)
        assert params["number"][6] == 0 != params["number"][5]
        assert params["empty"][[4, 9]].shape == (2, 0)
        assert params["empty"].ids().tolist() == [4, 5]
        for slot in params.slots["empty"].values():
            assert slot[[4, 9]].size == 0
        shmacc.Parameters.restore(params, params.state())
