"""Every public name takes the documented arguments, and results are named records."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import run_to_end

import shmacc

CLASSES: Final = [one for name in shmacc.__all__ if isinstance(one := getattr(shmacc, name), type)]

CONSTRUCTOR: Final = (
    "(dtype, shape=None, shared_name=None, name={name!r}, reduction_type='MEAN', *, "
    "mode=None, owners='mine', if_exists='attach', unlink_on_close=False, lanes=None, "
    "capacity=None)"
)
# The last parameters of every apply of a gradient.
TERMS: Final = "*, contributor=None, weight=1, timeout=None)"

METHODS: Final[dict[type, dict[str, str]]] = {
    shmacc.SparseConditionalAccumulator: {
        "apply_grad": "(self, grad_indices, grad_values, grad_shape=None, local_step=0, name=None, "
        + TERMS,
        "apply_indexed_slices_grad": "(self, grad, local_step=0, name=None, " + TERMS,
        "take_grad": "(self, num_required, name=None, *, timeout=None)",
        "take_indexed_slices_grad": "(self, num_required, name=None, *, timeout=None)",
    },
    shmacc.ConditionalAccumulator: {
        "apply_grad": "(self, grad, local_step=0, name=None, " + TERMS,
        "take_grad": "(self, num_required, name=None, *, timeout=None)",
    },
    shmacc.AccumulatorGroup: {"apply": "(self, gradient, local_step, " + TERMS},
}

OF_PARAMETERS: Final = {
    "update": "(self, taken, values=None, *, gradients=None, remove=None, forget=None, "
    "learning_rate=None, timeout=None)",
    "skip": "(self, taken, values=None, *, timeout=None)",
    "snapshot": "(self, *, timeout=None)",
    "state": "(self, *, timeout=None)",
    "restore": "(self, state, *, timeout=None)",
    "member_specs": "(self, sparse=())",
}

ALL: Final = {
    "take": "(self, num_required, *, at_least=None, timeout=None, on_death='wait')",
    "round": "(self, num_required, *, at_least=None, timeout=None, on_death='wait')",
    "finish": "(self)",
    "steps": "(self, *, timeout=None, on_death='wait')",
    "steps_async": "(self, *, timeout=None, on_death='wait')",
    "snapshot": "(self, *, timeout=None)", "contributors": "(self, *, timeout=None)",
    "state": "(self, *, timeout=None)",
    "take_partial": "(self, num_required=1, *, timeout=None, seal=False)",
    "unseal": "(self, *, timeout=None)",
    "apply_partial": "(self, partial, local_step=0, *, timeout=None)",
    "advance_step": "(self, step, *, timeout=None)",
    "wait_step": "(self, after, *, timeout=None, on_death='wait')",
    "wait_step_async": "(self, after, *, timeout=None, on_death='wait')",
    "num_accumulated": "(self, name=None)",
    "set_global_step": "(self, new_global_step, name=None, *, timeout=None)",
    "attach": "(shared_name, *, owners='mine', timeout=None)", "stats": "(self)",
    "cancel": "(self)", "close": "(self)", "unlink": "(self)",
}  # fmt: skip

READ_ONLY: Final = (
    *("global_step", "dtype", "shape", "reduction_type", "name", "shared_name"),
    *("accumulator_ref", "lanes", "capacity", "running"),
)


def plain(function: Callable[..., Any]) -> str:
    """Return a function's signature as text, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_the_package_has_the_documented_names() -> None:
    names = {
        "SparseConditionalAccumulator", "ConditionalAccumulator", "IndexedSlices", "attach",
        "AccumulatorGroup", "TensorSpec", "IndexedSlicesSpec", "NEVER_STALE", "errors", "raw_ops",
        "sparse", "inspection", "testing", "__version__", "ConditionalAccumulatorBase",
    }  # fmt: skip
    assert names <= set(dir(shmacc))
    assert names - {"__version__"} <= set(shmacc.__all__)
    assert shmacc.NEVER_STALE == 2**63 - 1
    assert isinstance(shmacc.__version__, str)
    assert shmacc.sparse.SparseConditionalAccumulator is shmacc.SparseConditionalAccumulator
    assert plain(shmacc.attach) == "(shared_name, *, owners='mine', timeout=None)"
    assert plain(shmacc.IndexedSlices) == "(values, indices, dense_shape=None)"
    assert plain(shmacc.SharedArrays) == (
        "(contents, shared_name=None, *, mode=None, owners='mine', if_exists='attach', "
        "unlink_on_close=False)"
    )
    expected = "(shared_name, *, writable=False, timeout=None, owners='mine')"
    assert plain(shmacc.SharedArrays.attach) == expected


def test_import_loads_no_heavy_packages() -> None:
    heavy = ["ml_dtypes", "multiprocessing.pool", "asyncio", "tensorflow", "torch", "matplotlib"]
    script = (
        "import sys, numpy; before = set(sys.modules); import shmacc; "
        f"print([m for m in {heavy!r} if m in sys.modules and m not in before])"
    )
    done = run_to_end([sys.executable, "-P", "-c", script])
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "kind", [shmacc.SparseConditionalAccumulator, shmacc.ConditionalAccumulator]
)
def test_constructors_have_the_documented_signatures(kind: type) -> None:
    prefix = "sparse_" if kind is shmacc.SparseConditionalAccumulator else ""
    assert plain(kind) == CONSTRUCTOR.format(name=f"{prefix}conditional_accumulator")
    with kind(np.float32) as acc:
        assert acc.name == f"{prefix}conditional_accumulator"
        for attribute in READ_ONLY:
            getattr(acc, attribute)
            with pytest.raises(AttributeError):
                setattr(acc, attribute, 1)


def test_both_accumulators_have_one_abstract_base() -> None:
    base = shmacc.ConditionalAccumulatorBase
    assert (
        shmacc.ConditionalAccumulator.__bases__
        == shmacc.SparseConditionalAccumulator.__bases__
        == (base,)
    )
    assert not issubclass(shmacc.AccumulatorGroup, base)
    for name in ("dtype", "name", "accumulator_ref", "num_accumulated", "set_global_step"):  # TF's
        assert hasattr(base, name)
    with shmacc.ConditionalAccumulator("f4", (), "of the base", unlink_on_close=True):
        calls: list[Callable[[], Any]] = [
            base,
            lambda: base("float32", (), None),
            lambda: base.attach("of the base"),
            lambda: base.attach("nothing"),
        ]
        for make in calls:
            with pytest.raises(TypeError, match=r"shmacc\.attach"):
                make()


def test_references_are_equal_only_for_the_same_accumulator() -> None:
    with shmacc.ConditionalAccumulator("f4", (), "one", unlink_on_close=True) as one:
        with shmacc.attach("one") as same, shmacc.SparseConditionalAccumulator("f4") as other:
            ref = one.accumulator_ref
            for equal in (ref, one.accumulator_ref, same.accumulator_ref):
                assert (ref == equal, ref != equal, hash(ref) == hash(equal)) == (True, False, True)
            assert ref == pickle.loads(pickle.dumps(ref))
            assert len({ref: 1, same.accumulator_ref: 2, other.accumulator_ref: 3}) == 2
            assert ref != other.accumulator_ref
            assert ref != one
            assert ref != "one"
        one.close()
        assert ref == one.accumulator_ref


def test_methods_of_parameters_have_the_documented_signatures() -> None:
    for name, signature in OF_PARAMETERS.items():
        assert plain(getattr(shmacc.Parameters, name)) == signature, name


def test_a_group_is_constructed_from_specs() -> None:
    keywords = CONSTRUCTOR[CONSTRUCTOR.index("*, ") :]
    assert plain(shmacc.AccumulatorGroup) == (
        f"(members, shared_name=None, name=None, reduction_type='MEAN', {keywords}"
    )
    for spec in (shmacc.TensorSpec, shmacc.IndexedSlicesSpec):
        assert plain(spec) == "(shape=None, dtype='float32', *, reduction_type=None)"
    with shmacc.AccumulatorGroup({"m": shmacc.TensorSpec()}) as group:
        for name in set(READ_ONLY) - {"dtype", "shape"}:
            getattr(group, name)
            with pytest.raises(AttributeError):
                setattr(group, name, 1)


@pytest.mark.parametrize("kind", list(METHODS))
def test_methods_have_the_documented_signatures_and_docstrings(kind: type) -> None:
    for name, signature in (METHODS[kind] | ALL).items():
        assert plain(getattr(kind, name)) == signature, name
        assert inspect.getdoc(getattr(kind, name)), name


def test_a_call_with_wrong_parameters_is_a_type_error() -> None:
    with shmacc.SparseConditionalAccumulator(np.float32) as made:
        acc: Any = made
        calls: list[Callable[..., Any]] = [
            acc.apply_grad, lambda: acc.apply_grad([0], [1.0], nonsense=1), acc.take_grad,
            lambda: acc.take_grad(1, None, 0), lambda: acc.take(1, 0), type(acc),
            lambda: type(acc)("f4", None, None, "x", "MEAN", 0o600),
            shmacc.raw_ops.AccumulatorNumAccumulated,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(TypeError):
                call()


def test_indexed_slices_have_fields_and_can_be_pickled() -> None:
    slices = shmacc.IndexedSlices([[1.0]], [0])
    assert (slices.values, slices.indices, slices.dense_shape) == ([[1.0]], [0], None)
    again = pickle.loads(pickle.dumps(shmacc.IndexedSlices([[1.0]], [0], [3, 1])))
    assert again.dense_shape == [3, 1]


def test_results_have_named_fields_and_are_frozen() -> None:
    with shmacc.SparseConditionalAccumulator(np.float32) as acc:
        acc.apply_grad([3], [[1.0]])
        assert acc.take_grad(1)._fields == ("indices", "values", "shape")
        acc.apply_grad([3], [[1.0]], local_step=1)
        assert type(acc.take_indexed_slices_grad(1)) is shmacc.IndexedSlices
        acc.apply_grad([3], [[1.0]], local_step=2)
        for record, name in (
            (acc.snapshot(), "count"),
            (acc.take_partial(), "step"),
            (acc.stats(), "applied"),
        ):
            again = pickle.loads(pickle.dumps(record))
            assert getattr(again, name) == getattr(record, name)
            _is_frozen(record, name)
    with shmacc.ConditionalAccumulator(np.float32) as dense:
        dense.apply_grad([1.0, 3.0])
        _is_frozen(dense.take(1), "value")


def _is_frozen(record: Any, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(record, name, 0)


def test_classes_pickle_by_their_public_names() -> None:
    for cls in CLASSES:
        assert cls.__module__ == "shmacc"
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert b"shmacc._" not in pickle.dumps(cls)


def test_a_class_has_its_public_name_before_its_first_use() -> None:
    """The process unpickles an object of the class without using the public name."""
    code = """if True:
        import pickle, sys
        with_class = pickle.loads(sys.stdin.buffer.read())
        print(repr(type(with_class)), with_class.value.tolist())"""
    with shmacc.ConditionalAccumulator("i4") as acc:
        acc.apply_grad([1, 2])
        taken = acc.take(1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=pickle.dumps(taken), stdout=-1, check=True
    )
    assert done.stdout.decode() == "<class 'shmacc.DenseTaken'> [1, 2]\n"
