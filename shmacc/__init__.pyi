from shmacc import errors, inspection, raw_ops, sparse, testing
from shmacc._accumulator import NEVER_STALE
from shmacc._async import AsyncRound
from shmacc._dense import ConditionalAccumulator
from shmacc._group import AccumulatorGroup
from shmacc._lookup import attach
from shmacc._records import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    IndexedSlices,
    SparseGradient,
    SparsePartial,
    SparseTaken,
)
from shmacc._shared_arrays import SharedArrays
from shmacc._sparse import SparseConditionalAccumulator
from shmacc._spec import IndexedSlicesSpec, TensorSpec
from shmacc._stats import Stats
from shmacc._taking import Round

__all__ = [
    "NEVER_STALE",
    "AccumulatorGroup",
    "AsyncRound",
    "ConditionalAccumulator",
    "DensePartial",
    "DenseTaken",
    "GroupPartial",
    "GroupTaken",
    "IndexedSlices",
    "IndexedSlicesSpec",
    "Round",
    "SharedArrays",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "SparsePartial",
    "SparseTaken",
    "Stats",
    "TensorSpec",
    "__version__",
    "attach",
    "errors",
    "inspection",
    "raw_ops",
    "sparse",
    "testing",
]

__version__: str
