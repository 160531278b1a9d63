"""The gradients of many tensors as one: a step, a count and a commit for all members."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import every_start_method
from helpers.group_model import MEMBERS, ModelledGroup, gradients
from helpers.support import refused
from hypothesis import given, settings
from hypothesis import strategies as st

import shmacc
from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    GroupPartial,
    IndexedSlices,
    IndexedSlicesSpec,
    TensorSpec,
    errors,
    inspection,
)

if TYPE_CHECKING:
    from helpers.apart import Crew

TWO: Final = {
    "emb": IndexedSlicesSpec((10, 2), "float32"),
    "fc": TensorSpec((3,), "float32", reduction_type="SUM"),
}
GRADIENT: Final = {"emb": ([7, 3], [[1, 2], [3, 4]]), "fc": [1, 2, 3]}


def make_group(*args: Any, **keywords: Any) -> Any:
    """Any, since each test knows which members are sparse."""
    return AccumulatorGroup(*args, **keywords)


_deeds: Final = st.lists(
    st.one_of(
        *[
            st.tuples(
                st.just("apply"),
                gradients,
                st.sampled_from((0, 0, 0, 1, -1)),
                st.none() | st.integers(0, 5),
                st.sampled_from((1, 1, 2, 7)),
            )
        ]
        * 4,
        st.tuples(st.just("take")),
        st.tuples(st.just("round"), st.booleans()),
        st.tuples(st.just("move")),
        st.tuples(st.just("advance"), st.integers(0, 2)),
        st.tuples(st.just("the other")),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(deeds=_deeds, lanes=st.sampled_from((1, 1, 2, 3)))
def test_any_sequence_of_calls_gives_what_numpy_gives(
    deeds: list[tuple[Any, ...]], lanes: int
) -> None:
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
    """A private one of a sparse and a dense member."""
    with make_group(TWO) as made:
        yield made


def test_a_member_left_out_contributes_nothing(group: Any) -> None:
    assert group.apply({"emb": ([3], [[2, 4]])}, 0)
    assert group.apply(GRADIENT, 0)
    taken = group.take(2)
    assert (taken.count, taken["emb"].count, taken["fc"].count) == (2, 2, 1)
    np.testing.assert_array_equal(taken["emb"].values, [[2.5, 4], [1, 2]])
    np.testing.assert_array_equal(taken["fc"].value, [1, 2, 3])


def test_an_empty_mapping_is_a_gradient(group: Any) -> None:
    assert group.apply({}, 0)
    assert group.num_accumulated() == 1
    taken = group.take(1, timeout=0)
    assert (taken.count, dict(taken), taken.step) == (1, {}, 0)
    assert group.global_step == 1


def test_a_member_without_rows_is_present(group: Any) -> None:
    assert group.apply({"emb": ([], np.empty((0, 2)))}, 0)
    taken = group.take(1)
    assert list(taken) == ["emb"]
    assert taken["emb"].values.shape == (0, 2)
    with pytest.raises(KeyError):
        taken["fc"]


def test_slices_of_any_make_go_into_a_sparse_member(group: Any) -> None:
    alike = SimpleNamespace(indices=[1], values=[[1.0, 1.0]], dense_shape=[10, 2])
    for slices in (([1], [[1.0, 1.0]]), IndexedSlices([[1.0, 1.0]], [1]), alike):
        assert group.apply({"emb": slices}, 0)
    assert group.take(3)["emb"].row_counts.tolist() == [3]


BAD: Final[dict[str, tuple[str, Any]]] = {
    "another rank": ("fc", [[1, 2, 3]]),
    "another size": ("fc", [1, 2]),
    "no array": ("fc", "four"),
    "no rows": ("emb", [1, 2, 3]),
    "an index too large": ("emb", ([10], [[1, 2]])),
    "a negative index": ("emb", ([-1], [[1, 2]])),
    "as many indices as rows": ("emb", ([1, 2], [[1, 2]])),
    "another width": ("emb", ([1], [[1, 2, 3]])),
    "of another type": ("fc", np.array([1j, 2, 3])),
    "another shape": ("emb", IndexedSlices([[1.0, 2.0]], [1], [10, 3])),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_members_bad_gradient_names_it_and_adds_nothing(group: Any, bad: str) -> None:
    assert group.apply(GRADIENT, 0)
    name, value = BAD[bad]
    with pytest.raises(errors.InvalidArgumentError, match=repr(name)) as caught:
        group.apply(GRADIENT | {name: value}, 0)
    assert repr(name) in str(pickle.loads(pickle.dumps(caught.value)))
    taken = group.take(1)
    assert (taken.count, taken["emb"].count, taken["fc"].count) == (1, 1, 1)
    np.testing.assert_array_equal(taken["fc"].value, [1, 2, 3])
    np.testing.assert_array_equal(taken["emb"].row_counts, [1, 1])


def test_an_unknown_member_is_refused(group: Any) -> None:
    for name in ("nobody", 3, None):
        with pytest.raises(errors.InvalidArgumentError, match=f"no member {name!r}"):
            group.apply({"emb": ([1], [[1, 2]]), name: [1]}, 0)
    for gradient in (None, [1, 2], "emb"):
        with refused():
            group.apply(gradient, 0)
    assert group.num_accumulated() == 0


@pytest.mark.parametrize("lanes", [1, 3, 32])
def test_a_member_that_was_never_touched_costs_what_the_page_on_sizes_says(lanes: int) -> None:
    """With up to three lanes that is 1 KiB."""
    members, page = 1000, 4096
    with make_group(
        {f"m{i}": TensorSpec((2,)) for i in range(members)}, "sized", lanes=lanes
    ) as acc:
        (summary,) = inspection.list_segments("sized")
        directory = members * 64
        assert summary.bytes_reserved <= 320 * lanes * members + directory + (lanes + 8) * page
        acc.unlink()


class Repeating(Mapping[str, Any]):
    """A mapping whose items repeat a name, as those of a careless multi-dict do."""

    def __init__(self, *pairs: tuple[str, Any]) -> None:
        self.pairs = pairs

    def __getitem__(self, name: str) -> Any:
        return dict(self.pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def items(self) -> Any:
        return list(self.pairs)


def test_a_mapping_whose_items_repeat_a_member_is_refused(group: Any) -> None:
    """Only one of the two would be added."""
    rows = ("emb", GRADIENT["emb"])
    for pairs in ((rows, rows), (("fc", [1, 2, 3]), rows, ("fc", [4, 5, 6]))):
        with pytest.raises(errors.InvalidArgumentError, match=r"'(emb|fc)'.* more than once"):
            group.apply(Repeating(*pairs), 0)
    group.apply(GRADIENT, 0)
    partial = group.take_partial(1)
    repeating: Any = Repeating(*partial.items(), ("fc", partial["fc"]))
    repeating.count = partial.count
    with pytest.raises(errors.InvalidArgumentError, match=r"'fc'.* more than once"):
        group.apply_partial(repeating)
    assert group.num_accumulated() == 0
    assert group.apply(Repeating(*GRADIENT.items()), 0)
    with pytest.raises(errors.InvalidArgumentError, match=r"'fc'.* more than once"):
        AccumulatorGroup(Repeating(*TWO.items(), ("fc", TWO["fc"])))


def test_a_members_round_shape_is_checked_under_the_lock_and_rolled_back() -> None:
    specs = {
        "first": IndexedSlicesSpec((None, 2), "int64", reduction_type="SUM"),
        "free": TensorSpec(None, "float32"),
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
def test_an_overflow_in_one_member_leaves_all_as_they_were(*, last: bool) -> None:
    specs = {
        name: TensorSpec((), "int64", reduction_type="SUM")
        if name == "dense"
        else IndexedSlicesSpec((None, 1), "int64", reduction_type="SUM")
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


def test_cmean_divides_by_all_gradients_of_the_round() -> None:
    specs = {
        "all": TensorSpec((), "float32", reduction_type="CMEAN"),
        "rows": IndexedSlicesSpec((None,), "float32", reduction_type="CMEAN"),
        "own": TensorSpec((), "float32"),
    }
    with make_group(specs) as group:
        assert group.apply({"all": 6, "rows": ([4], [9]), "own": 6}, 0)
        assert group.apply({}, 0, weight=2)
        taken = group.take(2)
        assert (taken["all"].value, taken["own"].value) == (2, 6)
        assert taken["rows"].values.tolist() == [3]


def test_a_result_that_does_not_fit_names_its_member_and_leaves_the_round() -> None:
    specs = {
        "fine": TensorSpec((), "float32"),
        "small": TensorSpec((), "int8", reduction_type="SUM"),
    }
    with make_group(specs) as group:
        for _ in range(2):
            assert group.apply({"fine": 1, "small": 100}, 0)
        with pytest.raises(errors.OutOfRangeError, match="'small'"):
            group.take(2, timeout=0)
        assert (group.num_accumulated(), group.global_step) == (2, 0)
        assert group.take_partial(2)["small"].value == 200


def test_as_many_members_as_there_may_be() -> None:
    specs = {f"layer.{i}.weight": TensorSpec((2,), "float32") for i in range(4096)}
    with make_group(specs, "many") as group:
        assert group.apply({name: [i, 1] for i, name in enumerate(specs)}, 0)
        assert group.apply({"layer.4095.weight": [1, 1]}, 0)
        other: Any
        with AccumulatorGroup.attach("many") as other:
            assert other.members.keys() == specs.keys()
            taken = other.take(2)
        assert len(taken) == 4096
        np.testing.assert_array_equal(taken["layer.77.weight"].value, [77, 1])
        np.testing.assert_array_equal(taken["layer.4095.weight"].value, [2048, 1])
        group.unlink()
    with pytest.raises(errors.InvalidArgumentError, match="1 to 4096 members"):
        make_group(specs | {"one more": TensorSpec()})
    with refused():
        make_group({})


@pytest.mark.parametrize("name", ["a", "x" * 200, "décodeur", "層" * 200, "['enc'][0].w", "a/b c"])
def test_names_of_members(name: str) -> None:
    with make_group({name: TensorSpec((), "float32")}, "named") as group:
        assert group.apply({name: 2}, 0)
        with AccumulatorGroup.attach("named") as other:
            assert list(other.take(1)) == [name]
        group.unlink()


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "a\nb", "\x7f", 3, None, b"bytes"])
def test_names_that_no_member_has(name: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="name"):
        make_group({name: TensorSpec()})


@pytest.mark.parametrize("specs", [None, 4, [("a", TensorSpec())], {"a": "float32"}, {"a": None}])
def test_members_are_a_mapping_to_specs(specs: Any) -> None:
    with refused():
        make_group(specs)


DIFFERENT: Final[dict[str, tuple[dict[str, Any], tuple[str, str, str]]]] = {
    "dtype": (
        TWO | {"fc": TensorSpec((3,), "int8", reduction_type="SUM")},
        ("dtype of member 'fc'", "float32", "int8"),
    ),
    "shape": (
        TWO | {"emb": IndexedSlicesSpec((10, 3), "float32")},
        ("shape of member 'emb'", "[10,2]", "[10,3]"),
    ),
    "kind": (TWO | {"emb": TensorSpec((10, 2))}, ("kind of member 'emb'", "sparse", "dense")),
    "reduction": (
        TWO | {"fc": TensorSpec((3,), reduction_type="MEAN")},
        ("reduction_type of member 'fc'", "SUM", "MEAN"),
    ),
    "one more": (TWO | {"more": TensorSpec()}, ("member 'more'", "none", "dense float32")),
    "one less": ({"fc": TWO["fc"]}, ("member 'emb'", "sparse float32", "none")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_disagreement_names_the_member_and_both_values(what: str) -> None:
    specs, (where, existing, asked) = DIFFERENT[what]
    with make_group(TWO, "agreed") as group:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            make_group(specs, "agreed")
        error = caught.value
        assert (error.what, error.existing, error.asked) == (where, existing, asked)
        assert all(word in str(error) for word in (where, existing, asked))
        group.unlink()


def test_the_order_of_members_is_no_part_of_the_agreement() -> None:
    turned = dict(reversed(TWO.items()))
    with make_group(TWO, "agreed") as group, make_group(turned, "agreed") as other:
        assert group.apply(GRADIENT, 0)
        assert other.apply(dict(reversed(GRADIENT.items())), 0)
        np.testing.assert_array_equal(group.take(2)["fc"].value, [2, 4, 6])
        group.unlink()


def test_a_group_and_a_single_accumulator_disagree() -> None:
    with make_group(TWO, "kinds") as group:
        with pytest.raises(errors.InvalidArgumentError, match="kind group, but dense"):
            shmacc.ConditionalAccumulator("f4", None, "kinds")
        with pytest.raises(errors.InvalidArgumentError, match="AccumulatorGroup"):
            shmacc.ConditionalAccumulator.attach("kinds")
        group.unlink()
    with shmacc.ConditionalAccumulator("f4", None, "kinds") as single:
        with pytest.raises(errors.InvalidArgumentError, match="dense"):
            make_group(TWO, "kinds")
        with pytest.raises(errors.InvalidArgumentError, match=r"of an accumulator \(shmacc.Cond"):
            AccumulatorGroup.attach("kinds")
        single.unlink()


def test_attach_gives_the_group() -> None:
    with make_group(TWO, "attached", reduction_type="CMEAN", lanes=2, capacity=9) as group:
        with shmacc.attach("attached") as found:
            assert isinstance(found, AccumulatorGroup)
            assert (found.lanes, found.capacity, found.reduction_type) == (2, 9, "CMEAN")
            assert found.members["emb"].reduction_type == "CMEAN"
            assert found.members["fc"].reduction_type == "SUM"
            assert found.members["emb"].shape == (10, 2)
            assert isinstance(found.members["emb"], IndexedSlicesSpec)
            assert not isinstance(found.members["fc"], IndexedSlicesSpec)
        group.unlink()


def _apply_and_send_back(group: Any, number: int) -> bool:
    gradient = {"emb": ([number], [[number, 1]]), "fc": [number, 0, 0]}
    return bool(group.apply(gradient, 0, contributor=number))


@every_start_method
def test_a_pickled_group_is_the_same_one(crew: Crew) -> None:
    with make_group(TWO) as group:
        workers = [crew.start(_apply_and_send_back, group, i) for i in (1, 2)]
        assert all(worker.result() for worker in workers)
        taken = group.take(2, timeout=0)
        assert taken.contributors.tolist() == [1, 2]
        np.testing.assert_array_equal(taken["fc"].value, [3, 0, 0])
        np.testing.assert_array_equal(taken["emb"].values, [[1, 1], [2, 1]])


def test_partials_pickle_and_go_into_another_group() -> None:
    with make_group(TWO) as near, make_group(TWO) as far:
        near.apply(GRADIENT, 0, contributor=4, weight=3)
        near.apply({"fc": [1, 1, 1]}, 0)
        partial = near.take_partial(2)
        assert isinstance(partial, GroupPartial)
        far.apply(GRADIENT, 0)
        near.apply(GRADIENT, 0, contributor=4)  # of another round by now
        assert near.num_accumulated() == 1
        again = pickle.loads(pickle.dumps(partial))
        assert far.apply_partial(again)
        taken = far.take(3, timeout=0)
        assert (taken.count, taken.weight, taken["emb"].weight) == (3, 5, 4)
        assert taken["emb"].row_counts.tolist() == [4, 4]
        np.testing.assert_array_equal(taken["fc"].value, [5, 9, 13])


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"count": 5}, "'fc'"), ({"weight": 9}, "'fc'"), ({"count": 0}, "'fc'")],
)
def test_a_partial_whose_members_say_more_than_it_does_is_refused(
    group: Any, changed: dict[str, int], words: str
) -> None:
    fields: dict[str, Any] = {"count": 1, "step": 0} | changed
    of_fc = shmacc.DensePartial(np.ones(3, np.float32), **fields)
    with pytest.raises(errors.InvalidArgumentError, match=words):
        group.apply_partial(GroupPartial({"fc": of_fc}, 2, 0))
    assert group.num_accumulated() == 0


def test_a_take_is_no_partial(group: Any) -> None:
    group.apply(GRADIENT, 0)
    taken = group.take(1)
    with pytest.raises(errors.InvalidArgumentError, match="take_partial"):
        group.apply_partial(taken)


def test_steps_seals_and_stats_are_those_of_a_single_one(group: Any) -> None:
    assert not group.apply(GRADIENT, -1)
    assert group.apply(GRADIENT, NEVER_STALE)
    assert group.take_partial(1, seal=True).count == 1
    assert not group.apply(GRADIENT, 0)
    group.unseal()
    assert group.apply(GRADIENT, 0)
    assert group.advance_step(3) == 1
    assert group.wait_step(2, timeout=0) == 3
    group.set_global_step(1)
    stats = group.stats()
    assert (stats.applied, stats.dropped, stats.discarded, stats.taken) == (2, 2, 1, 1)
    assert (stats.rows, stats.global_step, stats.sealed) == (0, 1, False)
    assert repr(group).startswith("<AccumulatorGroup ")


def test_members_of_the_model_are_of_all_reductions() -> None:
    """Else the first test would say less than it seems to."""
    kinds = {(type(spec).__name__, spec.reduction_type) for spec in MEMBERS.values()}
    assert len(kinds) == len(MEMBERS)
