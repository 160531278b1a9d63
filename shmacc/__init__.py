"""Conditional accumulators for separate processes on one machine, without a server.

`SparseConditionalAccumulator` and `ConditionalAccumulator` are TensorFlow's; `AccumulatorGroup` is
for the gradients of a model, `Parameters` for what is computed from them. `attach` opens by name.

Modules: `errors`; `optim`, the optimizers of parameters; `init`, what rows of tables have at first;
`raw_ops` and `sparse`, TensorFlow's other names; `inspection`, to look from outside; `testing`, for
tests of programs that use this; `torch`, `jax` and `ray`, for other packages.
"""

# Layout, from the ground up; a folder imports only from those before it, and from `errors`:
# `_layout`, what a segment is called and what stands in it; `_records`, what the API hands out and
# takes in; ``_core`` (C++, shmacc/native), everything under the lock; `_gradients`, a caller's
# data, checked and converted before any lock; `_opening`, how a process gets a segment and leaves
# it; `_accumulators`, the objects that users hold. `raw_ops`, `inspection`, `testing` and the
# modules for other packages are built on these.

from shmacc import _lazy, _tree  # noqa: F401  an import of the bare tree ends here
from shmacc._opening import children  # noqa: F401  before a child of multiprocessing begins

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    {"errors", "init", "inspection", "optim", "raw_ops", "sparse", "testing"},
    {
        "shmacc._accumulators.accumulator": ("NEVER_STALE",),
        "shmacc._accumulators.checkpoints": ("load", "save"),
        "shmacc._accumulators.coroutines": ("AsyncRound", "AsyncSteps"),
        "shmacc._accumulators.dense": ("ConditionalAccumulator",),
        "shmacc._accumulators.group": ("AccumulatorGroup",),
        "shmacc._accumulators.any_kind": ("attach",),
        "shmacc._records.taken": (
            "DensePartial",
            "DenseTaken",
            "GroupPartial",
            "GroupTaken",
            "IndexedSlices",
            "SparseGradient",
            "SparsePartial",
            "SparseTaken",
        ),
        "shmacc._accumulators.parameters": ("Parameters",),
        "shmacc._accumulators.shared_arrays": ("SharedArrays",),
        "shmacc._accumulators.sparse": ("SparseConditionalAccumulator",),
        "shmacc._accumulators.table_spec": ("TableSpec",),
        "shmacc._accumulators.tables": ("Table",),
        "shmacc._gradients.spec": ("IndexedSlicesSpec", "TensorSpec"),
        "shmacc._records.stats": ("Stats",),
        "shmacc._accumulators.rounds": ("Round",),
        "shmacc._accumulators.steps": ("Steps",),
        "shmacc._version": ("__version__",),
    },
)
