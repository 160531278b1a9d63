"""Opening an existing segment with other properties is refused; the error names a difference."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, NAME, apply
from helpers.support import refused

import shmacc
from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    IndexedSlicesSpec,
    Parameters,
    SharedArrays,
    SparseConditionalAccumulator,
    TableSpec,
    TensorSpec,
    errors,
    init,
    optim,
)


def check(caught: Any, what: str, existing: object, asked: object) -> None:
    error = pickle.loads(pickle.dumps(caught))
    assert (error.what, error.existing, error.asked) == (what, str(existing), str(asked))
    assert f"exists with {what} {existing}, but {asked} was asked for" in str(error)
    assert f"shmacc-inspect remove {error.segment}" in str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("other", "what", "existing", "asked"), [
    ({"dtype": "f8"}, "dtype", "float32", "float64"),
    ({"reduction_type": "SUM"}, "reduction_type", "MEAN", "SUM"),
    ({"shape": (3, 4)}, "shape", "[3,2]", "[3,4]"), ({"shape": (3,)}, "shape", "[3,2]", "[3]"),
    ({"shape": (None, 2)}, "shape", "[3,2]", "[?,2]"), ({"shape": ()}, "shape", "[3,2]", "[]"),
    ({"mode": 0o666}, "mode", "0600", "0666"),
])  # fmt: skip
def test_a_difference_names_both_values_and_how_to_remove_the_old_segment(
    kind: Any, other: dict[str, Any], what: str, existing: str, asked: str
) -> None:
    first = {"dtype": "f4", "shape": (3, 2), "shared_name": NAME}
    with kind(**first) as acc:
        apply(acc)
        with refused() as caught:
            kind(**first | other)
        check(caught.value, what, existing, asked)
        with kind(**first) as same:
            assert same.num_accumulated() == 1
        acc.unlink()


MAKE: Final[dict[str, Callable[[Any], Any]]] = {
    "capacity": lambda n: ConditionalAccumulator("f8", (), NAME, capacity=n, unlink_on_close=True),
    "group": lambda specs: AccumulatorGroup(specs, NAME, unlink_on_close=True),
    "arrays": lambda contents: SharedArrays(contents, NAME, unlink_on_close=True),
    "parameters": lambda given: Parameters(
        given[0], NAME, optimizer=given[1], unlink_on_close=True
    ),
}
TWO: Final = {"emb": IndexedSlicesSpec((10, 2)), "fc": TensorSpec((3,), reduction_type="SUM")}
ROWS: Final = np.zeros((4, 3), np.float32)
ARRAYS: Final[dict[str, Any]] = {"emb": ROWS, "bias": TensorSpec((3,), "float64")}
UNIFORM: Final = init.Uniform(-1, 1, seed=3)
TABLE: Final[dict[str, Any]] = {"user": TableSpec((3,), initial=UNIFORM), "fc": ROWS}
BOTH: Final = {"t": TableSpec((2,)), "a": np.ones((3, 2))}
LIMIT: Final = optim.SGD(0.1, constraint=optim.MaxNorm(2))
ADAGRAD, SGD = optim.Adagrad(0.5), optim.SGD(0.5)
DIFFERENCES: Final[list[tuple[str, Any, Any, str, object, object]]] = [
    ("capacity", 2, 3, "capacity", 2, 3),
    ("capacity", None, 1, "capacity", "unbounded", 1),
    ("group", TWO, TWO | {"fc": TensorSpec((3,), "int8")},
     "dtype of member 'fc'", "float32", "int8"),
    ("group", TWO, TWO | {"emb": IndexedSlicesSpec((10, 3))},
     "shape of member 'emb'", "[10,2]", "[10,3]"),
    ("group", TWO, TWO | {"emb": TensorSpec((10, 2))}, "kind of member 'emb'", "sparse", "dense"),
    ("group", TWO, TWO | {"fc": TensorSpec((3,))}, "reduction_type of member 'fc'", "SUM", "MEAN"),
    ("group", TWO, TWO | {"more": TensorSpec()},
     "member 'more'", "none", "dense float32 <unknown> MEAN"),
    ("group", TWO, {"fc": TWO["fc"]}, "member 'emb'", "sparse float32 [10,2] MEAN", "none"),
    ("arrays", ARRAYS, ARRAYS | {"emb": ROWS.astype("i4")},
     "dtype of array 'emb'", "float32", "int32"),
    ("arrays", ARRAYS, ARRAYS | {"bias": np.zeros(4)}, "shape of array 'bias'", "[3]", "[4]"),
    ("arrays", ARRAYS, {"emb": ROWS.reshape(-1), "bias": 1},
     "shape of array 'emb'", "[4,3]", "[12]"),
    ("arrays", ARRAYS, ARRAYS | {"more": 1.0}, "array 'more'", "none", "float64 []"),
    ("arrays", ARRAYS, {"emb": ROWS}, "array 'bias'", "float64 [3]", "none"),
    *(("parameters", (BOTH, LIMIT), (BOTH, other), "optimizer of table 't'", LIMIT, other)
      for other in (None, optim.SGD(0.1), optim.SGD(0.2, constraint=LIMIT.constraint))),
    *(("parameters", (BOTH, LIMIT), (BOTH, optim.SGD(0.1, constraint=other)),
       "optimizer of table 't'", LIMIT, optim.SGD(0.1, constraint=other))
      for other in (optim.UnitNorm(), optim.MaxNorm(3), optim.NonNeg())),
    ("parameters", ({"a": ROWS}, ADAGRAD), ({"a": ROWS}, SGD),
     "optimizer of array 'a'", ADAGRAD, SGD),
    ("parameters", (TABLE, ADAGRAD), (TABLE, SGD), "optimizer of table 'user'", ADAGRAD, SGD),
    *(("parameters", (TABLE, ADAGRAD), (TABLE | {"user": spec}, ADAGRAD),
       f"{what} of table 'user'", existing, asked)
      for spec, what, existing, asked in (
          (TableSpec((4,), initial=UNIFORM), "row_shape", (3,), (4,)),
          (TableSpec((3,), "float64", initial=UNIFORM), "dtype", "float32", "float64"),
          (TableSpec((3,)), "initial", UNIFORM, init.Constant()),
          (TableSpec((3,), initial=UNIFORM, max_rows=3), "max_rows", None, 3),
      )),
]  # fmt: skip


@pytest.mark.parametrize("kind", MAKE)
def test_the_first_difference_is_named_with_both_values(kind: str) -> None:
    for _, existing, asked, what, *both in (row for row in DIFFERENCES if row[0] == kind):
        with MAKE[kind](existing) as made:
            with refused() as caught:
                MAKE[kind](asked)
            check(caught.value, what, *both)
            again = dict(reversed(existing.items())) if kind == "group" else existing
            MAKE[kind](again).close()
            assert not made._handle.unlinked


def test_an_array_instead_of_a_table_is_refused_and_both_are_named() -> None:
    said = r"'user' table of .*, but float64"
    with MAKE["parameters"]((TABLE, ADAGRAD)), pytest.raises(ValueError, match=said):
        MAKE["parameters"]((TABLE | {"user": np.zeros(3)}, ADAGRAD))


def test_a_capacity_that_is_not_given_agrees_with_any() -> None:
    with MAKE["capacity"](2), MAKE["capacity"](None) as same:
        assert same.capacity == 2


# How to make and attach each kind. Read-only, SharedArrays.attach accepts parameters, too.
OF_KIND: Final[dict[str, tuple[Callable[[], Any], Callable[[str], Any]]]] = {
    "dense": (lambda: ConditionalAccumulator("f4", None, NAME), ConditionalAccumulator.attach),
    "sparse": (lambda: SparseConditionalAccumulator("f4", None, NAME),
        SparseConditionalAccumulator.attach),
    "group": (lambda: AccumulatorGroup({"a": TensorSpec((4, 3))}, NAME), AccumulatorGroup.attach),
    "arrays": (lambda: SharedArrays({"a": np.zeros((4, 3), bool)}, NAME),
        partial(SharedArrays.attach, writable=True)),
    "parameters": (lambda: Parameters({"a": np.zeros((4, 3))}, NAME), Parameters.attach),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_KIND)
def test_another_kind_is_refused(kind: str) -> None:
    with OF_KIND[kind][0]() as made:
        for other in OF_KIND.keys() - {kind}:
            construct, attach = OF_KIND[other]
            with refused() as caught:
                construct()
            error = caught.value
            assert (error.what, error.existing, error.asked) == ("kind", kind, other)
            said = r"is the name of.*shmacc\.attach returns whatever has a name"
            with pytest.raises(errors.InvalidArgumentError, match=said) as caught:
                attach(NAME)
            assert "if_exists" not in str(caught.value)
            assert "remove" not in str(caught.value)
        with shmacc.attach(NAME) as found:
            assert type(found) is type(made)
        made.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_an_undeclared_shape_agrees_with_any_shape(kind: Any) -> None:
    with kind(np.float32, (3, 2), "one") as acc:
        with kind(np.float32, None, "one") as taken_over, kind.attach("one") as attached:
            assert acc.shape == taken_over.shape == attached.shape == (3, 2)
        acc.unlink()
    with kind(np.float32, None, "two") as acc:
        # The reverse is a difference: the segment's own shape is unknown.
        with refused():
            kind(np.float32, (3, 2), "two")
        acc.unlink()
