"""Conditional accumulators for separate processes on one machine, without a server.

Layout, from the ground up: `names`, `errors` and `dtypes` know words; `segment` brings a name to
its shared memory; ``_core`` (C++, shmacc/native) is what happens under the lock; `gradients` checks
what comes in, `records` is what goes out; `accumulator` is what the two kinds, `sparse` and
`dense`, have in common, and `lookup` finds one by name. `raw_ops`, `inspection` and `testing` are
built on these.
"""

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmacc import errors, inspection, raw_ops, sparse, testing
    from shmacc.accumulator import NEVER_STALE
    from shmacc.dense import ConditionalAccumulator
    from shmacc.lookup import attach
    from shmacc.records import IndexedSlices
    from shmacc.sparse import SparseConditionalAccumulator

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

# Imported when first asked for: a worker needs no inspection, and a tool that looks at segments no
# NumPy, and both are to start quickly.
_SUBMODULES = {"errors", "inspection", "raw_ops", "sparse", "testing"}
_HOMES = {
    "NEVER_STALE": "accumulator",
    "ConditionalAccumulator": "dense",
    "IndexedSlices": "records",
    "SparseConditionalAccumulator": "sparse",
    "attach": "lookup",
}


try:
    importlib.import_module("shmacc._core")
except ModuleNotFoundError as missing:
    _tree = __path__[0]
    if missing.name != "shmacc._core" or not _os.path.isdir(f"{_tree}/native"):
        raise
    # Usually shmacc is installed, too, but Python looks into the checkout first.
    raise ImportError(
        f"{_tree} is the source of shmacc, without the compiled extension. Python found it before "
        "any installed shmacc, because the folder that it is in comes first in sys.path: it is the "
        "current folder, or the script's. Either install the source itself: pip install -e "
        f"{_os.path.dirname(_tree)}; or start Python in another folder, or with the option -P."
    ) from None


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"shmacc.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"shmacc.{_HOMES[name]}"), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("shmacc")
    else:
        raise AttributeError(f"module 'shmacc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
