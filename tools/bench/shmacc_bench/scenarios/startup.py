"""Time and memory of the import, of creating and of attaching."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from shmacc_bench.machine import resident_bytes
from shmacc_bench.peers.base import Peer, UnsupportedError
from shmacc_bench.samples import summarise
from shmacc_bench.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# What the peer is used by: a module may put its work off until it is asked for that.
USED: Mapping[str, str] = {
    "shmacc": "shmacc.SparseConditionalAccumulator",
    "torch": "torch.Tensor",
}
IMPORTS = {"shmacc": 15}
FEW_IMPORTS = 3
WORKLOAD = Workload("sparse", 1_000, 64)
HANDLES = 30

IMPORT_SCRIPT = """
import importlib, json, sys, time
import numpy
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
memory = resident()
begun = time.perf_counter()
module, name = sys.argv[1].rsplit(".", 1)
getattr(importlib.import_module(module), name)
print(json.dumps([(time.perf_counter() - begun) * 1000, (resident() - memory) / 2**20]))
"""


class Scenario:
    """Imports in processes of their own; creates and attaches here."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        """Refuse the peers that import the same as another."""
        if name not in USED:
            raise UnsupportedError("imports what another peer imports")
        self.name = name
        self.peer = peer
        self.imports = FEW_IMPORTS if quick else IMPORTS.get(name, FEW_IMPORTS)

    def step(self) -> dict[str, Any]:
        """Return milliseconds and MiB that the import adds to NumPy's; for shmacc the rest too."""
        imports = [_import(USED[self.name]) for _ in range(self.imports + 1)][1:]
        measured: dict[str, Any] = {
            "import_ms": [milliseconds for milliseconds, _ in imports],
            "import_mib": [mebibytes for _, mebibytes in imports],
        }
        if self.name == "shmacc":
            measured |= self._handles()
        return measured

    def _handles(self) -> dict[str, Any]:
        create = []
        peer_type = type(self.peer)
        for _ in range(HANDLES):
            create.append(_timed(lambda: self.peer.open(WORKLOAD)))
            self.peer.close()
        self.peer.open(WORKLOAD)
        ticket = self.peer.ticket()
        joined: list[Peer] = []
        memory = resident_bytes()
        attach = [_timed(lambda: joined.append(peer_type.join(ticket))) for _ in range(HANDLES)]
        each = (resident_bytes() - memory) / HANDLES / 1024
        for peer in joined:
            peer.close()
        self.peer.close()
        return {"create_us": create, "attach_us": attach, "attach_kib": each}

    def close(self) -> None:
        """Nothing is left open."""


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1000


def _import(used: str) -> tuple[float, float]:
    process = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_SCRIPT, used], check=True, capture_output=True
    )
    milliseconds, mebibytes = json.loads(process.stdout.splitlines()[-1])
    return milliseconds, mebibytes


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distributions, and the memory of one handle."""
    found: dict[str, Any] = {}
    for key in steps[0]:
        value = steps[0][key]
        found[key] = summarise(value) if isinstance(value, list) else value
    return found
