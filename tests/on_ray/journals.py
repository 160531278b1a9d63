"""Workers as processes that do not use Ray, and the journals of what they applied.

Each gradient owns a row, so every round shows exactly which gradients are in it. A worker writes
each gradient down before it applies it, and the result after it. If it is killed in between, the
result is unknown.
"""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from on_ray.nodes import Nodes

import shmacc
import shmacc.ray

MEMBERS = {
    "rows": shmacc.IndexedSlicesSpec((None, 2), "float32"),
    "rest": shmacc.TensorSpec((5,), "float64"),
}


def many_members(number: int) -> dict[str, shmacc.TensorSpec | shmacc.IndexedSlicesSpec]:
    """Return `number` members; each gradient leaves out most of them."""
    spec = shmacc.TensorSpec((3,), "float32")
    return MEMBERS | {f"other {i}": spec for i in range(number - len(MEMBERS))}


_WORKER = """
import itertools, random, sys, time
import numpy as np
import shmacc
name, rank, life, others = sys.argv[1], *map(int, sys.argv[2:5])
log, params = open(sys.argv[5], "a", 1), None
if sys.argv[6:]:
    params = shmacc.Parameters.attach(sys.argv[6], timeout=60)
group = shmacc.attach(name, timeout=60)
assert "ray" not in sys.modules
step = group.global_step
for number in itertools.count():
    seen = None if params is None else params.step  # before the sleep, while `step` is new
    own = rank * 1_000_000 + life * 10_000 + number
    time.sleep(random.uniform(0, 0.03))
    print("apply", own, step, file=log)
    if params is not None:
        print("from", own, seen, file=log)
    gradient = {
        "rows": ([own, 10**9 + rank], np.ones((2, 2), np.float32)), "rest": np.full(5, rank + 1.0)
    }
    if others:
        gradient[f"other {own % others}"] = np.full(3, rank + 1.0)
    if group.apply(gradient, step, contributor=rank):
        print("accepted", own, step, file=log)
    while True:
        try:
            step = group.wait_step(step, timeout=600)
            break
        except shmacc.errors.ShmaccError:
            sys.exit(3)
"""


class Journals:
    """Workers of a group, the journals that they write, and the rounds that were taken.

    The group's owner is at `step`. The group has `others` members beyond MEMBERS; each gradient
    has one of these. If the group has parameters, named `copies`, workers write down from which
    update of the parameters they compute each gradient.
    """

    def __init__(
        self, nodes: Nodes, name: str, folder: Path, step: int, *, others: int = 0, copies: str = ""
    ) -> None:
        self.nodes, self.name, self.folder, self.others = nodes, name, folder, others
        self._copies = [copies] if copies else []
        self.begun = step  # the owner's step before any worker was started
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.lives: dict[int, int] = {}
        self.homes: dict[int, int] = {}
        self.consumed: dict[int, int] = {}

    def start(self, rank: int, node: int) -> None:
        self.lives[rank] = life = self.lives.get(rank, -1) + 1
        self.homes[rank] = node
        numbers = map(str, (rank, life, self.others))
        given = self.name, *numbers, str(self.folder / f"{rank}.log"), *self._copies
        self.workers[rank] = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, *given], env=self.nodes.environment(node)
        )

    def kill(self, rank: int) -> None:
        self.workers[rank].send_signal(signal.SIGKILL)
        self.workers[rank].wait()

    def end(self) -> None:
        for rank in self.workers:
            self.kill(rank)

    def log(self, what: str) -> dict[int, int]:
        """Return each gradient's step in lines of kind `what` ("from": its parameters' step)."""
        found: dict[int, int] = {}
        for path in self.folder.glob("*.log"):
            for line in path.read_text().splitlines():
                word, *numbers = line.split()
                if word == what and len(numbers) == 2:
                    found[int(numbers[0])] = int(numbers[1])
        return found

    def enter(self, taken: Any, required: int, copy: int | None = None) -> None:
        """Check a round against the journals: its gradients must come from the update `copy`."""
        rows = taken["rows"]
        own = rows.indices[rows.indices < 10**9]
        counts = rows.row_counts[rows.indices < 10**9]
        assert taken.count == len(own) >= required
        assert (counts == 1).all(), "doubled within the round"
        assert (rows.values == 1).all(), "a mean of ones"
        ranks = (own // 1_000_000).tolist()
        assert sorted(ranks) == taken.contributors.tolist(), "a contributor twice"
        shared = (rows.indices[rows.indices >= 10**9] - 10**9).tolist()
        assert shared == sorted(ranks), "torn: a gradient's rows are not all there"
        mean = sum(rank + 1.0 for rank in ranks) / len(ranks)
        assert (abs(taken["rest"].value - mean) < 1e-12).all(), "torn: the other member differs"
        self._hold_others(taken, own.tolist())
        applied, computed = self.log("apply"), self.log("from")
        for gradient in own.tolist():
            assert computed.get(gradient) == copy, "computed from other parameters"
            assert applied[gradient] == taken.step, "stale"
            assert gradient not in self.consumed, "doubled"
            self.consumed[gradient] = taken.step

    def _hold_others(self, taken: Any, own: list[int]) -> None:
        """Check against the journals those members that most gradients leave out."""
        of_member: dict[str, list[float]] = {}
        for gradient in own if self.others else ():
            name = f"other {gradient % self.others}"
            of_member.setdefault(name, []).append(gradient // 1_000_000 + 1.0)
        assert taken.keys() - MEMBERS.keys() == of_member.keys(), "torn: not the same members"
        for name, values in of_member.items():
            assert taken[name].count == len(values), "torn: another member's gradient is missing"
            mean = sum(values) / len(values)
            assert (abs(taken[name].value - mean) < 1e-5).all(), "torn: another member differs"

    def lost(self) -> list[int]:
        """Return the gradients of past steps that were accepted and are in no round.

        Steps before `begun` are left out: a host follows `advance_step` a moment later than the
        owner. If a worker starts in that moment, its first gradient is accepted at the old step and
        dropped with it. (The journals once had such a gradient. The core's tests make that moment
        long, and show that nothing else is lost.)
        """
        last = max(self.consumed.values(), default=-1)
        accepted = self.log("accepted").items()
        # If a contributor applies twice in a step, the second apply returns True and adds nothing.
        of_rank = {(own // 1_000_000, step) for own, step in self.consumed.items()}
        return [
            own
            for own, step in accepted
            if self.begun <= step <= last
            and own not in self.consumed
            and (own // 1_000_000, step) not in of_rank
        ]
