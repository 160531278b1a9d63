"""Gradients of SciPy, JAX, TensorFlow, polars, pandas and pyarrow are accepted; nulls are refused.

shmacc imports none of these packages unless the user did.
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
from helpers.support import run_to_end, same_bits
from jax.experimental.sparse import BCOO

import shmacc
from shmacc import errors
from shmacc._values import arrays, dtypes

TABLE: Final = np.array([[0, 0], [0, 3], [0, 0], [5, 5]], np.float32)
COLUMN: Final = [1.5, -2.0, 0.25]


def update_by(gradient: Any, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pass the gradient through an update."""
    params = shmacc.Parameters({"w": np.zeros_like(like)}, optimizer=shmacc.optim.SGD(1.0))
    group = shmacc.AccumulatorGroup({"loss": shmacc.TensorSpec(())})
    with params, group:
        group.apply({"loss": 1.0}, 0)
        with group.round(1):
            params.update({}, gradients={"w": gradient})
        moved: np.ndarray[Any, Any] = -params["w"]
        return moved


def take_sparse(gradient: Any, dtype: Any = "float32") -> Any:
    """Pass the gradient through an accumulator, a group and an update; check that they agree."""
    members = {"w": shmacc.IndexedSlicesSpec((4, 2), dtype)}
    with (
        shmacc.AccumulatorGroup(members) as group,
        shmacc.SparseConditionalAccumulator(dtype, (4, 2)) as acc,
    ):
        group.apply({"w": gradient}, 0)
        taken = group.take(1)["w"]
        if hasattr(gradient, "dense_shape") or sp.issparse(gradient):
            acc.apply_indexed_slices_grad(gradient)
            same_bits(acc.take(1).values, taken.values)
        if dtype in {"float32", "float64"}:
            whole = np.zeros((4, 2), dtype)
            whole[taken.indices] = taken.values
            assert np.array_equal(update_by(gradient, whole), whole, equal_nan=True)
        return taken


def take_dense(gradient: Any, dtype: Any = "float32") -> Any:
    """Pass the gradient through an accumulator and an update; check that they agree."""
    with shmacc.ConditionalAccumulator(dtype) as acc:
        acc.apply_grad(gradient)
        taken = acc.take(1)
        if dtype in {"float32", "float64"}:
            assert np.array_equal(update_by(gradient, taken.value), taken.value, equal_nan=True)
        return taken


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "bsr"])
def test_a_scipy_matrix_gives_its_rows_that_have_entries(form: str) -> None:
    make = sp.coo_matrix if form in {"coo", "lil"} else sp.coo_array
    taken = take_sparse(make(TABLE).asformat(form))
    assert taken.indices.tolist() == [1, 3]
    assert taken.values.tolist() == [[0, 3], [5, 5]]
    back = taken.to_scipy()
    assert isinstance(back, sp.csr_array)
    assert (back.toarray() == TABLE).all()
    assert np.shares_memory(back.data, taken.values)


def test_a_scipy_matrix_may_have_stored_zeros_and_repeats() -> None:
    matrix = sp.coo_array(([0.0, 1.0, 2.0], ([2, 1, 1], [0, 1, 1])), shape=(4, 2))
    taken = take_sparse(matrix, "float64")
    assert taken.indices.tolist() == [1, 2]
    assert taken.values.tolist() == [[0, 3], [0, 0]]


def test_scipy_arrays_that_are_no_matrices_of_rows_are_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="has 1"):
        take_sparse(sp.coo_array(np.ones(4, np.float32)))
    with pytest.raises(errors.InvalidArgumentError, match="toarray"):
        take_dense(sp.coo_array(TABLE))
    with shmacc.SparseConditionalAccumulator("float32", (4, 2, 2)) as acc:
        acc.apply_grad([1], np.ones((1, 2, 2)))
        with pytest.raises(errors.FailedPreconditionError, match="matrices alone"):
            acc.take(1).to_scipy()


def test_a_scipy_array_whose_conversion_fails_raises_our_error() -> None:
    wide = sp.coo_array(([1.0], ([2], [0])), shape=(4, 10**15))
    with pytest.raises(errors.ResourceExhaustedError, match=r"coo_array of shape \(4, 10{15}\)"):
        take_sparse(wide)
    with pytest.raises(errors.InvalidArgumentError, match=r"Broken has no rows.*no such"):
        take_sparse(Broken(TABLE))


class Broken(sp.csr_array):  # type: ignore[misc,unused-ignore]
    """An object that cannot be converted."""

    def tocsr(self, copy: Any = False) -> Any:
        raise NotImplementedError("no such conversion")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_results_become_float32_in_scipy(dtype: str) -> None:
    with shmacc.SparseConditionalAccumulator(dtype, (4, 2)) as acc:
        acc.apply_grad([3], np.ones((1, 2), np.float32).astype(dtypes.resolve(dtype).numpy))
        matrix = acc.take(1).to_scipy()
    assert matrix.dtype == np.float32
    assert matrix.toarray()[3].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32], ids=str)
def test_jax_arrays_of_each_dtype_are_accepted(dtype: Any) -> None:
    given = jnp.asarray(TABLE, dtype)
    taken = take_dense(given, dtype)
    back = taken.to_jax()
    assert back.dtype == given.dtype
    assert (back == given).all()
    rows = take_sparse((jnp.array([3, 1]), jnp.asarray(TABLE[[3, 1]], dtype)), dtype).to_jax()
    assert isinstance(rows, BCOO)
    assert rows.dtype == given.dtype
    assert (rows.todense() == given).all()


def test_a_traced_array_is_refused_in_jaxs_words() -> None:
    @jax.jit
    def step(x: Any) -> Any:
        take_dense(x)
        return x

    with pytest.raises(errors.InvalidArgumentError, match="Tracer"):
        step(jnp.ones(2))


def test_integers_that_jax_would_wrap_are_refused() -> None:
    taken = take_dense(np.array([2**40, 1]), "int64")
    with pytest.raises(errors.OutOfRangeError, match="jax_enable_x64"):
        taken.to_jax()
    assert take_dense(np.array([2**30]), "int64").to_jax().tolist() == [2**30]


def test_results_that_jax_makes_narrower_raise_nothing() -> None:
    huge = np.array([1e300, 1e-300, np.nan, 1.0])
    with np.errstate(all="raise"):
        assert str(take_dense(huge, "float64").to_jax()) == "[inf  0. nan  1.]"
        taken = take_sparse((np.arange(4), np.array([[6e4, 1e-7]] * 4, np.float16)), "float16")
        assert taken.to_scipy().dtype == np.float32
        assert taken.to_jax().todense().dtype == jnp.float16


_TENSORFLOW: Final = """
import numpy as np
import tensorflow as tf
import shmacc
from shmacc._values import arrays, dtypes

table = tf.Variable([[1., 2.], [3., 4.], [5., 6.]])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.gather(table, [2, 2, 0]))
gradient = tape.gradient(loss, table)
assert isinstance(gradient, tf.IndexedSlices)
with shmacc.SparseConditionalAccumulator(tf.float32, (3, 2)) as acc:
    acc.apply_indexed_slices_grad(gradient)
    rows = acc.take(1)
assert (rows.indices.tolist(), rows.values.tolist()) == ([0, 2], [[1, 1], [2, 2]])
members = {"t": shmacc.IndexedSlicesSpec((3, 2), tf.bfloat16), "d": shmacc.TensorSpec(None, "f4")}
with shmacc.AccumulatorGroup(members) as group:
    half = tf.IndexedSlices(tf.cast(gradient.values, tf.bfloat16), gradient.indices)
    group.apply({"t": half, "d": table}, 0)
    taken = group.take(1)
assert taken["t"].values.tolist() == [[1, 1], [2, 2]] and taken["d"].value[2, 1] == 6
constant = tf.constant([1., 2.])
array = arrays.values_array(constant, dtypes.resolve("float32"), "grad")
assert np.shares_memory(array, np.asarray(constant))
print("fine")
"""


_ALONE: Final = """
import sys
import numpy
import shmacc

group = shmacc.AccumulatorGroup({"rows": shmacc.IndexedSlicesSpec((None, 2), "float32")})
group.apply({"rows": ([1], [[1, 2]])}, 0)
group.take(1)
group.close()
others = "torch jax scipy tensorflow polars pandas pyarrow joblib uvloop anyio optax"
assert not set(others.split()) & {name.partition(".")[0] for name in sys.modules}
print("fine")
"""


@pytest.mark.parametrize("program", [_TENSORFLOW, _ALONE], ids=["TensorFlow", "no package"])
def test_tensorflow_gradients_are_accepted_and_shmacc_imports_no_package(program: str) -> None:
    """The programs have their own processes, since TensorFlow's libraries collide with others."""
    ran = run_to_end([sys.executable, "-P", "-c", program], status=None, timeout=None)
    if "No module named 'tensorflow'" in ran.stderr:
        pytest.skip("TensorFlow is not installed")
    assert ran.stdout == "fine\n", ran.stderr


COLUMNS: Final[dict[str, Any]] = {
    "polars": lambda: pl.Series(COLUMN, dtype=pl.Float32),
    "pandas": lambda: pd.Series(COLUMN, dtype="float32"),
    "pandas, masked": lambda: pd.Series(COLUMN, dtype="Float32"),
    "pandas, arrow": lambda: pd.Series(COLUMN, dtype="float32[pyarrow]"),
    "pyarrow": lambda: pa.array(COLUMN, pa.float32()),
    "pandas, an index": lambda: pd.Index(COLUMN, dtype="Float32"),
    "pandas, an array": lambda: pd.array(COLUMN, dtype="Float32"),
    "pyarrow, chunks": lambda: pa.chunked_array([COLUMN[:1], COLUMN[1:]], pa.float32()),
    "polars, chunks": lambda: pl.concat(
        [pl.Series(COLUMN[:1], dtype=pl.Float32), pl.Series(COLUMN[1:], dtype=pl.Float32)],
        rechunk=False,
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_read_in_place(name: str) -> None:
    column = COLUMNS[name]()
    assert take_dense(column).value.tolist() == COLUMN
    first, second = (
        arrays.values_array(column, dtypes.resolve("float32"), "grad") for _ in range(2)
    )
    copied = "chunks" in name or name in {"pandas, an index", "pandas, an array"}
    assert copied or np.shares_memory(first, second)


def test_indices_may_be_columns() -> None:
    frame = pl.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    for ids in (
        pl.Series([3, 1], dtype=pl.UInt16),
        pd.Series([3, 1], dtype="Int32"),
        pd.Index([3, 1]),
        pa.array([3, 1]),
    ):
        taken = take_sparse((ids, frame), "float64")
        assert taken.indices.tolist() == [1, 3]
        assert taken.values.tolist() == [[2, 4], [1, 3]]


def test_frames_and_columns_of_vectors_are_accepted() -> None:
    frame = {"x": [1.0, 2.0], "y": [3.0, 4.0]}
    expected = [[1, 3], [2, 4]]
    vectors = pl.Series(expected, dtype=pl.Array(pl.Float32, 2))
    for given in (
        pl.DataFrame(frame), pd.DataFrame(frame), vectors, pl.DataFrame({"v": vectors})["v"],
    ):  # fmt: skip
        assert take_dense(given, "float64").value.tolist() == expected
    assert take_dense(pd.DataFrame(frame, dtype="Float32"), "float32").value.tolist() == expected


def test_a_nan_is_accepted_and_is_no_null() -> None:
    for column in (pl.Series([1.0, float("nan")]), pd.Series([1.0, float("nan")])):
        assert np.isnan(take_dense(column, "float64").value[1])


@pytest.mark.parametrize(("column", "way_out"), [
    (pl.Series([1, None]), "fill_null(0)"),
    (pl.Series([[1.0, None]], dtype=pl.Array(pl.Float32, 2)), "fill_null(0)"),
    (pl.DataFrame({"x": [1.0], "y": [None]}), "fill_null(0)"),
    (pd.Series([1, None], dtype="Int64"), "fillna(0)"),
    (pd.Series([1, None], dtype="float32[pyarrow]"), "fillna(0)"),
    (pd.DataFrame({"x": [1.0], "y": pd.array([None], dtype="Float32")}), "fillna(0)"),
    (pd.array([1, None], dtype="Int64"), "fillna(0)"), (pa.array([1, None]), "fill_null(array, 0)"),
    (pa.chunked_array([[1], [None]]), "fill_null(array, 0)"),
    (pa.table({"x": [1.0], "y": [None]}), "fill_null(array, 0)"),
    (pa.record_batch({"x": pa.array([None], pa.float64())}), "fill_null(array, 0)"),
    (pa.DictionaryArray.from_arrays([0, 1], pa.array([1.0, None])), "fill_null(array, 0)"),
    (pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([1.0, None])), "fill_null(array, 0)"),
    (pl.Series([{"a": 1.0, "b": None}]), "fill_null(0)"),
    (np.ma.masked_array([1.0, 2.0], [True, False]), "masked.filled(0)"),
])  # fmt: skip
def test_nulls_are_refused_and_the_error_names_the_remedy(column: Any, way_out: str) -> None:
    for what in (lambda: take_dense(column, "float64"), lambda: take_sparse((column, column))):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            what()
        assert way_out in str(caught.value)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "ids",
    [
        pl.Series([1, None]),
        pd.Series([1, None]),  # floats, with NaN
        pd.Series([1, None], dtype="Int64"),
        pd.Series([1, None], dtype="int64[pyarrow]"),
        pd.array([1, None], dtype="Int64"),
        pa.array([1, None]),
        pa.chunked_array([[1], [None]]),
    ],
)
def test_nulls_among_ids_are_refused(ids: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="leave these out") as caught:
        take_sparse((ids, np.ones((2, 1))))
    assert "fill" not in str(caught.value)


@pytest.mark.parametrize("column", [
    pl.Series(["a"]), pl.LazyFrame({"x": [1]}), pl.col("x"), pd.Series(["a"]),
    pd.Series(["a"], dtype="category"), pa.array(["a"]), pa.scalar(1),
])  # fmt: skip
def test_columns_that_hold_no_numbers_are_refused(column: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        take_dense(column)
