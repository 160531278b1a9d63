"""The fast path for plain arrays, lists and tensors gives the same results as the slow path."""

import contextlib
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import outcome

import shmacc
from shmacc import _core, errors
from shmacc._base import layout


class Other(np.ndarray[Any, Any]):
    """An array that is not NumPy's own, so it takes the slow path."""


DECLARED: Final[tuple[Any, ...]] = (
    *(None, [], [4], [None], [4, 2], [None, 2], [4, None], [4, 2, None], [0, 2]),
)
INDICES: Final[tuple[Any, ...]] = (
    *([], [0], [0, 1, 3], [3, 1, 0], [1, 1, 2], [4], [0, 4, 2], [-1], [2, -1, 0]),
    *([2**63 - 1], [[0, 1]], 2),
)
SHAPES: Final = ((), (1,), (2,), (2, 1), (1, 2), (4, 2), (2, 4), (0, 2), (4, 2, 3))


def as_other(array: Any) -> Any:
    return np.asarray(array).view(Other)


def same(
    acc: Any, apply: Callable[..., bool], *gradient: Any, form: Callable[[Any], Any] = as_other
) -> None:
    others = [form(given) for given in gradient]
    assert outcome(acc, lambda: apply(*gradient)) == outcome(acc, lambda: apply(*others))


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_sparse_gradients_give_what_the_slow_path_gives(declared: Any) -> None:
    with (
        shmacc.SparseConditionalAccumulator("float32", declared) as acc,
        shmacc.AccumulatorGroup({"rows": shmacc.IndexedSlicesSpec(declared, "float32")}) as group,
    ):
        calls: list[tuple[Any, Callable[..., bool]]] = [
            (acc, lambda i, v: acc.apply_grad(i, v, None, shmacc.NEVER_STALE)),
            (acc, lambda i, v: acc.apply_grad(i, v, None, shmacc.NEVER_STALE, weight=3)),
            (group, lambda *rows: group.apply({"rows": rows}, shmacc.NEVER_STALE)),
        ]
        for given in INDICES:
            indices = np.array(given, np.int64)
            count = indices.size
            for shape in (count,), (count, 2), (count, 3), (count, 2, 2), (count + 1, 2), ():
                for to, apply in calls:
                    same(to, apply, indices, np.ones(shape, np.float32))


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_dense_gradients_give_what_the_slow_path_gives(declared: Any) -> None:
    with (
        shmacc.ConditionalAccumulator("float32", declared) as acc,
        shmacc.AccumulatorGroup({"array": shmacc.TensorSpec(declared, "float32")}) as group,
    ):
        for shape in SHAPES:
            value = np.ones(shape, np.float32)
            same(acc, lambda value: acc.apply_grad(value, shmacc.NEVER_STALE), value)
            same(group, lambda value: group.apply({"array": value}, shmacc.NEVER_STALE), value)


def layouts(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the array in C order, and in four layouts that need a copy."""
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    swapped = array.astype(array.dtype.newbyteorder())
    return [array, np.asfortranarray(array), np.repeat(array, 2, 0)[::2], unaligned, swapped]


@pytest.mark.parametrize("dtype", ["float32", "int64", "qint8"])
def test_every_dtype_and_layout_gives_what_the_slow_path_gives(dtype: str) -> None:
    def apply_rows(indices: Any, values: Any) -> bool:
        return sparse.apply_grad(indices, values, None, shmacc.NEVER_STALE)

    rows = np.array([0, 2, 3])
    with (
        shmacc.SparseConditionalAccumulator(dtype, [4, 2]) as sparse,
        shmacc.ConditionalAccumulator(dtype, [3, 2]) as dense,
    ):
        for given in "float32", "float64", "int32", "int64", "complex64", "float16":
            for values in layouts(np.arange(6).reshape(3, 2).astype(given)):
                same(dense, lambda values: dense.apply_grad(values, shmacc.NEVER_STALE), values)
                for indices in *layouts(rows), rows.astype(np.int32), rows.astype(np.float32):
                    same(sparse, apply_rows, indices, values)


# Lists

LongWay: Final = type("list", (list,), {})
"""A subclass of list, which takes the slow path; errors also call it `list`."""

FLOAT32, INT64 = np.dtype("float32").num, np.dtype("int64").num
ENDLESS: Final[list[Any]] = []
ENDLESS.append(ENDLESS)
LISTS: Final[tuple[list[Any], ...]] = (
    *([0.1, -2.5], [[0.1, 1e-50], [3.5, -0.0]], [(0.5, 1.5), [2.5, 3.5]], [1, 2]),
    *([[1, 2], [3, -4]], [float("nan"), float("inf"), -float("inf")]),
    [3.4028234663852886e38, 3.4028235e38],  # the largest float32, and a number that rounds to it
    *([3.5e38], [-1e300, 1.0], [2**53 + 1, 1], [2**63 - 1, -(2**63)], [2**63, 1], [2**64, 1]),
    *([1, 0.5], [0.5, 1], [0.5, 2**70], [0.5, True], [True, False], [0.5, None], [None], ["1"]),
    *([0.5, "1"], [b"1"], [1j, 0.5], [np.float64(0.5), 0.5], [0.5, np.float32(0.1)]),
    *([np.int64(3), 3], [np.ones(2), np.ones(2)], [[0.5, 1.5], np.ones(2)], [[0.5], [0.5, 1.5]]),
    *([[0.5, 1.5], [0.5]], [[0.5], 0.5], [0.5, [0.5]], [], [[], []]),
    *([[[[[[[[0.5]]]]]]]], [[[[[[[[[0.5]]]]]]]]], ENDLESS),
)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "int32"])
def test_lists_give_what_the_slow_path_gives(dtype: str) -> None:
    with (
        shmacc.ConditionalAccumulator(dtype) as dense,
        shmacc.SparseConditionalAccumulator(dtype) as sparse,
        shmacc.AccumulatorGroup({"a": shmacc.TensorSpec(None, dtype)}) as group,
    ):
        calls: list[tuple[Any, Callable[..., bool]]] = [
            (dense, lambda value: dense.apply_grad(value, shmacc.NEVER_STALE)),
            (dense, lambda value: dense.apply_grad(value, shmacc.NEVER_STALE, weight=3)),
            (group, lambda value: group.apply({"a": value}, shmacc.NEVER_STALE)),
            (sparse, lambda value: sparse.apply_grad([3, 1], value, None, shmacc.NEVER_STALE)),
            (sparse, lambda value: sparse.apply_grad(value, value, None, shmacc.NEVER_STALE)),
        ]
        for given in LISTS:
            for acc, apply in calls:
                same(acc, apply, given, form=LongWay)


def test_lists_of_numbers_take_the_fast_path() -> None:
    rows = _core.plain_array([[0.1, 0.2], (0.3, 0.4)], FLOAT32)
    assert rows is not None
    assert rows.dtype == np.float32
    assert rows.tolist() == np.array([[0.1, 0.2], [0.3, 0.4]], np.float32).tolist()
    indices = _core.plain_array((3, -1), INT64)
    assert indices is not None
    assert indices.tolist() == [3, -1]


# Tensors of a fake torch, which count how often they are read


class Tensor:
    """A stand-in, which the fixture `torch` installs as `torch.Tensor`."""

    __module__ = "other"  # the library must not look at this name

    def __init__(self, array: Any, *, requires_grad: bool = False) -> None:
        self._array = array
        self.dtype = TORCH[array.dtype.name]
        self.requires_grad = requires_grad
        self.asked = 0

    def numpy(self) -> Any:
        self.asked += 1
        return self._array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Give the slow path the array."""
        return self._array


TORCH: Final = {name: object() for name in ("float32", "float64", "int32", "int64")}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Install a module named torch, with the class above and its dtypes."""
    module = types.ModuleType("torch")
    vars(module).update(TORCH, Tensor=Tensor)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@contextlib.contextmanager
def applies() -> Iterator[tuple[list[Any], list[Callable[[Any], bool]]]]:
    """Yield accumulators, and calls that apply two rows of two numbers to them."""
    specs = {
        "a": shmacc.TensorSpec(None, "float32"),
        "b": shmacc.IndexedSlicesSpec(None, "float32"),
    }
    with (
        shmacc.ConditionalAccumulator("float32") as dense,
        shmacc.SparseConditionalAccumulator("float32") as sparse,
        shmacc.AccumulatorGroup(specs) as group,
    ):
        calls: list[Callable[[Any], bool]] = [
            lambda value: dense.apply_grad(value, shmacc.NEVER_STALE),
            lambda value: sparse.apply_grad([1, 5], value, None, shmacc.NEVER_STALE),
            lambda value: group.apply({"a": value}, shmacc.NEVER_STALE),
            lambda value: group.apply({"b": ([1, 5], value)}, shmacc.NEVER_STALE),
        ]
        yield [dense, sparse, group], calls


@pytest.mark.usefixtures("torch")
def test_a_tensor_is_read_in_place_and_released() -> None:
    array = np.ones((2, 2), np.float32)
    tensor = Tensor(array)
    with applies() as (_, calls):
        for number, apply in enumerate(calls, start=1):
            before = sys.getrefcount(array), sys.getrefcount(tensor)
            assert apply(tensor)
            assert (sys.getrefcount(array), sys.getrefcount(tensor)) == before
            assert tensor.asked == number
    assert _core.plain_array(tensor, FLOAT32) is array


@pytest.mark.usefixtures("torch")
def test_only_plain_tensors_take_the_fast_path() -> None:
    ones = np.ones((2, 2), np.float32)
    tensors = [
        Tensor(ones, requires_grad=True),  # torch gives an array only if it records no gradient
        Tensor(ones.astype(np.float64)),
        type("Subclass", (Tensor,), {})(ones),
    ]
    bad: list[Any] = [Tensor(ones) for _ in range(2)]  # their numpy() returns no array
    bad[0].numpy, bad[1].numpy = lambda: None, lambda: bad[1]
    with applies() as (_, calls):
        for apply in calls:
            for tensor in (*tensors, *bad):
                assert apply(tensor)  # by the slow path
    assert not any(tensor.asked for tensor in tensors)
    for array in ones[::-1].T, ones.view(np.matrix):
        assert _core.plain_array(Tensor(array), FLOAT32) is None


def test_a_lazy_torch_is_not_loaded_for_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "torch", Lazy("torch"))
    with applies() as (_, calls):
        for apply in calls:
            for value in [[1, 2], [3, 4]], np.ones((2, 2)), Other((2, 2), np.float32):
                assert apply(value)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("raised", [ValueError(), KeyboardInterrupt()], ids=repr)
def test_a_handlers_exception_while_a_tensor_is_read_passes_through(raised: BaseException) -> None:
    def handle(*_: object) -> None:
        raise raised

    def numpy() -> Any:
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(3):  # handlers run between these steps
            pass
        return tensor._array

    tensor: Any = Tensor(np.ones((2, 2), np.float32))
    tensor.numpy = numpy
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with applies() as (accumulators, calls):
            for apply in calls:
                with pytest.raises(type(raised)) as caught:
                    apply(tensor)
                assert caught.value is raised
            assert not any(acc.num_accumulated() for acc in accumulators)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("torch")
def test_a_tensor_whose_array_raises_takes_the_slow_path() -> None:
    def numpy() -> Any:
        raise RuntimeError("none here")

    tensor: Any = Tensor(np.ones((2, 2), np.float32))
    tensor.numpy = numpy
    with applies() as (_, calls):
        assert all(apply(tensor) for apply in calls)


# Other objects


def test_a_scalar_gives_what_the_slow_path_gives() -> None:
    with shmacc.ConditionalAccumulator("float64") as acc:
        for scalar in np.float64(1.5), np.float32(1.5), np.int64(3), np.complex128(1j), np.str_(1):
            same(acc, lambda value: acc.apply_grad(value, shmacc.NEVER_STALE), scalar)


def test_int32_row_numbers_in_range_take_the_fast_path() -> None:
    values = np.ones((3, 2), np.float32)
    rows = np.array([4, 0, 4], np.int32)
    of = 0, layout.SUMS["float32"], layout.REDUCTIONS["MEAN"]
    assert _core.plain_rows(*of, rows, values, FLOAT32, (5, 2)) is not None
    assert _core.plain_rows(*of, rows, values, FLOAT32, (4, 2)) is None
    assert _core.plain_rows(*of, rows.astype(np.uint32), values, FLOAT32, (5, 2)) is None
    with shmacc.AccumulatorGroup({"emb": shmacc.IndexedSlicesSpec((5, 2))}) as group:
        group.apply({"emb": (rows, values)}, shmacc.NEVER_STALE)
        assert group.take(1)["emb"].indices.tolist() == [0, 4]


def test_a_gradient_of_another_kind_or_member_is_refused() -> None:
    of = layout.SUMS["float32"], layout.REDUCTIONS["MEAN"]
    rows, values = np.array([1, 2]), np.ones((2, 2), np.float32)
    of_rows = _core.sparse_gradient(0, *of, rows, values, None, ascending=True, count=1, weight=1)
    of_array = _core.dense_gradient(0, *of, values, 1, 1)
    of_pairs = _core.dense_gradient(0, *of, values.view(np.complex64), 1, 1)
    elsewhere = _core.dense_gradient(1, *of, values, 1, 1)
    with shmacc.SparseConditionalAccumulator("float32", (5, 2)) as acc:
        for wrong in of_array, elsewhere:
            with pytest.raises(errors.InvalidArgumentError, match="no member"):
                acc._handle.apply_group([wrong], shmacc.NEVER_STALE, None)
    for dtype, right, wrong in (
        ("float32", of_array, of_pairs),
        ("complex64", of_pairs, of_array),
        ("float32", of_array, of_rows),
    ):
        with shmacc.ConditionalAccumulator(dtype) as dense:
            with pytest.raises(errors.InvalidArgumentError, match="no member"):
                dense._handle.apply_group([wrong], shmacc.NEVER_STALE, None)
            assert dense._handle.apply_group([right], shmacc.NEVER_STALE, None)
    with pytest.raises(errors.InvalidArgumentError, match="Sizes"):
        _core.sparse_gradient(0, *of, rows, values[:1], None, ascending=True, count=1, weight=1)
