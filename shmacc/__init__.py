"""Conditional accumulators for separate processes on one machine, without a server.

Layout, from the ground up: `_names`, `errors` and `_dtypes` define names, error classes and dtypes;
``_core`` (C++, shmacc/native) does everything under the lock, and is the one place that opens
segments' files; `_segment` opens and creates segments by name; `_gradients` checks gradients,
`_records` defines results, and `_results` makes them; `_accumulator` is the common base of all
kinds, `_single` that of `_sparse` and `_dense`, `_group` has many tensors, `_shared_arrays` is for
parameters, and `_lookup` finds one of all these by name. `raw_ops`, `inspection` and `testing` are
built on these.
"""

from shmacc import _lazy, _tree  # noqa: F401  an import of the bare tree ends here

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    {"errors", "inspection", "raw_ops", "sparse", "testing"},
    {
        "shmacc._accumulator": ("NEVER_STALE",),
        "shmacc._async": ("AsyncRound",),
        "shmacc._dense": ("ConditionalAccumulator",),
        "shmacc._group": ("AccumulatorGroup",),
        "shmacc._lookup": ("attach",),
        "shmacc._records": (
            "DensePartial",
            "DenseTaken",
            "GroupPartial",
            "GroupTaken",
            "IndexedSlices",
            "SparseGradient",
            "SparsePartial",
            "SparseTaken",
        ),
        "shmacc._shared_arrays": ("SharedArrays",),
        "shmacc._sparse": ("SparseConditionalAccumulator",),
        "shmacc._spec": ("IndexedSlicesSpec", "TensorSpec"),
        "shmacc._stats": ("Stats",),
        "shmacc._taking": ("Round",),
        "shmacc._version": ("__version__",),
    },
)
