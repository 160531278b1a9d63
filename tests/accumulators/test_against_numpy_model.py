"""Any sequence of calls gives what the NumPy model gives: bit for bit, error for error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.accumulator_machine import SEEDS, Accumulators
from helpers.gradients import KINDS, filled, numbers
from helpers.numpy_model import DenseModel, SparseModel
from helpers.support import same_bits
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import shmacc

if TYPE_CHECKING:
    from helpers.numpy_model import Array


class DenseAccumulators(Accumulators):
    """The dense one."""

    model: DenseModel

    kinds = shmacc.ConditionalAccumulator, DenseModel

    @rule(
        data=st.data(),
        seed=SEEDS,
        kind=st.sampled_from(KINDS),
        form=st.sampled_from(["method", "raw", "list"]),
    )
    def apply(self, data: st.DataObject, seed: int, kind: str, form: str) -> None:
        known = self.model.total.shape if self.model.total is not None else self.model.declared
        shape = data.draw(filled(known if known is not None else (None, None)), label="shape")
        grad = numbers(self.element, shape, kind, seed)
        step = self.local_step(data)
        handle = self.handle(data)
        given: Any = grad
        if form == "list" and not self.element.quantised and 0 not in shape:
            given = grad.tolist()
        got, want = self.agree(
            lambda: (
                shmacc.raw_ops.AccumulatorApplyGradient(handle.accumulator_ref, step, given)
                if form == "raw"
                else handle.apply_grad(given, step)
            ),
            lambda: self.model.apply_grad(grad, step),
        )
        assert got is want

    @precondition(lambda self: self.model.count)
    @rule(data=st.data(), raw=st.booleans())
    def take_grad(self, data: st.DataObject, *, raw: bool) -> None:
        handle = self.handle(data)
        got, want = self.agree(
            lambda: (
                shmacc.raw_ops.AccumulatorTakeGradient(handle.accumulator_ref, 1, handle.dtype)
                if raw
                else handle.take_grad(1, timeout=0)
            ),
            lambda: self.model.take(1),
        )
        if want is not None:
            same_bits(got, want.values)


class SparseAccumulators(Accumulators):
    """The sparse one."""

    model: SparseModel

    kinds = shmacc.SparseConditionalAccumulator, SparseModel

    def draw_gradient(self, data: st.DataObject, kind: str, seed: int) -> tuple[Array, Array]:
        """Draw indices in any order, with repeats unless a 64-bit sum could wrap half-way."""
        declared = self.model.declared or ()
        limit = declared[0] if declared and declared[0] is not None else 40
        index = st.integers(0, limit - 1)
        if data.draw(st.integers(0, 12), label="any index") == 0:
            index = st.integers(-2, limit + 2)
        listed = data.draw(
            st.lists(index, max_size=8, unique=kind == "extreme" and self.element.integral),
            label="indices",
        )
        inner = self.model.inner if self.model.inner is not None else declared[1:]
        shape = (len(listed), *data.draw(filled(inner), label="inner"))
        indices = np.array(listed, dtype=data.draw(st.sampled_from(["i8", "i4"])))
        spoilt = data.draw(st.integers(0, 40), label="spoilt")
        if spoilt == 0:
            indices = indices.reshape(1, -1)
        elif spoilt == 1:
            shape = ()
        elif spoilt == 2:
            shape = (len(listed) + 1, *shape[1:])
        return indices, numbers(self.element, shape, kind, seed)

    def draw_given(self, data: st.DataObject, values: Array) -> Array | None:
        """Draw a shape to go with the gradient, mostly none, mostly a right one."""
        if data.draw(st.integers(0, 3), label="given"):
            return None
        declared = self.model.declared or ()
        first = declared[0] if declared and declared[0] is not None else 50
        dims = [first, *values.shape[1:]]
        spoilt = data.draw(st.integers(0, 8), label="spoilt shape")
        if spoilt == 0:
            dims.append(3)
        elif spoilt == 1:
            dims = []
        elif spoilt == 2:
            dims[data.draw(st.integers(0, len(dims) - 1))] += 1
        elif spoilt == 3:
            dims[data.draw(st.integers(0, len(dims) - 1))] = -1
        elif spoilt == 4:
            dims.pop()
        return np.array(dims, dtype=np.int64)

    @rule(
        data=st.data(),
        seed=SEEDS,
        kind=st.sampled_from(KINDS),
        form=st.sampled_from(["method", "slices", "anything", "raw", "list"]),
    )
    def apply(self, data: st.DataObject, seed: int, kind: str, form: str) -> None:
        indices, values = self.draw_gradient(data, kind, seed)
        given = self.draw_given(data, values)
        step = self.local_step(data)
        handle = self.handle(data)
        got, want = self.agree(
            lambda: _apply(handle, form, indices, values, given, step=step),
            lambda: self.model.apply_grad(indices, values, given, step),
        )
        assert got is want

    @precondition(lambda self: self.model.count)
    @rule(data=st.data(), form=st.sampled_from(["tuple", "slices", "raw"]))
    def take_grad(self, data: st.DataObject, form: str) -> None:
        handle = self.handle(data)
        got, want = self.agree(lambda: _take(handle, form), lambda: self.model.take(1))
        if want is None:
            return
        indices, values, shape = got
        same_bits(indices, want.indices)
        same_bits(values, want.values)
        same_bits(shape, want.shape)


def _apply(
    handle: Any, form: str, indices: Array, values: Array, given: Array | None, *, step: int
) -> Any:
    if form == "slices":
        own = shmacc.IndexedSlices(values, indices, given)
        return handle.apply_indexed_slices_grad(own, step)
    if form == "anything":
        slices = SimpleNamespace(indices=indices, values=values, dense_shape=given)
        return handle.apply_indexed_slices_grad(slices, local_step=step)
    if form == "raw":
        return shmacc.raw_ops.SparseAccumulatorApplyGradient(
            handle.accumulator_ref,
            step,
            indices,
            values,
            [] if given is None else given,
            has_known_shape=given is not None,
        )
    if form == "list" and values.dtype.names is None and values.size:
        shape = None if given is None else given.tolist()
        return handle.apply_grad(indices.tolist(), values.tolist(), shape, step)
    return handle.apply_grad(indices, values, given, step)


def _take(handle: Any, form: str) -> tuple[Any, Any, Any]:
    if form == "slices":
        slices = handle.take_indexed_slices_grad(1, timeout=0)
        return slices.indices, slices.values, slices.dense_shape
    if form == "raw":
        taken = shmacc.raw_ops.SparseAccumulatorTakeGradient(
            handle.accumulator_ref, 1, handle.dtype
        )
    else:
        taken = handle.take_grad(1, timeout=0)
    return taken.indices, taken.values, taken.shape


LIMITS: Final = settings(
    max_examples=70,
    stateful_step_count=30,
    deadline=None,  # two cores shared with whatever else runs
    # Not the explaining of a failure, which takes longer than finding it.
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)

TestDense = pytest.mark.timeout(120)(DenseAccumulators.TestCase)
TestDense.settings = LIMITS
TestSparse = pytest.mark.timeout(120)(SparseAccumulators.TestCase)
TestSparse.settings = LIMITS
