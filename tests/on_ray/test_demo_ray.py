"""The demo on a cluster of its own: as on one host, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "demo_ray.py"


def test_three_hosts_come_to_the_vectors_of_one(namespace: str) -> None:
    with subprocess.Popen(
        [sys.executable, str(DEMO), "--workers", "4", "--steps", "12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        output, _ = demo.communicate(timeout=200)
    assert demo.returncode == 0, output
    assert "those of one host, to the bit" in output
    assert "48 gradients in 12 rounds" in output
    left = [name for name in os.listdir("/dev/shm") if f"demo{demo.pid}" in name]  # noqa: PTH208, S108
    assert left == []
    assert not [name for name in os.listdir("/dev/shm") if namespace in name]  # noqa: PTH208, S108
