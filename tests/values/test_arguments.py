"""Constructors, applies and takes refuse bad arguments with the right message, changing nothing."""

import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import nothing_changes, refused

import shmacc
from shmacc import ConditionalAccumulator, IndexedSlices, SparseConditionalAccumulator, errors
from shmacc._values import dtypes

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


# --- arguments of every constructor --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_spelling_of_a_dtype_is_accepted(kind: Any) -> None:
    given: dict[Any, Any] = {"<f4": np.float32, ">f8": np.float64}
    for name, element in ELEMENTS.items():
        given |= {name: element.dtype, element.dtype: element.dtype}
        if not element.quantised:
            given[element.dtype.type] = element.dtype
    for spelling, dtype in given.items():
        with kind(spelling) as acc:
            assert isinstance(acc.dtype, np.dtype)
            assert acc.dtype == dtype
            assert acc.dtype.isnative


def test_two_threads_may_look_up_dtypes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}

    class Other:
        @property
        def numpy(self) -> None:
            known["another"] = None

    known |= {"other": Other(), "qint8": dtypes.resolve("qint8")}
    monkeypatch.setattr(dtypes, "_KNOWN", known)
    assert dtypes.resolve([("qint8", np.int8)]) is known["qint8"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_shape_is_accepted(kind: Any) -> None:
    for given, normal in (
        (None, None), ((), ()), ([], ()), (7, (7,)), ([3, None], (3, None)), ((0, 2), (0, 2)),
        (np.array([3, 2]), (3, 2)), ([np.int32(3), np.uint8(2)], (3, 2)), ([None], (None,)),
    ):  # fmt: skip
        with kind(np.float32, given) as acc:
            assert acc.shape == normal
            assert all(d is None or type(d) is int for d in acc.shape or ())


@pytest.mark.parametrize("rows", [2**31, 2**40, 2**63 - 1])
def test_the_largest_row_number_is_accepted(rows: int) -> None:
    with SparseConditionalAccumulator("f4", (rows, 2)) as acc:
        acc.apply_grad([rows - 1], [[1.0, 2.0]])
        assert acc.take_grad(1).shape.tolist() == [rows, 2]
        assert acc.take_partial(0).shape.tolist() == [rows, 2]


def test_every_reduction_is_accepted() -> None:
    for kind in KINDS:
        for word in ("MEAN", "SUM", "CMEAN", b"SUM", None):
            given: Any = word
            with kind(np.float32, reduction_type=given) as acc:
                assert acc.reduction_type == {b"SUM": "SUM", None: "MEAN"}.get(given, given)


# --- sparse applies -------------------------------------------------------------------------------

# Checks of the caller's arguments come first, so stale gradients are checked, too.
CALLERS: Final[list[tuple[Any, ...]]] = [
    (None, [[0, 1], [1, 0]], ones(2, 2), None,
        "Input indices should be vector but received shape: [2,2]"),
    (None, 0, ones(1), None, "Input indices should be vector but received shape: []"),
    (None, [0], np.float32(1), None, "Values cannot be 0-dimensional."),
    (None, [0, 1], ones(1, 3), None, "Expected 2 non-empty input values, got 1"),
    (None, [], ones(1, 3), None, "Expected 0 non-empty input values, got 1"),
    (None, [0], ones(0, 3), None, "Expected 1 non-empty input values, got 0"),
    ([2, 2, None], [0], ones(1, 2), [2, 2],
        "Shape mismatch: expected shape rank at least 3, got 2"),
    ([2, 2], [0], ones(1, 3), [2, 3], "Shape mismatch: expected shape dim 1 to be 2, got 3"),
    ([3, 2], [0], ones(1, 2), [4, 2], "Shape mismatch: expected shape dim 0 to be 3, got 4"),
    ([3, 2], [0], ones(1, 2), [-7, 2], "Shape mismatch: expected shape dim 0 to be 3, got -7"),
    ([3, 2], [0], ones(1, 2), [[3], [5]], "Shape mismatch: expected shape dim 1 to be 2, got 5"),
    ([2, 2], [3], ones(1, 2), None,
        "Shape mismatch: index of slice 0 exceeded limits of shape; index is 3 exceeded 2"),
    ([2, 2], [1, 0, 2, 9], ones(4, 2), None,
        "Shape mismatch: index of slice 2 exceeded limits of shape; index is 2 exceeded 2"),
]  # fmt: skip

# If a gradient fails several of these checks, the first one reports.
IN_ORDER: Final[list[tuple[Any, ...]]] = [
    (None, [[0]], np.float32(1), None, "Input indices should be vector but received shape: [1,1]"),
    (None, [0, 1], np.float32(1), None, "Values cannot be 0-dimensional."),
    ([2, 2], [0, 5], ones(1, 3), [2], "Expected 2 non-empty input values, got 1"),
    ([2, 2], [5], ones(1, 3), [3], "Shape mismatch: expected shape rank at least 2, got 1"),
    ([2, 2], [5], ones(1, 3), [3, 2], "Shape mismatch: expected shape dim 0 to be 2, got 3"),
    ([2, 2], [-1, 5], ones(2, 3),
     None, "Shape mismatch: index of slice 1 exceeded limits of shape; index is 5 exceeded 2"),
    ([2, 2], [-1], ones(1, 2), [2, 3], "Shape mismatch: expected shape dim 1 to be 2, got 3"),
]  # fmt: skip


# TensorFlow accepts these gradients, so the messages are this library's.
NEW: Final[list[tuple[Any, ...]]] = [
    (None, [0, -1], ones(2, 2), None, None),
    (None, [-(2**63)], ones(1, 2), None, None),
    ([4, 2], [-1], ones(1, 2), None, None),
    # The given shape contradicts the gradient.
    (None, [0], ones(1, 2), [5, 3], None),
    (None, [5], ones(1, 2), [5, 2], None),
    (None, [0, 50], ones(2, 1), [3, 1], None),
    ([None, None], [2], ones(1, 2), [2, 2], None),
    ([None, None], [0], ones(1, 2), [2, 4], None),
]


@pytest.mark.parametrize(
    ("declared", "indices", "values", "given", "message"), CALLERS + IN_ORDER + NEW
)
def test_bad_sparse_gradients_are_refused(
    declared: Any, indices: Any, values: Any, given: Any, message: str | None
) -> None:
    with SparseConditionalAccumulator(np.float32, declared) as acc:
        for step in (0, 7):  # the gradient is fresh, then stale
            acc.set_global_step(step)
            with nothing_changes(acc), refused(message):
                acc.apply_grad(indices, values, given)
            with nothing_changes(acc), refused(message):
                acc.apply_indexed_slices_grad(IndexedSlices(values, indices, given))


# Checks against the round's shape come later: a stale gradient is dropped before them.
ROUNDS: Final[list[tuple[Any, ...]]] = [
    # An earlier gradient has settled rank and dims.
    (None, ones(1, 2, 2, 2), ones(1, 2, 2), "Shape mismatch: expected values rank 4, got 3"),
    (None, ones(1, 2, 2, 2), ones(1, 2, 2, 3),
     "Shape mismatch: expected values dim 3 to be 2, got 3"),
    (None, ones(1), ones(1, 1), "Shape mismatch: expected values rank 1, got 2"),
    ([2, None], ones(1, 4), ones(1, 5), "Shape mismatch: expected values dim 1 to be 4, got 5"),
    # The declared shape has settled rank and dims.
    ([2, 2, None], None, ones(1, 2), "Shape mismatch: expected values rank at least 3, got 2"),
    ([2, 2, None], None, ones(1, 3, 2), "Shape mismatch: expected values dim 1 to be 2, got 3"),
    ([None, None, 3], None, ones(1, 9, 4), "Shape mismatch: expected values dim 2 to be 3, got 4"),
    ([2, 2], None, ones(1, 2, 2), "Shape mismatch: expected values rank 2, got 3"),
    # Both have settled rank and dims: the declared ones are reported.
    ([2, 2, None], ones(1, 2, 2, 2), ones(1, 2),
     "Shape mismatch: expected values rank at least 3, got 2"),
    ([2, 2, None], ones(1, 2, 5), ones(1, 3, 4),
     "Shape mismatch: expected values dim 1 to be 2, got 3"),
]  # fmt: skip


def test_tensorflows_checks_come_before_new_ones() -> None:
    """Each gradient has two faults; TensorFlow checks the values' width only."""
    with SparseConditionalAccumulator(np.float32, [2, None, 2]) as acc:
        for row, given in (-1, None), (0, [2, 2, 2]), (1, [-1, 2, 2]):
            with refused("Shape mismatch: expected values dim 2 to be 2, got 3"):
                acc.apply_grad([row], ones(1, 5, 3), given)


@pytest.mark.parametrize(("declared", "first", "values", "message"), ROUNDS)
def test_sparse_gradients_unlike_the_rounds_first_are_refused(
    declared: Any, first: Any, values: Any, message: str
) -> None:
    with SparseConditionalAccumulator(np.float32, declared) as acc:
        if first is not None:
            acc.apply_grad([1], first)
        with nothing_changes(acc), refused(message):
            acc.apply_grad([0], values)
        acc.set_global_step(1)
        if first is not None:
            assert acc.apply_grad([0], values) is False
            assert acc.stats().dropped == 1


@pytest.mark.parametrize(
    ("declared", "indices", "values", "given"),
    [
        *((None, [50], ones(1, 2), None), (None, [2**63 - 1], ones(1, 2), None)),
        # [] means that no shape is given, also with a declared shape.
        *(([2, 2], [0], ones(1, 2), []), ([2, 2], [0], ones(1, 2), np.empty(0, np.int64))),
        # -1 means an unknown dimension, everywhere.
        *(([2, 2], [0], ones(1, 2), [-1, 2]), ([2, 2], [0], ones(1, 2), [2, -1])),
        (None, [9], ones(1, 2), [-1, -1]),
        # As in TensorFlow, a given shape may be longer than the values', nested, or a scalar.
        *(([2], [0], ones(1), [2, 2]), ([2], [0], ones(1), [2, 2, 2])),
        *((None, [0], ones(1), [2, 2, 2]), ([2, 2], [0], ones(1, 2), [[2], [2]])),
        *(([2, 2], [0], ones(1, 2), [[2, 2]]), ([2], [0], ones(1), 2)),
        # Values may have more dims than declared if a declared dim is open, or if none is declared.
        *(([5, None], [0, 4], ones(2, 2, 2), None), ((), [0], ones(1, 2, 2), None)),
        # Empty gradients, rows of width zero.
        *(([5, 3], [], ones(0, 3), None), (None, [0, 3], ones(2, 0), None)),
    ],
)
def test_good_rows_are_accepted(declared: Any, indices: Any, values: Any, given: Any) -> None:
    with SparseConditionalAccumulator(np.float32, declared) as acc:
        assert acc.apply_grad(indices, values, given) is True
        taken = acc.take_grad(1)
        assert taken.indices.tolist() == list(indices)
        assert taken.values.tolist() == values.tolist()


# --- dense applies --------------------------------------------------------------------------------


@pytest.mark.parametrize(("declared", "shape", "message"), [
    ((None, 2), (4, 3), "Shape mismatch: expected [?,2], got [4,3]"),
    ((2,), (3,), "Shape mismatch: expected [2], got [3]"),
    ((2,), (1, 2), "Shape mismatch: expected [2], got [1,2]"),
    ((2,), (), "Shape mismatch: expected [2], got []"),
    ((), (1,), "Shape mismatch: expected [], got [1]"),
    ((None, None), (3,), "Shape mismatch: expected [?,?], got [3]"),
])  # fmt: skip
def test_dense_gradients_must_have_the_declared_shape(
    declared: Any, shape: tuple[int, ...], message: str
) -> None:
    with ConditionalAccumulator(np.float32, declared) as acc:
        for step in (0, 1):  # the gradient is fresh, then stale
            acc.set_global_step(step)
            with nothing_changes(acc), refused(message):
                acc.apply_grad(ones(*shape))


def test_dense_gradients_must_have_the_rounds_shape() -> None:
    with ConditionalAccumulator(np.float32, [None, 2]) as acc:
        acc.apply_grad(ones(4, 2))
        with nothing_changes(acc), refused("Shape mismatch: expected [4,2], got [5,2]"):
            acc.apply_grad(ones(5, 2))
        # No broadcasting either.
        with nothing_changes(acc), refused("Shape mismatch: expected [4,2], got [1,2]"):
            acc.apply_grad(ones(1, 2))
        # The gradient violates both shapes: the declared one is reported.
        with nothing_changes(acc), refused("Shape mismatch: expected [?,2], got [4,3]"):
            acc.apply_grad(ones(4, 3))
        acc.take_grad(1)
        # A stale gradient is dropped before its shape is checked; the next round sets a new shape.
        assert acc.apply_grad(ones(5, 2)) is False
        assert acc.apply_grad(ones(5, 2), local_step=1) is True
        assert acc.take_grad(1).shape == (5, 2)


# --- takes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["take", "take_grad", "take_indexed_slices_grad"])
def test_bad_numbers_of_required_gradients_are_refused(method: str) -> None:
    with SparseConditionalAccumulator(np.float32) as acc:
        acc.apply_grad([0], ones(1))
        take = getattr(acc, method)
        for number in (0, -1, -(2**63)):
            with nothing_changes(acc), refused() as caught:
                take(number)
            said = f"Argument num_required must be positive, but was {number}"
            assert str(caught.value) == said
            with refused():
                acc.round(number)
        for number in (2**31, 2**63 - 1):
            with nothing_changes(acc), pytest.raises(errors.DeadlineExceededError):
                take(number, timeout=0)


def test_messages_show_values_without_numpys_type_names() -> None:
    """No message of any call shows `np.float64(1.5)` or `<U1`."""
    number: Any = np.float64(1.5)
    whole: Any = np.int64(-1)
    text: Any = np.str_("x y")
    dense: Any = ConditionalAccumulator("f4", (2,))
    table: Any = SparseConditionalAccumulator("f4", (3, 2))
    with dense, table:
        calls: list[Callable[[], Any]] = [
            lambda: dense.apply_grad([1, 2], number),
            lambda: dense.apply_grad([1, 2], np.bool_(True)),  # noqa: FBT003
            lambda: dense.apply_grad([1, 2], np.array(1.5)),
            lambda: dense.apply_grad(["a", "b"]),
            lambda: dense.apply_grad(np.array(["a", "b"])),
            lambda: dense.apply_grad(np.array([1e300, 0])),
            lambda: dense.apply_grad(np.array([np.longdouble(1e300), 0])),
            lambda: dense.apply_grad(np.array([1e300j, 0])),
            lambda: dense.apply_grad([1, 2], weight=number),
            lambda: dense.apply_grad([1, 2], contributor=number),
            lambda: dense.take(number),
            lambda: dense.take(1, timeout=-number),
            lambda: dense.take(1, timeout=text),
            lambda: dense.take(1, on_death=text),
            lambda: dense.set_global_step(number),
            lambda: dense.advance_step(np.datetime64("2026-01-01")),
            lambda: table.apply_grad(["a"], [[1, 2]]),
            lambda: table.apply_grad([0], [["a", "b"]]),
            lambda: table.apply_grad([0], [[1, 2]], ["a"]),
            lambda: ConditionalAccumulator(text),
            lambda: ConditionalAccumulator("f4", (number,)),
            lambda: ConditionalAccumulator("f4", number),
            lambda: ConditionalAccumulator("f4", [whole, whole, text]),
            lambda: ConditionalAccumulator("f4", (), np.str_("a\0b")),
            lambda: ConditionalAccumulator("f4", (), None, None, text),
            lambda: ConditionalAccumulator("f4", (), capacity=number),
            lambda: ConditionalAccumulator("f4", (), owners=text),
            lambda: ConditionalAccumulator("f4", (), if_exists=text),
            lambda: shmacc.attach("nothing", timeout=-number),
            lambda: shmacc.optim.SGD(-number),
            lambda: shmacc.optim.SGD(text),
            lambda: shmacc.optim.Ftrl(0.1, learning_rate_power=number),
            lambda: shmacc.init.Normal(0.0, 0.1, seed=number),
            lambda: shmacc.Parameters({"w": (number, 2)}),
            lambda: shmacc.raw_ops.AccumulatorNumAccumulated(number),
        ]
        for call in calls:
            with pytest.raises((errors.InvalidArgumentError, TypeError)) as caught:
                call()
            said = str(caught.value)
            assert not re.search(r"np\.(float|int|bool|str|long|date)|<U|numpy\.", said), said
