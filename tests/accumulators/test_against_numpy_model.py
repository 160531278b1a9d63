"""Any sequence of calls gives the NumPy model's results: the same bits, the same errors."""

import contextlib
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from helpers.elements import ELEMENTS, Element
from helpers.gradients import KINDS, filled, numbers, shapes
from helpers.numpy_model import Array, DenseModel, Outcome, Refused, Shape, SparseModel
from helpers.support import same_bits, same_outcome
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import shmacc
from shmacc import errors, testing
from shmacc._base import layout

SEEDS: Final = st.integers(0, 2**32 - 1)
REDUCTIONS: Final = tuple(layout.REDUCTIONS)


class Accumulators(RuleBasedStateMachine):
    """One accumulator, several handles on it, and the model beside it."""

    acc: Any
    handles: list[Any]
    model: Any
    kinds: tuple[Any, Any]
    element: Element

    def __init__(self) -> None:
        """Enter a new namespace: one test runs many of these state machines."""
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.namespace = self.stack.enter_context(testing.isolated_namespace())
        self.handles = []
        self.partials: list[tuple[Any, Outcome]] = []
        self.agreed = True

    @initialize(
        element=st.sampled_from(list(ELEMENTS.values())),
        declared=shapes(),
        reduction=st.sampled_from(REDUCTIONS),
        name=st.sampled_from(["", "shared"]),
    )
    def create(self, element: Element, declared: Shape, reduction: str, name: str) -> None:
        """Create the accumulator; an empty name makes a private one."""
        kind, model = self.kinds
        self.element, self.model = element, model(element, declared, reduction)
        self.acc = kind(element.dtype, declared, name, reduction_type=reduction)
        self.handles = [self.acc]

    def teardown(self) -> None:
        """Take the remaining gradients, and check that no name in shared memory is left."""
        with self.stack:
            if self.handles:
                if self.agreed:  # after a disagreement, more errors would hide it
                    self.compare_take(max(self.model.count, 1))
                for handle in self.handles[1:]:
                    handle.close()
                self.acc.unlink()
                self.acc.close()
            assert testing.leaked_names(self.namespace) == ()

    def handle(self, data: st.DataObject) -> Any:
        """Pick one of the handles."""
        return self.handles[data.draw(st.integers(0, len(self.handles) - 1), label="handle")]

    def agree(self, ours: Callable[[], Any], models: Callable[[], Any]) -> tuple[Any, Any]:
        """Make both calls; both must return, or raise the same."""
        self.agreed = False
        refusal = want = None
        try:
            want = models()
        except Refused as refused:
            refusal = refused
        if refusal is not None:
            with pytest.raises(errors.ShmaccError) as caught:
                ours()
            assert type(caught.value).__name__ == refusal.kind
            assert refusal.message in (None, str(caught.value))
            self.same_state()
            self.agreed = True
            return None, None
        got = ours()
        self.same_state()
        self.agreed = True
        return got, want

    def same_state(self) -> None:
        """Compare what the accumulator and the model show without a take."""
        assert self.acc.num_accumulated() == self.model.count
        assert self.acc.global_step == self.model.step
        stats = self.acc.stats()
        assert stats.applied == self.model.applied
        assert stats.dropped == self.model.dropped

    def compare_take(self, num_required: int) -> None:
        """Call ``take`` on both, and compare all fields of the results."""
        got, want = self.agree(
            lambda: self.acc.take(num_required, timeout=0), lambda: self.model.take(num_required)
        )
        if want is not None:
            same_outcome(got, want)

    def local_step(self, data: st.DataObject) -> int:
        """Draw a local step, which is mostly not stale."""
        near = st.sampled_from([0, 0, 0, 0, 1, -1]).map(lambda d: self.model.step + d)
        step = data.draw(st.one_of(near, near, near, st.just(shmacc.NEVER_STALE)), label="step")
        return int(min(step, shmacc.NEVER_STALE))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(-1, self.model.count + 1), label="num_required")
        self.compare_take(wanted)

    @rule(data=st.data(), seal=st.booleans())
    def take_partial(self, data: st.DataObject, *, seal: bool) -> None:
        wanted = data.draw(st.integers(-1, self.model.count + 1), label="num_required")
        got, want = self.agree(
            lambda: self.handle(data).take_partial(wanted, timeout=0, seal=seal),
            lambda: self.model.take_partial(wanted, seal=seal),
        )
        if want is not None:
            same_outcome(got, want)
            if want.count:
                self.partials.append((got, want))

    @precondition(lambda self: self.partials)
    @rule(data=st.data(), again=st.booleans())
    def apply_partial(self, data: st.DataObject, *, again: bool) -> None:
        at = data.draw(st.integers(0, len(self.partials) - 1), label="partial")
        partial, known = self.partials[at] if again else self.partials.pop(at)
        step = self.local_step(data)
        got, want = self.agree(
            lambda: self.handle(data).apply_partial(pickle.loads(pickle.dumps(partial)), step),
            lambda: self.model.apply_partial(known, step),
        )
        assert got is want

    @rule(data=st.data())
    def unseal(self, data: st.DataObject) -> None:
        self.handle(data).unseal()
        self.model.unseal()

    @rule(data=st.data(), by=st.integers(-2, 3))
    def set_global_step(self, data: st.DataObject, by: int) -> None:
        step = self.model.step + by
        self.handle(data).set_global_step(step)
        self.model.set_global_step(step)
        self.same_state()

    @rule(data=st.data(), by=st.integers(-1, 2))
    def advance_step(self, data: st.DataObject, by: int) -> None:
        step = self.model.step + by
        got, want = self.agree(
            lambda: self.handle(data).advance_step(step), lambda: self.model.advance_step(step)
        )
        assert got == want

    @rule(data=st.data())
    def wait_step(self, data: st.DataObject) -> None:
        assert self.handle(data).wait_step(self.model.step - 1, timeout=0) == self.model.step
        with pytest.raises(errors.DeadlineExceededError):
            self.handle(data).wait_step(self.model.step, timeout=0)

    @precondition(lambda self: len(self.handles) < 3)
    @rule(data=st.data(), how=st.sampled_from(["attach", "pickle", "open"]))
    def another_handle(self, data: st.DataObject, how: str) -> None:
        old = self.handle(data)
        if how == "attach":
            new = shmacc.attach(old.shared_name)
        elif how == "pickle":
            new = pickle.loads(pickle.dumps(old))
        else:
            new = type(old)(old.dtype, None, old.shared_name, reduction_type=old.reduction_type)
        assert type(new) is type(old)
        assert not isinstance(new, shmacc.AccumulatorGroup)
        assert new.dtype == self.element.dtype
        assert new.shape == self.model.declared
        assert new.reduction_type == self.model.reduction
        self.handles.append(new)

    @precondition(lambda self: len(self.handles) > 1)
    @rule(data=st.data())
    def close_a_handle(self, data: st.DataObject) -> None:
        # Keep the creator's handle open: closing it would remove a private accumulator.
        handle = self.handles.pop(data.draw(st.integers(1, len(self.handles) - 1), label="closed"))
        handle.close()
        handle.close()
        with pytest.raises(errors.FailedPreconditionError):
            handle.num_accumulated()


class DenseAccumulators(Accumulators):
    """Dense accumulators and their model."""

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
    """Sparse accumulators and their model."""

    model: SparseModel

    kinds = shmacc.SparseConditionalAccumulator, SparseModel

    def draw_gradient(self, data: st.DataObject, kind: str, seed: int) -> tuple[Array, Array]:
        """Draw indices in any order; they do not repeat if an intermediate sum could overflow."""
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
        """Draw the shape argument: mostly None, otherwise mostly a correct shape."""
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
    deadline=None,  # other programs may share the two cores
    # Phase.explain is left out: it takes longer than finding the failure.
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)

TestDense = pytest.mark.timeout(120)(DenseAccumulators.TestCase)
TestDense.settings = LIMITS
TestSparse = pytest.mark.timeout(120)(SparseAccumulators.TestCase)
TestSparse.settings = LIMITS
