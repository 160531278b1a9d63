"""Tensors of torch and JAX that the extension reads directly give what their NumPy arrays give."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.support import outcome

from shmacc import (
    NEVER_STALE,
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    _core,
    errors,
)
from shmacc._base import layout

FLOAT32: Final = np.dtype("float32").num
ROWS: Final = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
COMPLEX: Final = torch.complex(ROWS, -ROWS)


@contextlib.contextmanager
def long_way() -> Iterator[None]:
    """Make the extension take its slow path: it then knows no tensor as torch's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Tensor", object)
        yield


TENSORS: Final[dict[str, Callable[[], torch.Tensor]]] = {
    "plain": ROWS.clone,
    "slice": lambda: torch.cat([ROWS, ROWS])[1:3],
    "view": lambda: torch.arange(4.0).view(2, 2),
    "transposed": ROWS.t,
    "strided": lambda: torch.ones(4, 4)[::2, ::2],
    "broadcast": lambda: torch.ones(1).expand(2, 2),
    "unaligned": lambda: torch.frombuffer(
        bytearray(17), dtype=torch.float32, count=4, offset=1
    ).view(2, 2),
    "of no dimension": lambda: torch.tensor(3.0),
    "of one": lambda: torch.ones(2),
    "empty": lambda: torch.ones(0, 2),
    "requires grad": lambda: ROWS.clone().requires_grad_(),
    "computed": lambda: ROWS.clone().requires_grad_() * 2,
    "conjugate": COMPLEX.conj,
    "conjugate's part": lambda: COMPLEX.conj().imag,
    "part": lambda: COMPLEX.real,
    "zeros that are none": lambda: torch._efficientzerotensor((2, 2)),
    "sparse": ROWS.to_sparse,
    "without numbers": lambda: ROWS.to("meta"),
    "inference": torch.inference_mode()(ROWS.clone),
    "buffer": lambda: torch.nn.Buffer(ROWS.clone()),
    **{
        str(dtype).removeprefix("torch."): partial(ROWS.to, dtype)
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float64,
            torch.int32,
            torch.int64,
            torch.uint8,
            torch.uint64,
            torch.bool,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
        )
    },
}
WHILES: Final[dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "always": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "a mode": lambda: torch.device("cpu"),  # each call of torch then calls Python
}


@pytest.mark.parametrize(("dtype", "during"), [
    ("float32", "always"), ("float32", "a mode"), ("int64", "no_grad"), ("complex64", "inference"),
    ("bfloat16", "always"),
])  # fmt: skip
def test_a_tensor_gives_what_the_slow_path_gives(dtype: str, during: str) -> None:
    with (
        ConditionalAccumulator(dtype) as dense,
        SparseConditionalAccumulator(dtype) as sparse,
        AccumulatorGroup(
            {"a": TensorSpec(None, dtype), "b": IndexedSlicesSpec(None, dtype)}
        ) as group,
        WHILES[during](),
    ):
        for name, make in TENSORS.items():
            tensor = make()
            assert type(tensor) is torch.Tensor
            for acc, apply in (
                (dense, lambda value: dense.apply_grad(value, NEVER_STALE)),
                (sparse, lambda value: sparse.apply_grad([1, 5], value, None, NEVER_STALE)),
                (
                    sparse,
                    lambda value: sparse.apply_grad(value, np.ones((2, 2)), None, NEVER_STALE),
                ),
                (group, lambda value: group.apply({"a": value}, NEVER_STALE)),
                (group, lambda value: group.apply({"b": ([1, 5], value)}, NEVER_STALE)),
            ):
                at_once = outcome(acc, partial(apply, tensor))
                with long_way():
                    assert outcome(acc, partial(apply, tensor)) == at_once, name


def test_tensors_are_read_in_place() -> None:
    given = ROWS.clone()
    array = _core.plain_array(given, FLOAT32)
    assert array is not None
    assert array.ctypes.data == given.data_ptr()
    address = given.data_ptr()
    del given
    keeper: Any = array.base
    assert keeper.data_ptr() == address  # the base keeps the tensor
    with torch.no_grad():
        assert _core.plain_array(ROWS.clone().requires_grad_(), FLOAT32) is None


def test_a_tensor_is_released_after_it_was_applied() -> None:
    given = ROWS.clone()
    before = sys.getrefcount(given)
    with SparseConditionalAccumulator("float32") as acc:
        for _ in range(3):
            acc.apply_grad(torch.tensor([1, 2]), given, None, NEVER_STALE)
    assert sys.getrefcount(given) == before


def test_jax_arrays_give_what_their_numpy_arrays_give() -> None:
    with SparseConditionalAccumulator("float32") as acc, ConditionalAccumulator("float32") as dense:
        for values in (
            jnp.ones((2, 2)), jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2), jnp.int32),
            jnp.ones((2, 2), jnp.complex64), jnp.ones((2, 2)).T, jnp.float32(1.0),
        ):  # fmt: skip
            array = np.asarray(values)
            apply = partial(dense.apply_grad, local_step=NEVER_STALE)
            assert outcome(dense, partial(apply, values)) == outcome(dense, partial(apply, array))
            for indices in jnp.array([5, 1]), jnp.array([-1, 1]), jnp.array([0.5, 1]):
                apply = partial(acc.apply_grad, local_step=NEVER_STALE)
                assert outcome(acc, partial(apply, indices, values)) == outcome(
                    acc, partial(apply, np.asarray(indices), array)
                )


def test_jax_arrays_are_read_in_place() -> None:
    given = jnp.ones((2, 2))
    of = 0, layout.SUMS["float32"], layout.REDUCTIONS["MEAN"]
    assert _core.plain_rows(*of, jnp.array([5, 1]), given, FLOAT32, None) is not None
    values = _core.plain_array(given, FLOAT32)
    assert values is not None
    assert np.shares_memory(values, np.asarray(given))


def test_a_deleted_jax_array_is_refused_as_deleted() -> None:
    given = jax.device_put(np.ones((2, 2), np.float32))
    given.delete()
    with (
        ConditionalAccumulator("float32") as acc,
        pytest.raises(errors.InvalidArgumentError, match=r"grad cannot be viewed.*deleted"),
    ):
        acc.apply_grad(given)
