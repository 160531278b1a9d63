"""A network that delays and loses packets, and links that are cut, cost time and no gradient."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from on_ray.wires import as_root, why_not

PROGRAM = Path(__file__).with_name("lossy_cluster.py")
REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_rounds_are_sound_and_go_on_with_delay_and_loss_between_nodes() -> None:
    made = subprocess.run(
        [*as_root(), sys.executable, "-P", PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-5000:] + made.stderr[-5000:]
    [line] = [line for line in made.stdout.splitlines() if line.startswith('{"seconds"')]
    figures = json.loads(line)
    carried, lost = figures["packets, lost"]
    assert carried > 1000
    assert lost > 0
    assert figures["counters"]["lost_hosts"] >= 1
    # The death of a node's actor right after its batch became a member may cost what came then.
    assert figures["lost to hosts' actors"] <= 6
    # The hosts' last gradients: as if never applied; and those of a step that was void for it.
    assert figures["lost to links"] <= 6
    assert figures["lost to nodes"] <= 4
