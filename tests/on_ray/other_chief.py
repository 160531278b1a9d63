"""A chief in a process of its own, which can be stopped."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from helpers.support import stopped
from on_ray.nodes import Nodes

_PATIENCE = 180.0

_CHIEF = """
import os, sys
said = os.fdopen(os.dup(1), "w", 1)
os.dup2(2, 1)  # Ray prints what its nodes report
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray, shmacc.ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False)
for line in iter(sys.stdin.readline, ""):
    name, required = line.split()
    try:
        with (
            shmacc.ray.AccumulatorGroup.attach(name, timeout=60) as group,
            group.round(int(required), timeout=60) as taken,
        ):
            print("block", taken.step, *taken["rows"].indices.tolist(), file=said)
            sys.stdin.readline()
    except shmacc.errors.ShmaccError as error:
        print(type(error).__name__, error, file=said)
    else:
        print("consumed", file=said)
"""


class OtherChief:
    """A chief's process on the first node, which takes rounds when it is asked to."""

    def __init__(self, nodes: Nodes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHIEF, nodes.cluster.address, nodes.address(0)],
            env=nodes.environment(0),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def enter(self, name: str, required: int) -> tuple[int, set[int]]:
        """Let the other chief enter a round; return the round's step and gradients."""
        end = time.monotonic() + _PATIENCE
        while True:
            self._say(f"{name} {required}")
            said = self._hear()
            if said.startswith("block"):
                step, *rows = map(int, said.split()[1:])
                return step, {row for row in rows if row < 10**9}
            # The owner may have been lost, or the other chief may still have a long block.
            assert time.monotonic() < end, said
            time.sleep(0.5)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        with stopped(self._process.pid):
            yield

    def leave(self) -> str:
        """Let the other chief leave its block; return the result."""
        self._say("")
        return self._hear()

    def end(self) -> None:
        self._process.kill()
        with self._process:
            pass

    def _say(self, line: str) -> None:
        stdin: Any = self._process.stdin
        stdin.write(f"{line}\n")

    def _hear(self) -> str:
        stdout: Any = self._process.stdout
        line: str = stdout.readline()
        return line
