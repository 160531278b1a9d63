"""Values are accepted as arrays and converted as documented; results are the caller's own."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import refused, same_bits

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlices,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)
from shmacc._accumulators.taken import DensePartial, SparsePartial

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)
TABLE: Final = np.arange(12, dtype=np.float32).reshape(3, 4)


class OnlyArray:
    """An object that NumPy can read by ``__array__`` alone."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array if dtype is None else self.array.astype(dtype)


class OnlyDLPack:
    """An object that NumPy can read by ``__dlpack__`` alone, as other libraries' tensors."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


FORMS: Final[dict[str, Callable[[Any], Any]]] = {
    "array": lambda a: a,
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(map(tuple, a.tolist())) if a.ndim > 1 else tuple(a.tolist()),
    "list of arrays": list,
    "memoryview": lambda a: np.ascontiguousarray(a).data,
    "fortran order": np.asfortranarray,
    "strided": lambda a: np.repeat(np.repeat(a, 2, 0), 3, -1)[::2, ..., ::3] if a.ndim > 1 else np.repeat(a, 2)[::2],  # noqa: E501
    "reversed": lambda a: a[::-1].copy()[::-1],
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "read-only": read_only,
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "wider": lambda a: a.astype("f8" if a.dtype.kind == "f" else "i8"),
    "subclass": lambda a: a.view(np.matrix) if a.ndim == 2 else a,
    "__array__": OnlyArray,
    "__dlpack__": OnlyDLPack,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # np.matrix
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_array_is_accepted(form: str) -> None:
    make = FORMS[form]
    indices = np.array([5, 0, 2], np.int32)
    with ConditionalAccumulator(np.float32) as acc, SparseConditionalAccumulator("f4") as rows:
        assert acc.apply_grad(make(TABLE))
        same_bits(acc.take_grad(1), TABLE)

        rows.apply_grad(make(indices), make(TABLE), make(np.array([9, 4])))
        rows.apply_indexed_slices_grad(IndexedSlices(make(TABLE), make(indices)))
        taken = rows.take_grad(2)
        same_bits(taken.indices, np.array([0, 2, 5]))
        same_bits(taken.values, TABLE[[1, 2, 0]])


@pytest.mark.parametrize("name", ELEMENTS)
def test_each_dtype_is_accepted_and_returned(name: str) -> None:
    element = ELEMENTS[name]
    values = np.arange(1, 13).reshape(3, 4).astype(element.plain).view(element.dtype)
    with ConditionalAccumulator(name) as acc, SparseConditionalAccumulator(name) as rows:
        for _ in range(2):
            acc.apply_grad(values)
            rows.apply_grad([7, 8, 9], values[::-1])
        seen, taken = acc.snapshot(), acc.take(2)
        same_bits(taken.value, values)
        same_bits(rows.take_grad(2).values, values[::-1])
    # NumPy accepts the result of a dense accumulator as an array.
    assert np.asarray(taken) is taken.value
    same_bits(np.asarray(seen), values)
    copied = np.array(taken)
    assert not np.shares_memory(copied, taken.value)
    same_bits(copied, values)


CONVERTED: Final = [
    *(("float32", np.array([1.5, 2.5]), [1.5, 2.5]), ("float32", np.array([1, 2], "i8"), [1, 2])),
    *(("float32", np.array([1, 2], "u1"), [1, 2]), ("float32", np.array([True, False]), [1, 0])),
    ("float32", np.array([0.1], np.float16), [np.float32(np.float16(0.1))]),
    ("float32", np.array([1.5], ml_dtypes.bfloat16), [1.5]),
    ("float32", np.array([np.inf, -np.inf, 1e300 * 1e-300]), [np.inf, -np.inf, 1]),
    *(("float32", [1, 2.5, True], [1, 2.5, 1]), ("float16", np.array([0.1]), [np.float16(0.1)])),
    *(("float16", [1e-30], [0]), ("bfloat16", np.array([1.0, 2.0], np.float32), [1, 2])),
    *(("bfloat16", [1.0, 257.0], [1, 256]), ("float64", np.array([1.5], np.float32), [1.5])),
    *(("complex64", np.array([1.5, 2.0]), [1.5, 2]), ("complex128", [1j, 2], [1j, 2])),
    ("complex64", np.array([1 + 2j], np.complex128), [1 + 2j]),
    *(("int8", np.array([-128, 127], "i8"), [-128, 127]), ("int8", np.array([5], "u1"), [5])),
    *(("int8", [-128, 127], [-128, 127]), ("int32", [1.0, -2.0], [1, -2])),
    *(("uint8", [0, 255], [0, 255]), ("uint8", np.array([0, 255], np.uint64), [0, 255])),
    *(("uint64", [2**64 - 1, 0], [2**64 - 1, 0]), ("int64", np.array([True]), [1])),
]


@pytest.mark.parametrize(("dtype", "given", "expected"), CONVERTED)
def test_other_dtypes_are_converted(dtype: str, given: Any, expected: list[Any]) -> None:
    with ConditionalAccumulator(dtype) as acc, SparseConditionalAccumulator(dtype) as rows:
        assert acc.apply_grad(given)
        got = acc.take_grad(1)
        assert got.dtype == ELEMENTS[dtype].dtype
        assert got.tolist() == expected
        rows.apply_grad(range(len(expected)), given)
        assert rows.take_grad(1).values.tolist() == expected


REFUSED: Final = [
    # no same_kind conversion, though NumPy's own check would accept bfloat16's
    *(("float32", np.array([1j])), ("float32", [1j]), ("bfloat16", np.array([1j], np.complex64))),
    *(("int32", np.array([1.0])), ("int32", np.array([1.0], "f2")), ("qint8", np.array([1.0]))),
    *(("int64", np.array([1j])), ("uint8", np.array([1], "i8")), ("uint64", np.array([1], "i1"))),
    # a finite value that would become infinite
    *(("float32", np.array([1e39])), ("float32", [1e39]), ("float32", [0, -1e300])),
    *(("float32", [10**40]), ("float16", np.array([65520.0], np.float32)), ("float16", [70000])),
    *(("float16", np.array([70000])), ("bfloat16", np.array([3.4e38])), ("float64", [10**400])),
    ("complex64", np.array([1e300j])),
    # integers out of range
    *(("int8", np.array([128], np.int64)), ("int8", np.array([-129], np.int16)), ("int8", [128])),
    *(("int8", np.array([200], np.uint8)), ("int8", np.array([5, -129], np.int16))),
    *(("uint8", [-1]), ("uint8", [5, -1]), ("uint8", [256]), ("int64", [2**63])),
    *(("int64", np.array([2**63], np.uint64)), ("uint64", [2**64]), ("uint64", [-1])),
    ("int32", np.array([2**31], np.int64)),
    # floats that are not integers of this dtype
    *(("int32", [1.5]), ("int32", [1, 2.5]), ("int32", [float("nan")])),
    *(("uint8", [-1.0]), ("int8", [1e30])),
    # no numbers at all
    *(("float32", bad) for bad in (None, "1", ["1"], [None], [[1.0], [1.0, 2.0]], {1.0}, object)),
    *(("float32", [Fraction(1, 3)]), ("float32", np.array(["2020-01-01"], "datetime64[D]"))),
    *(("float32", np.zeros(1, [("x", "f4")])), ("float32", np.zeros(1, [("qint8", "i1")]))),
]


@pytest.mark.parametrize(("dtype", "given"), REFUSED, ids=repr)
def test_values_that_do_not_convert_are_refused(dtype: str, given: Any) -> None:
    with ConditionalAccumulator(dtype) as acc, SparseConditionalAccumulator(dtype) as rows:
        with refused():
            acc.apply_grad(given)
        with refused():
            rows.apply_grad([0], given)
        # Stale gradients are checked, too: timing must not decide whether a mistake is reported.
        acc.set_global_step(1)
        with refused():
            acc.apply_grad(given)
        assert acc.num_accumulated() == rows.num_accumulated() == 0
        assert acc.stats().dropped == 0


NO_INDICES: Final = [
    *([0.0], [1.5], [True], np.array([0.0]), np.array([True]), [2**63], ["0"], [None], None, [1j]),
    *(np.array([2**63], np.uint64), [[0], [0, 1]]),
]


@pytest.mark.parametrize("indices", NO_INDICES, ids=repr)
def test_bad_indices_are_refused(indices: Any) -> None:
    with SparseConditionalAccumulator(np.float32) as acc:
        for stale in (0, 1):
            acc.set_global_step(stale)
            with refused():
                acc.apply_grad(indices, [1.0])
        assert acc.stats().dropped == 0


def test_bad_given_shapes_are_refused() -> None:
    with SparseConditionalAccumulator(np.float32) as acc:
        for given in [1.0], [True, 2], np.array([3.0, 1.0]), ["3"], [2**63, 1], [None, 1]:
            with refused():
                acc.apply_grad([0], [[1.0]], given)


def test_indices_may_be_of_any_integer_type() -> None:
    with SparseConditionalAccumulator(np.float32) as acc:
        for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8"):
            acc.apply_grad(np.array([7, 3, 7], dtype), [1.0, 2.0, 4.0], local_step=NEVER_STALE)
            taken = acc.take_grad(1)
            same_bits(taken.indices, np.array([3, 7]))
            assert taken.values.tolist() == [2.0, 5.0]
        for other in (2, 1), range(1, 3), [np.int64(2), np.uint8(1)]:
            acc.apply_grad(other, [[1.0], [2.0]], local_step=NEVER_STALE)
        assert acc.take_grad(3).indices.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_floats_accumulate_in_float32_and_round_once(dtype: str) -> None:
    half = ELEMENTS[dtype].dtype
    with ConditionalAccumulator(dtype, reduction_type="SUM") as acc:
        # In half precision 2048 + 1 + 1 ... would stay 2048 (256 in bfloat16).
        acc.apply_grad([2048.0])
        for _ in range(64):
            acc.apply_grad([1.0])
        same_bits(acc.take_grad(65), np.array([2112], half))
    with ConditionalAccumulator(dtype) as acc:
        top = np.array([3.3895314e38 if dtype == "bfloat16" else 65504], half)
        for _ in range(2):
            acc.apply_grad(top)
        # Twice float16's top exceeds float16, but fits a float32 sum; twice bfloat16's does not.
        expected = top if dtype == "float16" else np.array([np.inf], half)
        same_bits(acc.take_grad(2), expected)


def test_arguments_are_read_during_the_call_and_not_changed() -> None:
    indices, values = np.array([4, 2, 4]), np.ones((3, 2), np.float32)
    with ConditionalAccumulator("f4") as acc, SparseConditionalAccumulator("f4") as rows:
        acc.apply_grad(values)
        rows.apply_grad(indices, values)
        assert values.tolist() == [[1, 1]] * 3
        assert indices.tolist() == [4, 2, 4]
        values[:] = 99
        indices[:] = 0
        taken = rows.take(1)
        assert taken.indices.tolist() == [2, 4]
        assert taken.values.tolist() == [[1, 1], [2, 2]]
        assert acc.take(1).value.tolist() == [[1, 1]] * 3


def test_results_belong_to_the_caller() -> None:
    with SparseConditionalAccumulator(np.float32) as acc, ConditionalAccumulator("f4") as dense:
        outs: list[tuple[Any, ...]] = []
        for step in range(2):
            acc.apply_grad([1, 2], [[1.0], [2.0]], local_step=step)
            dense.apply_grad([[1.0], [2.0]], local_step=step)
            taken = acc.take(1)
            outs.append((taken.indices, taken.values, taken.shape, taken.row_counts))
            outs[-1] += (dense.take_grad(1),)
            for array in outs[0]:
                assert array.flags.carray  # writable, aligned, in C order
                array[...] = -7
    # The arrays outlive the segments.
    assert outs[1][1].tolist() == outs[1][4].tolist() == [[1.0], [2.0]]
    assert all((array == -7).all() for array in outs[0])


# Larger than any address space, so that no machine can allocate it.
VAST: Final = 2**53


def vast(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Return an array that takes no memory until it is copied."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def test_arrays_larger_than_memory_are_refused_at_once() -> None:
    one = np.ones(1, np.int64)
    with ConditionalAccumulator("f8") as acc, SparseConditionalAccumulator("f8") as rows:
        calls: list[Callable[[], Any]] = [
            lambda: rows.apply_grad(vast("i1", VAST), [[1.0]]),
            lambda: rows.apply_grad([0], [[1.0]], vast("u8", VAST)),
            lambda: acc.apply_partial(DensePartial(vast("f8", VAST), 1, 0)),
            lambda: rows.apply_partial(SparsePartial(one, vast("f8", 1, VAST), one, one, 1, 0)),
        ]
        for dtype in ("f2", "f4", "f8", "i1", "u8", "?"):
            for shape in ((VAST,), (2, VAST // 2), (2**58,)):
                array = vast(dtype, *shape)
                calls += [partial(acc.apply_grad, array), partial(rows.apply_grad, [0], array)]
        for call in calls:
            with pytest.raises(errors.ResourceExhaustedError, match="no memory"):
                call()
        for width in (2**36 + 1, 2**40, 2**59):  # more numbers than a row may have
            with pytest.raises((errors.InvalidArgumentError, errors.ResourceExhaustedError)):
                rows.apply_grad([], np.empty((0, width)))
        assert acc.num_accumulated() == rows.num_accumulated() == 0


def test_gradients_may_have_as_many_dimensions_as_numpy_allows() -> None:
    """With more, NumPy could not make the result's array, and the round would be lost."""
    shape = (1,) * (64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32)
    for dtype in ("float32", "complex64"):
        given = np.ones(shape, dtype)
        with ConditionalAccumulator(dtype, shape) as acc:
            assert acc.apply_grad(given)
            same_bits(acc.take_grad(1), given)
        with SparseConditionalAccumulator(dtype) as rows:
            assert rows.apply_grad([4], given)
            assert rows.take_partial(1).values.shape == shape


GROUP = {"w": TensorSpec((3,)), "rows": IndexedSlicesSpec((5, 2))}


def test_a_groups_members_convert_to_arrays_and_the_group_does_not() -> None:
    with AccumulatorGroup(GROUP) as acc:
        acc.apply({"w": [1, 2, 3]}, 0)
        taken = acc.take(1)
    assert np.asarray(taken["w"]).tolist() == [1, 2, 3]
    assert (2 * np.asarray(taken["w"], np.float64)).dtype == np.float64
    assert np.stack([taken["w"], taken["w"]]).shape == (2, 3)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        with pytest.raises(ValueError, match="copy"):
            np.asarray(taken["w"], np.float64, copy=False)


def test_a_sparse_results_error_says_what_to_use() -> None:
    with SparseConditionalAccumulator("f4", (5, 2)) as acc:
        acc.apply_grad([3], [[1, 2]])
        taken = acc.take_partial(1), acc.snapshot()
    for rows in taken:
        for convert in (np.asarray, np.array, np.sum):
            with pytest.raises(TypeError, match=rf"{type(rows).__name__}.*\.values.*\.indices"):
                convert(rows)


def test_a_result_can_be_applied_and_a_partial_cannot() -> None:
    """A partial applied as a gradient would count as one, however many gradients it contains."""
    with ConditionalAccumulator("f4", (3,)) as near, ConditionalAccumulator("f4", (3,)) as far:
        near.apply_grad([1, 2, 3])
        near.apply_grad([3, 2, 1])
        sums = near.take_partial(2)
        with pytest.raises(errors.InvalidArgumentError, match="apply_partial"):
            far.apply_grad(sums)
        assert far.apply_grad(near.snapshot())
        assert far.apply_partial(sums)
        assert far.take(3).value.tolist() == [float(np.float32(4) / np.float32(3))] * 3
    with AccumulatorGroup(GROUP) as group, SparseConditionalAccumulator("f4", (5, 2)) as acc:
        for wrong in ({"w": sums}, {"w": acc.snapshot()}, {"rows": acc.take_partial(0)}):
            with refused():
                group.apply(wrong, 0)
        assert group.num_accumulated() == 0
