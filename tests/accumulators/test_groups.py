"""A group's gradient is one gradient of many tensors: one step, one count, one commit."""

import pickle
from typing import Any, Final

import numpy as np
import pytest
from helpers.group_model import ModelledGroup, gradients
from helpers.support import Repeating, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import shmacc
from shmacc import errors, inspection

TWO: Final = {
    "emb": shmacc.IndexedSlicesSpec((10, 2), "float32"),
    "fc": shmacc.TensorSpec((3,), "float32", reduction_type="SUM"),
}
GRADIENT: Final = {"emb": ([7, 3], [[1, 2], [3, 4]]), "fc": [1, 2, 3]}


def make_group(*args: Any, **keywords: Any) -> Any:
    """Make a group that unlinks its name; its type is Any, as each test knows its members."""
    return shmacc.AccumulatorGroup(*args, unlink_on_close=True, **keywords)


_apply: Final = st.tuples(
    st.just("apply"),
    gradients,
    st.sampled_from((0, 0, 0, 1, -1)),
    st.none() | st.integers(0, 5),
    st.sampled_from((1, 1, 2, 7)),
)
_deeds: Final = st.lists(
    st.one_of(
        *[_apply] * 4,
        st.tuples(st.sampled_from(["take", "move", "the other"])),
        st.tuples(st.just("round"), st.booleans()),
        st.tuples(st.just("advance"), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(deeds=_deeds, lanes=st.sampled_from((1, 1, 2, 3)))
def test_any_calls_give_the_models_results(deeds: list[tuple[Any, ...]], lanes: int) -> None:
    one, other = ModelledGroup(lanes), ModelledGroup(1)
    with one.group, other.group:
        for deed, *how in deeds:
            if deed == "apply":
                one.apply(*how)
            elif deed == "take":
                one.take()
            elif deed == "round":
                one.round(raises=how[0])
            elif deed == "move":
                other.apply_partial(*one.take_partial())
            elif deed == "advance":
                one.advance(*how)
            else:
                one, other = other, one
        one.take()
        other.take()


@pytest.fixture
def group() -> Any:
    """A private group of a sparse and a dense member."""
    with make_group(TWO) as made:
        yield made


BAD: Final[list[tuple[str, Any]]] = [
    *(("fc", [[1, 2, 3]]), ("fc", [1, 2]), ("fc", "four"), ("fc", np.array([1j, 2, 3]))),
    *(("emb", [1, 2, 3]), ("emb", ([10], [[1, 2]])), ("emb", ([-1], [[1, 2]]))),
    *(("emb", ([1, 2], [[1, 2]])), ("emb", ([1], [[1, 2, 3]]))),
    ("emb", shmacc.IndexedSlices([[1.0, 2.0]], [1], [10, 3])),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_an_error_names_the_member_and_nothing_is_added(group: Any, name: str, value: Any) -> None:
    assert group.apply(GRADIENT, 0)
    with pytest.raises(errors.InvalidArgumentError, match=repr(name)) as caught:
        group.apply(GRADIENT | {name: value}, 0)
    assert repr(name) in str(pickle.loads(pickle.dumps(caught.value)))
    taken = group.take(1)
    assert (taken.count, taken["emb"].row_counts.tolist()) == (1, [1, 1])
    assert taken["fc"].value.tolist() == [1, 2, 3]


def test_an_unknown_member_is_refused(group: Any) -> None:
    for name in ("nobody", 3, None):
        with pytest.raises(errors.InvalidArgumentError, match=f"no member {name!r}"):
            group.apply({"emb": ([1], [[1, 2]]), name: [1]}, 0)
    for gradient in (None, [1, 2], "emb"):
        with refused():
            group.apply(gradient, 0)
    assert group.num_accumulated() == 0


@pytest.mark.parametrize("lanes", [1, 32])
def test_an_unused_member_costs_what_the_documentation_says(lanes: int) -> None:
    """A member costs 64 bytes and 320 for each lane: 1 KiB with three lanes."""
    members, page = 1000, 4096
    with make_group(
        {f"m{i}": shmacc.TensorSpec((2,)) for i in range(members)}, "sized", lanes=lanes
    ):
        (summary,) = inspection.list_segments("sized")
        directory = members * 64
        assert summary.bytes_reserved <= 320 * lanes * members + directory + (lanes + 8) * page


def test_a_mapping_whose_items_repeat_a_member_is_refused(group: Any) -> None:
    """Without the refusal, only one of the member's two gradients would be added."""
    group.apply(GRADIENT, 0)
    partial = group.take_partial(1)
    repeating: Any = Repeating(partial)
    repeating.count = partial.count
    for call in (
        lambda: group.apply(Repeating(GRADIENT), 0),
        lambda: group.apply_partial(repeating),
        lambda: shmacc.AccumulatorGroup(Repeating(TWO)),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=r"'(emb|fc)'.* more than once"):
            call()
    assert group.num_accumulated() == 0


def test_a_wrong_round_shape_in_one_member_undoes_the_gradient() -> None:
    specs = {
        "first": shmacc.IndexedSlicesSpec((None, 2), "int64", reduction_type="SUM"),
        "free": shmacc.TensorSpec(None, "float32"),
    }
    with make_group(specs) as group:
        assert group.apply({"first": ([1], [[1, 1]]), "free": [1, 2]}, 0)
        for _ in range(3):
            with pytest.raises(errors.InvalidArgumentError, match="'free'"):
                group.apply({"first": ([1, 2], [[5, 5], [6, 6]]), "free": [1, 2, 3]}, 0)
        taken = group.take(1)
        assert taken["first"].indices.tolist() == [1]
        assert taken["first"].values.tolist() == [[1, 1]]


@pytest.mark.parametrize("last", [True, False])
def test_an_overflow_in_one_member_undoes_the_gradient(*, last: bool) -> None:
    specs = {
        name: shmacc.TensorSpec((), "int64", reduction_type="SUM")
        if name == "dense"
        else shmacc.IndexedSlicesSpec((None, 1), "int64", reduction_type="SUM")
        for name in (("rows", "dense", "full") if last else ("full", "rows", "dense"))
    }
    with make_group(specs) as group:
        assert group.apply({"full": ([1], [[2**62]]), "rows": ([1, 2], [[1], [2]]), "dense": 5}, 0)
        for _ in range(2):
            more = {"full": ([1], [[2**62]]), "rows": ([2, 3], [[7], [8]]), "dense": 9}
            with pytest.raises(errors.OutOfRangeError, match="'full'"):
                group.apply({name: more[name] for name in specs}, 0)
        assert group.apply({"rows": ([2, 3], [[1], [1]])}, 0)
        taken = group.take(2)
        assert taken["full"].values.tolist() == [[2**62]]
        assert taken["rows"].values.tolist() == [[1], [3], [1]]
        assert taken["rows"].row_counts.tolist() == [1, 2, 1]
        assert taken["dense"].value == 5


def test_a_result_that_overflows_names_its_member_and_keeps_the_round() -> None:
    specs = {
        "fine": shmacc.TensorSpec((), "float32"),
        "small": shmacc.TensorSpec((), "int8", reduction_type="SUM"),
    }
    with make_group(specs) as group:
        for _ in range(2):
            assert group.apply({"fine": 1, "small": 100}, 0)
        with pytest.raises(errors.OutOfRangeError, match="'small'"):
            group.take(2, timeout=0)
        assert (group.num_accumulated(), group.global_step) == (2, 0)
        assert group.take_partial(2)["small"].value == 200


def test_a_group_may_have_as_many_members_as_documented() -> None:
    specs = {f"layer.{i}.weight": shmacc.TensorSpec((2,), "float32") for i in range(4096)}
    with make_group(specs, "many") as group:
        assert group.apply({name: [i, 1] for i, name in enumerate(specs)}, 0)
        assert group.apply({"layer.4095.weight": [1, 1]}, 0)
        other: Any
        with shmacc.AccumulatorGroup.attach("many") as other:
            assert other.members.keys() == specs.keys()
            taken = other.take(2)
        assert len(taken) == 4096
        np.testing.assert_array_equal(taken["layer.77.weight"].value, [77, 1])
        np.testing.assert_array_equal(taken["layer.4095.weight"].value, [2048, 1])
    with pytest.raises(errors.InvalidArgumentError, match="1 to 4096 members"):
        make_group(specs | {"one more": shmacc.TensorSpec()})


def test_names_of_members_are_accepted_or_refused_as_documented() -> None:
    names = ["a", "x" * 200, "décodeur", "層" * 200, "['enc'][0].w", "a/b c"]
    with make_group(dict.fromkeys(names, shmacc.TensorSpec(())), "named") as group:
        assert group.apply(dict.fromkeys(names, 2), 0)
        with shmacc.AccumulatorGroup.attach("named") as other:
            assert list(other.take(1)) == names


def test_members_that_are_no_mapping_of_specs_are_refused() -> None:
    for name in ("", "x" * 201, "a\0b", "a\nb", "\x7f", 3, None, b"bytes"):
        with pytest.raises(errors.InvalidArgumentError, match="name"):
            make_group({name: shmacc.TensorSpec()})
    for specs in (None, 4, [("a", shmacc.TensorSpec())], {"a": "float32"}, {"a": None}, {}):
        with refused():
            make_group(specs)


def test_members_may_be_given_in_another_order() -> None:
    turned, gradient = (dict(reversed(given.items())) for given in (TWO, GRADIENT))
    with make_group(TWO, "agreed") as group, make_group(turned, "agreed") as other:
        assert group.apply(GRADIENT, 0)
        assert other.apply(gradient, 0)
        assert group.take(2)["fc"].value.tolist() == [2, 4, 6]


def test_attach_returns_the_group() -> None:
    with (
        make_group(TWO, "attached", reduction_type="CMEAN", lanes=2, capacity=9),
        shmacc.attach("attached") as found,
    ):
        assert isinstance(found, shmacc.AccumulatorGroup)
        assert (found.lanes, found.capacity, found.reduction_type) == (2, 9, "CMEAN")
        assert found.members["emb"].reduction_type == "CMEAN"
        assert found.members["fc"].reduction_type == "SUM"
        assert found.members["emb"].shape == (10, 2)
        assert isinstance(found.members["emb"], shmacc.IndexedSlicesSpec)
        assert not isinstance(found.members["fc"], shmacc.IndexedSlicesSpec)


def test_a_pickled_partial_can_be_applied_to_another_group(group: Any) -> None:
    with make_group(TWO) as far:
        group.apply(GRADIENT, 0, contributor=4, weight=3)
        group.apply({"fc": [1, 1, 1]}, 0)
        far.apply(GRADIENT, 0)
        partial = group.take_partial(2)
        assert isinstance(partial, shmacc.GroupPartial)
        assert far.apply_partial(pickle.loads(pickle.dumps(partial)))
        taken = far.take(3, timeout=0)
        assert (taken.count, taken.weight, taken["emb"].weight) == (3, 5, 4)
        assert taken.contributors.tolist() == [4]
        with pytest.raises(errors.AlreadyExistsError):
            for _ in range(2):
                far.apply_partial(partial, 1)
        assert taken["emb"].row_counts.tolist() == [4, 4]
        assert taken["fc"].value.tolist() == [5, 9, 13]


@pytest.mark.parametrize("changed", [{"count": 5}, {"weight": 9}, {"count": 0}])
def test_a_partial_whose_members_count_more_is_refused(group: Any, changed: dict[str, int]) -> None:
    fields: dict[str, Any] = {"count": 1, "step": 0} | changed
    of_fc = shmacc.DensePartial(np.ones(3, np.float32), **fields)
    with pytest.raises(errors.InvalidArgumentError, match="'fc'"):
        group.apply_partial(shmacc.GroupPartial({"fc": of_fc}, 2, 0))
    group.apply(GRADIENT, 0)
    with pytest.raises(errors.InvalidArgumentError, match="take_partial"):
        group.apply_partial(group.take(1))  # a take's result is no partial
    assert group.num_accumulated() == 0
