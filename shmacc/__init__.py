"""Conditional accumulators for separate processes on one machine, without a server.

Layout, from the ground up: `names`, `errors` and `dtypes` know words; `segment` brings a name to
its shared memory; ``_core`` (C++, shmacc/native) is what happens under the lock; `gradients` checks
what comes in, `records` is what goes out; `accumulator` is what the two kinds, `sparse` and
`dense`, have in common. `raw_ops`, `inspection` and `testing` are built on these.
"""

from importlib.metadata import version

from shmacc import errors, inspection, raw_ops, sparse, testing
from shmacc.accumulator import NEVER_STALE, attach
from shmacc.dense import ConditionalAccumulator
from shmacc.records import IndexedSlices
from shmacc.sparse import SparseConditionalAccumulator

__all__ = [
    "NEVER_STALE",
    "ConditionalAccumulator",
    "IndexedSlices",
    "SparseConditionalAccumulator",
    "__version__",
    "attach",
    "errors",
    "inspection",
    "raw_ops",
    "sparse",
    "testing",
]

__version__ = version("shmacc")
