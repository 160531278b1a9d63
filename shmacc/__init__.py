"""Conditional accumulators for separate processes on one machine, without a server.

`SparseConditionalAccumulator` and `ConditionalAccumulator` are TensorFlow's. `AccumulatorGroup`
accumulates the gradients of a whole model; `Parameters` are updated from them. `attach` opens any
of these by name.

Modules: `errors`; `optim`, the optimizers of parameters; `init`, the initial rows of tables;
`raw_ops` and `sparse`, TensorFlow's other names; `inspection`, to look at segments from outside;
`testing`, for tests of programs that use shmacc; `torch`, `jax` and `ray`, for other packages.
"""

# From the ground up: `_base`, what a segment is made of; `_values`, which checks and converts a
# caller's data before any lock; ``_core`` (C++, shmacc/native), everything under the lock;
# `_segment`, how a process opens a segment and leaves it; `_accumulators` and `_parameters`, the
# objects that users hold. docs/architecture.md has the order of all folders and modules.

from shmacc import _child_errors, _lazy, _tree

_child_errors.watch(_tree.extension().note_parents_exception)

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    {"errors", "init", "inspection", "optim", "raw_ops", "sparse", "testing"},
    {
        "shmacc._accumulators.accumulator": ("NEVER_STALE",),
        "shmacc._parameters.checkpoints": ("load", "save"),
        "shmacc._accumulators.coroutines": ("AsyncRound", "AsyncSteps"),
        "shmacc._accumulators.dense": ("ConditionalAccumulator",),
        "shmacc._accumulators.group": ("AccumulatorGroup",),
        "shmacc._attach": ("attach",),
        "shmacc._accumulators.taken": (
            "DensePartial",
            "DenseTaken",
            "GroupPartial",
            "GroupTaken",
            "SparseGradient",
            "SparsePartial",
            "SparseTaken",
        ),
        "shmacc._values.slices": ("IndexedSlices",),
        "shmacc._parameters.parameters": ("Parameters",),
        "shmacc._parameters.shared_arrays": ("SharedArrays",),
        "shmacc._accumulators.sparse": ("SparseConditionalAccumulator",),
        "shmacc._parameters.table_spec": ("TableSpec",),
        "shmacc._parameters.tables": ("Table",),
        "shmacc._values.specs": ("IndexedSlicesSpec", "TensorSpec"),
        "shmacc._values.step_sampler": ("StepSampler",),
        "shmacc._accumulators.single": ("ConditionalAccumulatorBase",),
        "shmacc._segment.stats": ("Stats",),
        "shmacc._run.run": ("run",),
        "shmacc._accumulators.rounds": ("Round",),
        "shmacc._accumulators.steps": ("Steps",),
        "shmacc._version": ("__version__",),
    },
)
