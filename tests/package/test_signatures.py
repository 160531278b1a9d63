"""Every public name takes the arguments of the contract, and errors are what they say."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlices,
    IndexedSlicesSpec,
    SparseConditionalAccumulator,
    TensorSpec,
    errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CONSTRUCTOR: Final = (
    "(dtype, shape=None, shared_name=None, name={name!r}, reduction_type='MEAN', *, "
    "mode=None, owners='mine', if_exists='attach', unlink_on_close=False, lanes=None, "
    "capacity=None)"
)
# What every apply of a gradient takes at its end.
TERMS: Final = "*, contributor=None, weight=1, timeout=None)"

METHODS: Final[dict[type, dict[str, str]]] = {
    SparseConditionalAccumulator: {
        "apply_grad": "(self, grad_indices, grad_values, grad_shape=None, local_step=0, name=None, "
        + TERMS,
        "apply_indexed_slices_grad": "(self, grad, local_step=0, name=None, " + TERMS,
        "take_grad": "(self, num_required, name=None, *, timeout=None)",
        "take_indexed_slices_grad": "(self, num_required, name=None, *, timeout=None)",
    },
    ConditionalAccumulator: {
        "apply_grad": "(self, grad, local_step=0, name=None, " + TERMS,
        "take_grad": "(self, num_required, name=None, *, timeout=None)",
    },
    AccumulatorGroup: {"apply": "(self, gradient, local_step, " + TERMS},
}

ALL: Final = {
    "take": "(self, num_required, *, timeout=None, on_death='wait')",
    "round": "(self, num_required, *, timeout=None, on_death='wait')",
    "snapshot": "(self)",
    "contributors": "(self)",
    "take_partial": "(self, num_required=1, *, timeout=None, seal=False)",
    "unseal": "(self)",
    "apply_partial": "(self, partial, local_step=0, *, timeout=None)",
    "advance_step": "(self, step)",
    "wait_step": "(self, after, *, timeout=None)",
    "num_accumulated": "(self, name=None)",
    "set_global_step": "(self, new_global_step, name=None)",
    "attach": "(shared_name, *, owners='mine', timeout=None)",
    "stats": "(self)",
    "cancel": "(self)",
    "close": "(self)",
    "unlink": "(self)",
}

READ_ONLY: Final = (
    "global_step",
    "dtype",
    "shape",
    "reduction_type",
    "name",
    "shared_name",
    "accumulator_ref",
    "lanes",
    "capacity",
)

RAW_OPS: Final = {
    "SparseConditionalAccumulator": (
        "dtype", "shape", "container", "shared_name", "reduction_type", "name",
    ),
    "SparseAccumulatorApplyGradient": (
        "handle", "local_step", "gradient_indices", "gradient_values", "gradient_shape",
        "has_known_shape", "name",
    ),
    "SparseAccumulatorTakeGradient": ("handle", "num_required", "dtype", "name"),
    "ConditionalAccumulator": (
        "dtype", "shape", "container", "shared_name", "reduction_type", "name",
    ),
    "AccumulatorApplyGradient": ("handle", "local_step", "gradient", "name"),
    "AccumulatorTakeGradient": ("handle", "num_required", "dtype", "name"),
    "AccumulatorNumAccumulated": ("handle", "name"),
    "AccumulatorSetGlobalStep": ("handle", "new_global_step", "name"),
}  # fmt: skip

ERRORS: Final[dict[str, tuple[type[BaseException], ...]]] = {
    "InvalidArgumentError": (ValueError,),
    "DeadlineExceededError": (TimeoutError,),
    "CancelledError": (),
    "NotFoundError": (FileNotFoundError,),
    "AlreadyExistsError": (FileExistsError,),
    "FailedPreconditionError": (RuntimeError,),
    "ResourceExhaustedError": (MemoryError,),
    "PermissionDeniedError": (PermissionError,),
    "OutOfRangeError": (OverflowError,),
    "DataLossError": (),
    "WorkerDiedError": (),
}


def plain(function: Callable[..., Any]) -> str:
    """Print a signature without its annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_top_level_names() -> None:
    names = {
        "SparseConditionalAccumulator", "ConditionalAccumulator", "IndexedSlices", "attach",
        "AccumulatorGroup", "TensorSpec", "IndexedSlicesSpec", "NEVER_STALE", "errors", "raw_ops",
        "sparse", "inspection", "testing", "__version__",
    }  # fmt: skip
    assert names <= set(dir(shmacc))
    assert names - {"__version__"} <= set(shmacc.__all__)
    assert shmacc.NEVER_STALE == 2**63 - 1
    assert isinstance(shmacc.__version__, str)
    assert shmacc.sparse.SparseConditionalAccumulator is SparseConditionalAccumulator
    assert plain(shmacc.attach) == "(shared_name, *, owners='mine', timeout=None)"


def test_import_is_light() -> None:
    heavy = [
        "ml_dtypes",
        "multiprocessing.pool",
        "asyncio",
        "tensorflow",
        "torch",
        "matplotlib",
    ]
    script = (
        "import sys, numpy; before = set(sys.modules); import shmacc; "
        f"print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SparseConditionalAccumulator, "sparse_conditional_accumulator"),
        (ConditionalAccumulator, "conditional_accumulator"),
    ],
)
def test_constructors(kind: type, name: str) -> None:
    assert plain(kind) == CONSTRUCTOR.format(name=name)
    with kind(np.float32) as acc:
        assert acc.name == name


@pytest.mark.parametrize("kind", list(METHODS))
def test_methods(kind: type) -> None:
    for name, signature in (METHODS[kind] | ALL).items():
        assert plain(getattr(kind, name)) == signature, name
        assert inspect.getdoc(getattr(kind, name)), name


def test_a_group_is_constructed_of_specs() -> None:
    keywords = CONSTRUCTOR[CONSTRUCTOR.index("*, ") :]
    assert plain(AccumulatorGroup) == (
        f"(members, shared_name=None, name=None, reduction_type='MEAN', {keywords}"
    )
    for spec in (TensorSpec, IndexedSlicesSpec):
        assert plain(spec) == "(shape=None, dtype='float32', *, reduction_type=None)"
    with AccumulatorGroup({"m": TensorSpec()}) as group:
        for name in READ_ONLY:
            if name not in {"dtype", "shape"}:
                getattr(group, name)
                with pytest.raises(AttributeError):
                    setattr(group, name, 1)


@pytest.mark.parametrize("kind", [SparseConditionalAccumulator, ConditionalAccumulator])
def test_read_only_attributes(kind: type) -> None:
    with kind(np.float32) as acc:
        for name in READ_ONLY:
            getattr(acc, name)
            with pytest.raises(AttributeError):
                setattr(acc, name, 1)


@pytest.mark.parametrize("op", RAW_OPS)
def test_raw_ops_arguments(op: str) -> None:
    parameters = inspect.signature(getattr(shmacc.raw_ops, op)).parameters.values()
    assert tuple(p.name for p in parameters) == RAW_OPS[op]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_raw_ops_are_exactly_these() -> None:
    assert set(shmacc.raw_ops.__all__) == set(RAW_OPS)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.ShmaccError)
    assert all(issubclass(kind, builtin) for builtin in ERRORS[name])
    again = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(again) is kind
    assert str(again) == "what happened"


def test_errors_that_were_raised_pickle() -> None:
    with ConditionalAccumulator(np.float32, [2]) as acc:
        acc.apply_grad([1, 2])
        for call in (
            lambda: acc.apply_grad([1]),
            lambda: acc.take_grad(2, timeout=0),
            lambda: shmacc.attach("nobody"),
        ):
            with pytest.raises(errors.ShmaccError) as caught:
                call()
            again = pickle.loads(pickle.dumps(caught.value))
            assert type(again) is type(caught.value)
            assert str(again) == str(caught.value)
            assert again.__dict__ == caught.value.__dict__


def test_deadline_says_how_many_came_and_who_is_there() -> None:
    with ConditionalAccumulator(np.float32) as acc:
        for _ in range(3):
            acc.apply_grad(1.0)
        with pytest.raises(TimeoutError) as caught:
            acc.take_grad(17, timeout=0)
        import os

        for said in ("3", "17", str(os.getpid())):
            assert said in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda acc: acc.apply_grad(),
        lambda acc: acc.apply_grad([0], [1.0], nonsense=1),
        lambda acc: acc.take_grad(),
        lambda acc: acc.take_grad(1, None, 0),
        lambda acc: acc.take(1, 0),
        lambda acc: type(acc)(),
        lambda acc: type(acc)("f4", None, None, "x", "MEAN", 0o600),
        lambda _: shmacc.raw_ops.AccumulatorNumAccumulated(),  # type: ignore[call-arg]
    ],
)
def test_a_call_that_does_not_fit_is_a_type_error(call: Callable[[Any], Any]) -> None:
    with SparseConditionalAccumulator(np.float32) as acc, pytest.raises(TypeError):
        call(acc)


def test_indexed_slices() -> None:
    slices = IndexedSlices([[1.0]], [0])
    assert plain(IndexedSlices) == "(values, indices, dense_shape=None)"
    assert (slices.values, slices.indices, slices.dense_shape) == ([[1.0]], [0], None)
    again = pickle.loads(pickle.dumps(IndexedSlices([[1.0]], [0], [3, 1])))
    assert again.dense_shape == [3, 1]


def test_results_are_named_and_frozen() -> None:
    with SparseConditionalAccumulator(np.float32, reduction_type="SUM") as acc:
        step = 0

        def fill() -> None:
            assert acc.apply_grad([3, 1, 3], [[1.0], [2.0], [4.0]], local_step=step)
            assert acc.apply_grad([3], [[8.0]], local_step=step)

        fill()
        triple = acc.take_grad(1)
        assert isinstance(triple, tuple)
        assert len(triple) == 3
        assert triple._fields == ("indices", "values", "shape")
        step = 1
        fill()
        slices = acc.take_indexed_slices_grad(1)
        assert isinstance(slices, IndexedSlices)
        assert slices.values.tolist() == triple.values.tolist() == [[2.0], [13.0]]
        step = 2
        fill()
        partial = acc.take_partial(2)
        assert acc.apply_partial(partial, local_step=2)
        taken = acc.take(2)
        for record in (partial, taken):
            assert record.indices.tolist() == [1, 3]
            assert record.values.tolist() == [[2.0], [13.0]]
            assert record.shape.tolist() == [-1, 1]
            assert record.row_counts.tolist() == [1, 2]
            assert (record.count, record.step) == (2, 2)
            _is_frozen(record, "count")
        again = pickle.loads(pickle.dumps(partial))
        assert again.values.tolist() == partial.values.tolist()
        stats = acc.stats()
        assert {"applied", "dropped", "taken", "waiting", "attached", "recoveries"} <= set(
            dir(stats)
        )
        assert (stats.waiting, stats.attached, stats.recoveries) == (0, 1, 0)
        _is_frozen(stats, "applied")

    with ConditionalAccumulator(np.float32) as dense:
        dense.apply_grad([1.0, 3.0])
        dense.apply_grad([3.0, 5.0])
        dense_partial = dense.take_partial()
        assert dense_partial.value.tolist() == [4.0, 8.0]
        assert dense.apply_partial(dense_partial)
        dense_taken = dense.take(2)
        assert dense_taken.value.tolist() == [2.0, 4.0]
        assert (dense_taken.count, dense_taken.step, dense.global_step) == (2, 0, 1)
        _is_frozen(dense_taken, "value")


def _is_frozen(record: Any, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(record, name, 0)


def test_raw_ops_do_the_work() -> None:
    raw = shmacc.raw_ops
    handle = raw.SparseConditionalAccumulator(
        dtype=np.float32, shape=[4, 2], container="", shared_name="raw", reduction_type="SUM"
    )
    assert raw.SparseAccumulatorApplyGradient(handle, 0, [1], [[1.0, 2.0]], [], True) is True  # noqa: FBT003
    assert raw.SparseAccumulatorApplyGradient(
        handle=handle,
        local_step=0,
        gradient_indices=[1, 0],
        gradient_values=[[1.0, 2.0], [3.0, 4.0]],
        gradient_shape=[9, 9, 9],  # ignored: it is said not to be known
        has_known_shape=False,
    )
    assert raw.AccumulatorNumAccumulated(handle=handle) == 2
    # A handle is an accumulator_ref, an accumulator or a shared_name.
    with shmacc.attach("raw") as acc:
        for form in (handle, acc, acc.accumulator_ref, "raw"):
            assert raw.AccumulatorNumAccumulated(form) == 2
        taken = raw.SparseAccumulatorTakeGradient("raw", 2, np.float32)
        assert taken.indices.tolist() == [0, 1]
        assert taken.values.tolist() == [[3.0, 4.0], [2.0, 4.0]]
        assert taken.shape.tolist() == [4, 2]
        raw.AccumulatorSetGlobalStep(acc, new_global_step=9)
        assert acc.global_step == 9
        assert raw.SparseAccumulatorApplyGradient("raw", 1, [1], [[1.0, 2.0]], [], False) is False  # noqa: FBT003
        with pytest.raises(errors.InvalidArgumentError):
            raw.SparseAccumulatorTakeGradient(handle, 1, np.float64)
        with pytest.raises(errors.InvalidArgumentError):
            raw.AccumulatorApplyGradient(handle, 9, [1.0])
        acc.unlink()
    handle.accumulator.close()


def test_raw_ops_dense() -> None:
    raw = shmacc.raw_ops
    handle = raw.ConditionalAccumulator("float64", None, shared_name="raw")
    for value in (1.0, 4.0):
        assert raw.AccumulatorApplyGradient(handle, 0, value)
    assert raw.AccumulatorTakeGradient(handle, 2, "float64").tolist() == 2.5
    with pytest.raises(errors.InvalidArgumentError):
        raw.AccumulatorTakeGradient(handle, 0, "float64")
    with pytest.raises(errors.NotFoundError):
        raw.AccumulatorNumAccumulated("nobody")
    with handle.accumulator as acc:
        acc.unlink()
