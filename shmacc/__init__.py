"""Conditional accumulators for separate processes on one machine, without a server.

Layout, from the ground up: `names`, `errors` and `dtypes` know words; `segment` brings a name to
its shared memory; ``_core`` (C++, shmacc/native) is what happens under the lock; `gradients` checks
what comes in, `records` is what goes out; `accumulator` is what the two kinds, `sparse` and
`dense`, have in common, and `lookup` finds one by name. `raw_ops`, `inspection` and `testing` are
built on these.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shmacc import errors, raw_ops, sparse
from shmacc.accumulator import NEVER_STALE
from shmacc.dense import ConditionalAccumulator
from shmacc.lookup import attach
from shmacc.records import IndexedSlices
from shmacc.sparse import SparseConditionalAccumulator

if TYPE_CHECKING:
    from shmacc import inspection, testing

    __version__: str

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


def __getattr__(name: str) -> Any:
    # What a worker does not need is imported when first asked for: starting one is to be quick.
    if name in {"inspection", "testing"}:
        return importlib.import_module(f"shmacc.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("shmacc")
    raise AttributeError(f"module 'shmacc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
