"""How long `shmacc-inspect list` takes with many segments."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shmacc
from shmacc_bench.samples import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmacc_bench.peers.base import Peer

SEGMENTS = 500
PREFIX = f"bench.{os.getpid()}.list."
COMMAND = (str(Path(sys.executable).parent / "shmacc-inspect"), "list")


class Scenario:
    """The segments are there in a peer's own steps only: its command reads no others."""

    def __init__(self, name: str, peer: Peer, *, quick: bool) -> None:
        del name, peer, quick  # it is of versions of shmacc, as they are

    def step(self) -> dict[str, Any]:
        """Return the milliseconds."""
        made = [
            shmacc.SparseConditionalAccumulator("float32", (100, 64), f"{PREFIX}{number}")
            for number in range(SEGMENTS)
        ]
        try:
            for acc in made:
                acc.apply_grad(np.arange(10), np.ones((10, 64), np.float32))
            begun = time.perf_counter()
            listed = subprocess.run(COMMAND, check=True, capture_output=True, text=True).stdout
            taken = (time.perf_counter() - begun) * 1000
        finally:
            for acc in made:
                acc.unlink()
                acc.close()
        if listed.count(PREFIX) < SEGMENTS:
            raise RuntimeError(f"only {listed.count(PREFIX)} segments were listed")
        return {"list_ms": taken}

    def close(self) -> None:
        """Nothing is left open."""


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the distribution, and the steps that are paired with the other version's."""
    times = [step["list_ms"] for step in steps]
    return {"list_ms": summarise(times), "steps": times}
