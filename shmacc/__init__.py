"""Conditional accumulators for separate processes on one machine, without a server.

`SparseConditionalAccumulator` and `ConditionalAccumulator` are TensorFlow's. `AccumulatorGroup`
accumulates the gradients of a whole model; `Parameters` are updated from them. `attach` opens any
of these by name.

Modules: `errors`; `optim`, the optimizers of parameters; `init`, the initial rows of tables;
`raw_ops` and `sparse`, TensorFlow's other names; `inspection`, to look at segments from outside;
`testing`, for tests of programs that use shmacc; `torch`, `jax` and `ray`, for other packages.
"""

# Layout, from the ground up. A folder imports only from the folders before it, and from `errors`:
# `_layout`, the names and the layout of segments; `_records`, what the API returns and accepts;
# ``_core`` (C++, shmacc/native), everything under the lock; `_gradients`, which checks and
# converts a caller's data before any lock; `_opening`, how a process opens a segment and leaves
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
        "shmacc._accumulators.single": ("ConditionalAccumulatorBase",),
        "shmacc._records.stats": ("Stats",),
        "shmacc._run": ("run",),
        "shmacc._accumulators.rounds": ("Round",),
        "shmacc._accumulators.steps": ("Steps",),
        "shmacc._version": ("__version__",),
    },
)
