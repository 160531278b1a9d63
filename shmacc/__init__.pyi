from shmacc import errors, init, inspection, optim, raw_ops, sparse, testing
from shmacc._accumulators.accumulator import NEVER_STALE
from shmacc._accumulators.coroutines import AsyncRound, AsyncSteps
from shmacc._accumulators.dense import ConditionalAccumulator
from shmacc._accumulators.group import AccumulatorGroup
from shmacc._accumulators.rounds import Round
from shmacc._accumulators.single import ConditionalAccumulatorBase
from shmacc._accumulators.sparse import SparseConditionalAccumulator
from shmacc._accumulators.steps import Steps
from shmacc._accumulators.taken import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    SparseGradient,
    SparsePartial,
    SparseTaken,
)
from shmacc._attach import attach
from shmacc._parameters.checkpoints import load, save
from shmacc._parameters.parameters import Parameters
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._parameters.table_spec import TableSpec
from shmacc._parameters.tables import Table
from shmacc._run.run import run
from shmacc._segment.stats import Stats
from shmacc._values.slices import IndexedSlices
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc._values.step_sampler import StepSampler

__all__ = [
    "NEVER_STALE", "AccumulatorGroup", "AsyncRound", "AsyncSteps", "ConditionalAccumulator",
    "ConditionalAccumulatorBase", "DensePartial", "DenseTaken", "GroupPartial", "GroupTaken",
    "IndexedSlices", "IndexedSlicesSpec", "Parameters", "Round", "SharedArrays",
    "SparseConditionalAccumulator", "SparseGradient", "SparsePartial", "SparseTaken", "Stats",
    "StepSampler", "Steps", "Table", "TableSpec", "TensorSpec", "__version__", "attach", "errors",
    "init", "inspection", "load", "optim", "raw_ops", "run", "save", "sparse", "testing",
]  # fmt: skip

__version__: str
