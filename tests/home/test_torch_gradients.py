"""Gradients as torch leaves them go into every apply, uncopied, and come back as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from helpers.support import refused

import shmacc
from shmacc import errors
from shmacc._gradients import arrays, dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS: Final = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
DTYPES: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}


def embedding_gradient(*, coalesced: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``nn.Embedding(sparse=True)`` leaves: 1 in row 5, 2 in row 2, which occurs twice."""
    layer = torch.nn.Embedding(9, 2, sparse=True, dtype=dtype)
    layer(torch.tensor([5, 2, 2])).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.is_coalesced()
    return layer.weight.grad.coalesce() if coalesced else layer.weight.grad


@pytest.fixture(params=["accumulator", "member"])
def dense(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Apply a dense gradient and take it, of an accumulator and of a group's member."""

    def accumulator(value: Any, dtype: Any) -> Any:
        with shmacc.ConditionalAccumulator(dtype) as acc:
            acc.apply_grad(value)
            return acc.take(1)

    def member(value: Any, dtype: Any) -> Any:
        with shmacc.AccumulatorGroup({"w": shmacc.TensorSpec(None, dtype)}) as group:
            group.apply({"w": value}, 0)
            return group.take(1)["w"]

    return accumulator if request.param == "accumulator" else member


@pytest.fixture(params=["accumulator", "member"])
def sparse(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Apply a sparse gradient and take it, of an accumulator and of a group's member."""

    def accumulator(value: Any, dtype: Any = "float32") -> Any:
        with shmacc.SparseConditionalAccumulator(dtype, (9, 2)) as acc:
            acc.apply_indexed_slices_grad(value)
            return acc.take(1)

    def member(value: Any, dtype: Any = "float32") -> Any:
        with shmacc.AccumulatorGroup({"w": shmacc.IndexedSlicesSpec((9, 2), dtype)}) as group:
            group.apply({"w": value}, 0)
            return group.take(1)["w"]

    return accumulator if request.param == "accumulator" else member


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_in_and_out(dense: Any, dtype: torch.dtype) -> None:
    given = ROWS.to(dtype)
    taken = dense(given, dtype)
    assert taken.value.dtype.name == DTYPES[dtype]
    back = taken.to_torch()
    assert back.dtype == dtype
    assert torch.equal(back.to(torch.complex128), given.to(torch.complex128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_of_torch_is_one(dtype: torch.dtype) -> None:
    assert dtypes.resolve(dtype).name == DTYPES[dtype]
    assert shmacc.TensorSpec((), dtype).dtype.name == DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_accumulators_do_not_have_is_refused(dtype: torch.dtype) -> None:
    with refused():
        shmacc.ConditionalAccumulator(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("coalesced", [True, False])
def test_what_an_embedding_leaves(sparse: Any, dtype: torch.dtype, *, coalesced: bool) -> None:
    gradient = embedding_gradient(coalesced=coalesced, dtype=dtype)
    taken = sparse(gradient, dtype)
    assert taken.indices.tolist() == [2, 5]
    assert taken.values.tolist() == [[2, 2], [1, 1]]
    back = taken.to_torch()
    assert back.is_coalesced()
    assert back.dtype == dtype
    assert torch.equal(back.to_dense(), gradient.to_dense())


def test_indices_and_values_of_their_own() -> None:
    gradient = embedding_gradient(coalesced=True)
    with shmacc.SparseConditionalAccumulator(torch.float32) as acc:
        acc.apply_grad(gradient.indices()[0], gradient.values(), gradient.shape)
        assert acc.take(1).indices.tolist() == [2, 5]


@pytest.mark.parametrize(
    "convert",
    [
        lambda dense: dense.to_sparse(),
        lambda dense: dense.to_sparse(1),
        lambda dense: dense.to_sparse_csr(),
        lambda dense: dense.to_sparse_csc(),
    ],
    ids=["coo", "coo of rows", "csr", "csc"],
)
@pytest.mark.filterwarnings("ignore:Sparse")  # in beta, says torch
def test_sparse_tensors_of_any_layout(sparse: Any, convert: Any) -> None:
    dense = torch.zeros(9, 2)
    dense[4, 1] = 3
    dense[7] = 5
    taken = sparse(convert(dense))
    assert taken.indices.tolist() == [4, 7]
    assert taken.values.tolist() == [[0, 3], [5, 5]]


def test_tensors_that_are_sparse_in_no_rows_are_refused(sparse: Any) -> None:
    none = torch.sparse_coo_tensor(
        torch.empty((0, 1), dtype=torch.int64), torch.ones(1, 9, 2), (9, 2), check_invariants=True
    )
    outside = torch.sparse_coo_tensor(
        torch.tensor([[1], [7]]), torch.ones(1), (9, 2), check_invariants=False
    )
    for tensor, words in (
        (torch.tensor(3.0).to_sparse(), "is a scalar"),
        (none, r"in its rows.*\.to_dense"),
        (outside, "index 7 is out of bounds"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=words):
            sparse(tensor)


def test_a_sparse_tensor_of_more_dimensions_than_declared_is_refused() -> None:
    column = torch.ones(9, 2, 1).to_sparse(1)
    with (
        shmacc.SparseConditionalAccumulator(torch.float32, (9, 2)) as acc,
        shmacc.AccumulatorGroup({"t": shmacc.IndexedSlicesSpec((None, 2))}) as group,
    ):
        for apply in (
            lambda: acc.apply_indexed_slices_grad(column),
            lambda: group.apply({"t": column}, 0),
        ):
            with pytest.raises(errors.InvalidArgumentError, match=r"expected .*rank 2, got 3"):
                apply()
        assert acc.num_accumulated() == group.num_accumulated() == 0


def test_a_shape_that_does_not_fit_is_refused(sparse: Any) -> None:
    with refused():
        sparse(torch.zeros(8, 2).to_sparse(1))


@pytest.mark.parametrize(
    ("spoil", "way_out"),
    [
        (lambda t: t.requires_grad_(), "tensor.detach()"),
        (torch.nn.Parameter, "`.grad`"),
        (lambda t: t.to_sparse(), ".to_dense()"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), ".dequantize()"),
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.to(torch.float8_e4m3fn), "Float8"),
    ],
    ids=["requires grad", "a parameter", "sparse", "quantised", "meta", "float8"],
)
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_refusals_name_the_way_out(dense: Any, spoil: Any, way_out: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        dense(spoil(ROWS.clone()), "float32")
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "way_out"),
    [
        (lambda t: t.requires_grad_(), "tensor.detach()"),
        (lambda t: t.to_dense(), "sparse=True"),
        (lambda t: t.to("meta"), "meta"),
    ],
    ids=["requires grad", "dense", "meta"],
)
def test_refusals_of_sparse_gradients_name_the_way_out(
    sparse: Any, spoil: Any, way_out: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        sparse(spoil(embedding_gradient(coalesced=True)))
    assert way_out in str(caught.value)


def test_a_tensor_on_an_accelerator_is_refused_with_the_way_out(dense: Any) -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

    with pytest.raises(errors.InvalidArgumentError, match=r"'cuda:1': pass `tensor.cpu\(\)`"):
        dense(ROWS.as_subclass(Elsewhere), "float32")


def test_a_masked_tensor_is_refused(dense: Any) -> None:
    masked = pytest.importorskip("torch.masked")
    with pytest.warns(UserWarning, match="prototype"):
        tensor = masked.masked_tensor(ROWS, ROWS > 2)
    with pytest.raises(errors.InvalidArgumentError, match=r"masked\.to_tensor\(0\)"):
        dense(tensor, "float32")


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t[1:], lambda t: t.view(3, 2), torch.nn.Buffer],
    ids=["whole", "slice", "view", "buffer"],
)
def test_a_tensor_is_read_where_it_is(view: Any) -> None:
    given = view(ROWS.clone())
    array = arrays.values_array(given, dtypes.resolve("float32"), "grad")
    assert np.shares_memory(array, given.numpy())


def test_the_rows_of_an_embedding_are_read_where_they_are() -> None:
    from shmacc._gradients import foreign

    gradient = embedding_gradient(coalesced=False)
    slices = foreign.slices(gradient)
    index = arrays.index_array(slices.indices, "indices")
    values = arrays.values_array(slices.values, dtypes.resolve("float32"), "values")
    assert index.ctypes.data == gradient._indices().data_ptr()
    assert values.ctypes.data == gradient._values().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_taken_is_not_copied(dtype: torch.dtype) -> None:
    members = {
        "rows": shmacc.IndexedSlicesSpec((9, 2), dtype),
        "whole": shmacc.TensorSpec((3, 2), dtype),
    }
    with shmacc.AccumulatorGroup(members) as group:
        rows = embedding_gradient(coalesced=False, dtype=dtype)
        group.apply({"rows": rows, "whole": ROWS.to(dtype)}, 0)
        taken = group.take(1)
    tensors = taken.to_torch()
    assert tensors.keys() == members.keys()
    assert tensors["whole"].data_ptr() == taken["whole"].value.ctypes.data
    assert tensors["rows"]._values().data_ptr() == taken["rows"].values.ctypes.data
    assert tensors["rows"]._indices().data_ptr() == taken["rows"].indices.ctypes.data


def test_views_that_are_not_plain_are_read_rightly(dense: Any) -> None:
    complex_rows = torch.complex(ROWS, ROWS)
    assert dense(ROWS.t(), "float32").value.tolist() == ROWS.t().tolist()
    assert dense(complex_rows.conj(), "complex64").value.tolist() == complex_rows.conj().tolist()
    assert dense(complex_rows.conj().imag, "float32").value.tolist() == (-ROWS).tolist()
    assert dense(ROWS.to(torch.bfloat16).t(), torch.bfloat16).to_torch().tolist() == (
        ROWS.t().tolist()
    )


def test_rows_of_an_unknown_number_are_no_tensor() -> None:
    with shmacc.SparseConditionalAccumulator("float32") as acc:
        acc.apply_grad([1], [[1.0]])
        taken = acc.take(1)
    for convert in (taken.to_torch, taken.to_jax, taken.to_scipy):
        with pytest.raises(errors.FailedPreconditionError, match="declare it in the shape"):
            convert()


def test_a_partial_is_converted_as_sums() -> None:
    with shmacc.ConditionalAccumulator(torch.bfloat16, (3, 2)) as acc:
        for _ in range(2):
            acc.apply_grad(ROWS.to(torch.bfloat16))
        sums = acc.take_partial(2).to_torch()
    assert sums.dtype == torch.float32
    assert torch.equal(sums, 2 * ROWS)


def test_shared_arrays_start_as_tensors() -> None:
    tensors = {"bf": ROWS.to(torch.bfloat16), "fp": ROWS, "flag": torch.tensor([True])}
    with shmacc.SharedArrays(tensors) as shared:
        assert {name: array.dtype.name for name, array in shared.items()} == {
            "bf": "bfloat16",
            "fp": "float32",
            "flag": "bool",
        }
        assert shared["bf"].tolist() == ROWS.tolist()
    with pytest.raises(errors.InvalidArgumentError, match="detach"):
        shmacc.SharedArrays({"w": torch.nn.Linear(2, 2).weight})
