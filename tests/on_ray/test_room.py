"""A worker that never waits does not take the memory that Ray's object store needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.apart import needs_own_shm

HERE = Path(__file__).parent


@needs_own_shm
def test_a_worker_that_never_waits_leaves_room_for_rays_objects() -> None:
    """Without that its node is lost: a bus error ends the process that writes an object."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, HERE / "room_scene.py"],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
