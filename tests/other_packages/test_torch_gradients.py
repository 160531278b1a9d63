"""Every apply takes torch's gradients without a copy, and results become tensors again."""

from typing import Any, Final

import numpy as np
import pytest
import torch
from helpers.support import refused, same_bits

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, TensorSpec, errors, optim
from shmacc._values import arrays, dtypes, foreign

ROWS: Final = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
DTYPES: Final = [
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "complex64", "complex128",
]  # fmt: skip


def embedding_gradient(*, coalesced: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a gradient of ``nn.Embedding(sparse=True)``: a 1 in row 5, two in row 2."""
    layer = torch.nn.Embedding(9, 2, sparse=True, dtype=dtype)
    layer(torch.tensor([5, 2, 2])).sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.is_coalesced()
    return layer.weight.grad.coalesce() if coalesced else layer.weight.grad


def apply_by_all(
    value: Any, dtype: Any, *, sparse: bool, words: str | None = None
) -> tuple[Any, Any]:
    """Apply a gradient to an accumulator and a group; return both takes, or expect refusals."""
    acc: Any = (
        shmacc.SparseConditionalAccumulator(dtype, (9, 2))
        if sparse
        else shmacc.ConditionalAccumulator(dtype)
    )
    spec = shmacc.IndexedSlicesSpec((9, 2), dtype) if sparse else shmacc.TensorSpec(None, dtype)
    with acc, shmacc.AccumulatorGroup({"w": spec}) as group:
        calls = (
            lambda: (acc.apply_indexed_slices_grad if sparse else acc.apply_grad)(value),
            lambda: group.apply({"w": value}, 0),
        )
        for call in calls:
            if words is None:
                assert call()
            else:
                with pytest.raises(errors.InvalidArgumentError, match=words):
                    call()
        if words is not None:
            assert acc.num_accumulated() == group.num_accumulated() == 0
            return None, None
        return acc.take(1), group.take(1)["w"]


def dense(value: Any, dtype: Any) -> Any:
    first, second = apply_by_all(value, dtype, sparse=False)
    same_bits(first.value, second.value)
    return first


def sparse(value: Any, dtype: Any = "float32") -> Any:
    first, second = apply_by_all(value, dtype, sparse=True)
    same_bits(first.indices, second.indices)
    same_bits(first.values, second.values)
    return first


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_is_accepted_and_returned(name: str) -> None:
    dtype = getattr(torch, name)
    assert dtypes.resolve(dtype).name == shmacc.TensorSpec((), dtype).dtype.name == name
    given = ROWS.to(dtype)
    taken = dense(given, dtype)
    assert taken.value.dtype.name == name
    back = taken.to_torch()
    assert back.dtype == dtype
    assert torch.equal(back.to(torch.complex128), given.to(torch.complex128))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_of_torch_are_refused(dtype: torch.dtype) -> None:
    with refused():
        shmacc.ConditionalAccumulator(dtype)


@pytest.mark.parametrize(
    ("dtype", "coalesced"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_an_embeddings_gradient_returns_as_a_tensor(dtype: torch.dtype, *, coalesced: bool) -> None:
    gradient = embedding_gradient(coalesced=coalesced, dtype=dtype)
    taken = sparse(gradient, dtype)
    assert taken.indices.tolist() == [2, 5]
    assert taken.values.tolist() == [[2, 2], [1, 1]]
    back = taken.to_torch()
    assert back.is_coalesced()
    assert back.dtype == dtype
    assert torch.equal(back.to_dense(), gradient.to_dense())


@pytest.mark.parametrize("convert", [
    lambda whole: whole.to_sparse(), lambda whole: whole.to_sparse(1),
    lambda whole: whole.to_sparse_csr(), lambda whole: whole.to_sparse_csc(),
], ids=["coo", "coo of rows", "csr", "csc"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse")  # in beta, says torch
def test_sparse_tensors_may_have_any_layout(convert: Any) -> None:
    whole = torch.zeros(9, 2)
    whole[4, 1] = 3
    whole[7] = 5
    taken = sparse(convert(whole))
    assert taken.indices.tolist() == [4, 7]
    assert taken.values.tolist() == [[0, 3], [5, 5]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.tensor(3.0).to_sparse(), "is a scalar"),
        (lambda: torch.ones(9, 2, 1).to_sparse(1), r"expected .*rank 2, got 3"),
        (lambda: torch.zeros(8, 2).to_sparse(1), "shape"),
        (lambda: embedding_gradient(coalesced=True).requires_grad_(), r"tensor.detach\(\)"),
        (lambda: embedding_gradient(coalesced=True).to_dense(), "sparse=True"),
        (lambda: embedding_gradient(coalesced=True).to("meta"), "meta"),
        (
            lambda: torch.sparse_coo_tensor(
                torch.empty((0, 1), dtype=torch.int64),
                torch.ones(1, 9, 2),
                (9, 2),
                check_invariants=True,
            ),
            r"in its rows.*\.to_dense",
        ),
        (
            lambda: torch.sparse_coo_tensor(
                torch.tensor([[1], [7]]), torch.ones(1), (9, 2), check_invariants=False
            ),
            "index 7 is out of bounds",
        ),
    ],
)
def test_refusals_of_sparse_gradients_name_the_remedy(make: Any, words: str) -> None:
    apply_by_all(make(), "float32", sparse=True, words=words)


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on an accelerator."""

    device = torch.device("cuda:1")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.requires_grad_(), r"tensor.detach\(\)"),
        (torch.nn.Parameter, "`.grad`"),
        (lambda t: t.to_sparse(), r"\.to_dense\(\)"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"\.dequantize\(\)"),
        (lambda t: t.to("meta"), "meta"),
        (lambda t: t.to(torch.float8_e4m3fn), "Float8"),
        (lambda t: t.as_subclass(Elsewhere), r"'cuda:1': pass `tensor.cpu\(\)`"),
        (lambda t: torch.masked.masked_tensor(t, t > 2), r"masked\.to_tensor\(0\)"),
    ],
    ids=[
        "requires-grad",
        "parameter",
        "sparse",
        "quantised",
        "meta",
        "float8",
        "accelerator",
        "masked",
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*(quantiz|prototype):UserWarning")
def test_refusals_of_dense_gradients_name_the_remedy(spoil: Any, words: str) -> None:
    apply_by_all(spoil(ROWS.clone()), "float32", sparse=False, words=words)


def test_an_embeddings_rows_are_read_in_place() -> None:
    gradient = embedding_gradient(coalesced=False)
    slices = foreign.slices(gradient)
    index = arrays.index_array(slices.indices, "indices")
    values = arrays.values_array(slices.values, dtypes.resolve("float32"), "values")
    assert index.ctypes.data == gradient._indices().data_ptr()
    assert values.ctypes.data == gradient._values().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_become_tensors_without_a_copy(dtype: torch.dtype) -> None:
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


def test_conjugate_and_negative_views_are_read_correctly() -> None:
    complex_rows = torch.complex(ROWS, ROWS)
    assert dense(ROWS.t(), "float32").value.tolist() == ROWS.t().tolist()
    assert dense(complex_rows.conj(), "complex64").value.tolist() == complex_rows.conj().tolist()
    assert dense(complex_rows.conj().imag, "float32").value.tolist() == (-ROWS).tolist()
    assert dense(ROWS.to(torch.bfloat16).t(), torch.bfloat16).to_torch().tolist() == (
        ROWS.t().tolist()
    )


def test_a_result_with_an_unknown_number_of_rows_is_no_tensor() -> None:
    with shmacc.SparseConditionalAccumulator("float32") as acc:
        acc.apply_grad([1], [[1.0]])
        taken = acc.take(1)
    for convert in (taken.to_torch, taken.to_jax, taken.to_scipy):
        with pytest.raises(errors.FailedPreconditionError, match="declare it in the shape"):
            convert()


def test_a_partial_becomes_a_tensor_of_undivided_sums() -> None:
    with shmacc.ConditionalAccumulator(torch.bfloat16, (3, 2)) as acc:
        for _ in range(2):
            acc.apply_grad(ROWS.to(torch.bfloat16))
        sums = acc.take_partial(2).to_torch()
    assert sums.dtype == torch.float32
    assert torch.equal(sums, 2 * ROWS)


def test_shared_arrays_can_be_made_of_tensors() -> None:
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


@pytest.mark.parametrize("coalesced", [False, True])
def test_an_update_takes_the_same_tensors_as_an_apply(*, coalesced: bool) -> None:
    gradient = embedding_gradient(coalesced=coalesced)
    contents: dict[str, Any] = {"emb": np.zeros((9, 2), np.float32), "user": TableSpec((2,))}
    contents["layer"] = np.zeros((3, 2), np.float32)
    with (
        Parameters(contents, optimizer=optim.SGD(1.0)) as params,
        AccumulatorGroup({"loss": TensorSpec(())}) as group,
    ):
        group.apply({"loss": torch.tensor(1.0)}, 0)
        with group.round(1):
            given = {"emb": gradient, "user": gradient, "layer": ROWS}
            assert params.update({}, gradients=given)
        whole = -gradient.to_dense().numpy()
        assert np.array_equal(params["emb"], whole)
        assert params["user"].ids().tolist() == [2, 5]
        assert np.array_equal(params["user"][np.arange(9)], whole)
        assert np.array_equal(params["layer"], -ROWS.numpy())
