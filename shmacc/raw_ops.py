"""TensorFlow's thirteen raw ops, eager: argument names as in ``tf.raw_ops``.

They call the methods of the accumulators: shapes, dtypes, results and errors are the same. Their
arguments:

* ``dtype``, ``shape``, ``shared_name`` (empty: none), ``reduction_type`` and ``name`` of an
  accumulator op are as for `shmacc.ConditionalAccumulator`. Other ops ignore ``name``.
* ``handle`` is the result of an accumulator op, an ``accumulator_ref``, an accumulator, or a
  shared_name.
* ``local_step``, ``num_required`` and ``new_global_step`` are integers.
* ``dtype`` of a take must be the accumulator's own (else InvalidArgumentError).

The ``Resource`` ops do the same for dense accumulators. Only TensorFlow has other handles for them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from shmacc import _attach, sparse
from shmacc._accumulators import dense
from shmacc._accumulators.accumulator import Accumulator, AccumulatorRef
from shmacc._accumulators.taken import SparseGradient
from shmacc._base.array_types import ValueArray
from shmacc._base.shown import shown
from shmacc._values import dtypes
from shmacc.errors import InvalidArgumentError

__all__ = [
    "AccumulatorApplyGradient", "AccumulatorNumAccumulated", "AccumulatorSetGlobalStep",
    "AccumulatorTakeGradient", "ConditionalAccumulator", "ResourceAccumulatorApplyGradient",
    "ResourceAccumulatorNumAccumulated", "ResourceAccumulatorSetGlobalStep",
    "ResourceAccumulatorTakeGradient", "ResourceConditionalAccumulator",
    "SparseAccumulatorApplyGradient", "SparseAccumulatorTakeGradient",
    "SparseConditionalAccumulator",
]  # fmt: skip

# ruff: noqa: N802  the names are TensorFlow's


@contextlib.contextmanager
def _accumulator(handle: Any, kind: type[Any] = Accumulator) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if isinstance(handle, str):
            # ``with accumulator`` would record this process as failed if there is an error.
            handle = stack.enter_context(contextlib.closing(_attach.attach(handle)))
        yield _resolved(handle, kind)


def _resolved(handle: Any, kind: type[Any]) -> Any:
    if isinstance(handle, AccumulatorRef):
        handle = handle.accumulator
    if not isinstance(handle, kind):
        raise InvalidArgumentError(
            f"handle must lead to a {kind.__name__}, but was {shown(handle)}"
        )
    return handle


def _take_grad(handle: Any, kind: type[Any], num_required: Any, dtype: Any) -> Any:
    if isinstance(handle, str):
        with contextlib.closing(_attach.attach(handle)) as accumulator:
            return _take_grad(accumulator, kind, num_required, dtype)
    # No ``with`` block around the take: a signal handler could raise at the end of the block, and
    # the result would be lost.
    accumulator = _resolved(handle, kind)
    asked = dtypes.resolve(dtype).numpy
    if asked != accumulator.dtype:
        raise InvalidArgumentError(
            f"dtype is {asked}, but the accumulator's is {accumulator.dtype}"
        )
    return accumulator.take_grad(num_required)


def SparseConditionalAccumulator(
    dtype: Any,
    shape: Any,
    container: str = "",  # noqa: ARG001  of TensorFlow's resource manager
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
) -> AccumulatorRef:
    """Return a handle on a sparse accumulator; `container` is ignored."""
    return sparse.SparseConditionalAccumulator(
        dtype, shape, shared_name, name, reduction_type
    ).accumulator_ref


def SparseAccumulatorApplyGradient(
    handle: Any,
    local_step: Any,
    gradient_indices: Any,
    gradient_values: Any,
    gradient_shape: Any,
    has_known_shape: bool,
    name: str | None = None,
) -> bool:
    """Add a sparse gradient; return False if it was dropped as stale.

    Args:
        handle: A handle on a sparse accumulator.
        local_step: The step that the gradient was computed at.
        gradient_indices: Integers, shape ``(n,)``: which rows.
        gradient_values: Shape ``(n, ...)``: the rows.
        gradient_shape: The whole tensor's shape; -1: unknown.
        has_known_shape: Whether ``gradient_shape`` is used.
        name: Ignored.
    """
    with _accumulator(handle, sparse.SparseConditionalAccumulator) as accumulator:
        shape = gradient_shape if has_known_shape else None
        return bool(
            accumulator.apply_grad(gradient_indices, gradient_values, shape, local_step, name)
        )


def SparseAccumulatorTakeGradient(
    handle: Any,
    num_required: Any,
    dtype: Any,
    name: str | None = None,  # noqa: ARG001  TensorFlow's signature
) -> SparseGradient:
    """Wait for gradients; return ``(indices, values, shape)`` of their reduction."""
    taken: SparseGradient = _take_grad(
        handle, sparse.SparseConditionalAccumulator, num_required, dtype
    )
    return taken


def ConditionalAccumulator(
    dtype: Any,
    shape: Any,
    container: str = "",  # noqa: ARG001  of TensorFlow's resource manager
    shared_name: str = "",
    reduction_type: str = "MEAN",
    name: str | None = None,
) -> AccumulatorRef:
    """Return a handle on a dense accumulator; `container` is ignored."""
    return dense.ConditionalAccumulator(
        dtype, shape, shared_name, name, reduction_type
    ).accumulator_ref


def AccumulatorApplyGradient(
    handle: Any, local_step: Any, gradient: Any, name: str | None = None
) -> bool:
    """Add a dense ``gradient``, of the declared shape; return False if it was dropped as stale."""
    with _accumulator(handle, dense.ConditionalAccumulator) as accumulator:
        return bool(accumulator.apply_grad(gradient, local_step, name))


def AccumulatorTakeGradient(
    handle: Any,
    num_required: Any,
    dtype: Any,
    name: str | None = None,  # noqa: ARG001  TensorFlow's signature
) -> ValueArray:
    """Wait for gradients; return their reduction."""
    taken: ValueArray = _take_grad(handle, dense.ConditionalAccumulator, num_required, dtype)
    return taken


def AccumulatorNumAccumulated(handle: Any, name: str | None = None) -> int:
    """Return how many gradients wait to be taken, in an accumulator of either kind."""
    with _accumulator(handle) as accumulator:
        return int(accumulator.num_accumulated(name))


def AccumulatorSetGlobalStep(handle: Any, new_global_step: Any, name: str | None = None) -> None:
    """Set the step of an accumulator of either kind."""
    with _accumulator(handle) as accumulator:
        accumulator.set_global_step(new_global_step, name)


ResourceConditionalAccumulator = ConditionalAccumulator
ResourceAccumulatorApplyGradient = AccumulatorApplyGradient
ResourceAccumulatorTakeGradient = AccumulatorTakeGradient


def ResourceAccumulatorNumAccumulated(handle: Any, name: str | None = None) -> int:
    """Return how many gradients wait to be taken, in a dense accumulator."""
    with _accumulator(handle, dense.ConditionalAccumulator) as accumulator:
        return int(accumulator.num_accumulated(name))


def ResourceAccumulatorSetGlobalStep(
    handle: Any, new_global_step: Any, name: str | None = None
) -> None:
    """Set the step of a dense accumulator."""
    with _accumulator(handle, dense.ConditionalAccumulator) as accumulator:
        accumulator.set_global_step(new_global_step, name)
