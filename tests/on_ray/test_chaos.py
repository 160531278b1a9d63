"""Parts of a cluster fail one after the other; rounds go on, and no gradient is lost or doubled.

pytest runs one failure of each kind. `make soak-ray` then goes on at random for SOAK_SECONDS, on a
cluster of its own, whose links can be cut and whose head can be restarted.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_ray.chaos import Chaos
from on_ray.nodes import Nodes
from on_ray.wires import as_root, why_not

SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
PROGRAM = Path(__file__).with_name("soak_cluster.py")


@pytest.fixture(scope="module")
def chaos(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with nodes.on(0):
        made = Chaos(nodes, tmp_path_factory.mktemp("chaos"))
        try:
            yield made
        finally:
            made.end()


def test_rounds_go_on_after_each_kind_of_failure(chaos: Chaos) -> None:
    chaos.run()


def test_a_chief_that_is_stopped_in_its_block_loses_its_round(chaos: Chaos) -> None:
    training = chaos.many
    training.round_of_all()
    before = training.journals.lost()
    step, gradients = chaos.chief.enter(training.name, training.required)
    with chaos.chief.stopped():
        training.round()
        same = {own for own, closed in training.journals.consumed.items() if closed == step}
        assert gradients <= same, "the same gradients, or more"
    assert "ended before its block" in chaos.chief.leave()
    training.round()
    assert training.group.global_step == training.closed + 1 == step + 2
    assert training.journals.lost() == before


@pytest.mark.skipif(SECONDS == 0, reason="takes SOAK_SECONDS: `make soak-ray`")
def test_soak() -> None:
    """Rounds go on through random failures for SOAK_SECONDS."""
    links = [] if (reason := why_not()) else as_root()
    made = subprocess.run(
        [*links, sys.executable, "-P", PROGRAM, str(SECONDS), reason or ""], check=False
    )
    assert made.returncode == 0
