"""A group whose chief takes rounds in a thread, survives every failure, and keeps the journals."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from on_ray.journals import MEMBERS, Journals

import shmacc
import shmacc.ray
from shmacc.errors import CancelledError, FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from on_ray.nodes import Nodes

PATIENCE = 180.0


class Parameters:
    """Published arrays that hold the step, and a worker's view of them on another node."""

    def __init__(self, nodes: Nodes, name: str) -> None:
        self._nodes, self._published = nodes, 0
        self._segment: shmacc.AccumulatorGroup | None = None
        self._arrays = shmacc.ray.PublishedArrays({"step": np.int64(0)}, name)
        with nodes.on(1):
            self._copy = shmacc.SharedArrays.attach(name, timeout=60)

    def follow(self, group: str) -> None:
        with self._nodes.on(1):
            self._segment = shmacc.AccumulatorGroup.attach(group, timeout=60)

    def hand_on(self, step: int) -> None:
        """Publish a step, in the block of the one before.

        A node that was lost may not have it yet; but then it must not be at that step.
        """
        # Steps that were set, after an owner's death, were not published.
        if self._segment is not None and self._segment.global_step == self._published == step - 1:
            assert self._copy["step"] == step - 1, "it is at a step without its arrays"
        self._arrays["step"][...] = step
        self._arrays.publish({"step": None}, timeout=PATIENCE)
        self._published = step

    def end(self) -> None:
        self._copy.close()
        if self._segment is not None:
            self._segment.close()
        self._arrays.unlink()
        self._arrays.close()


class Training:
    """The group, its workers, and its chief.

    `homes` says which node each worker is on. A round needs `required` gradients, so few that one
    node may be missing. In each round's block the chief publishes `parameters`.
    """

    def __init__(
        self,
        nodes: Nodes,
        name: str,
        members: Mapping[str, shmacc.TensorSpec | shmacc.IndexedSlicesSpec],
        homes: Mapping[int, int],
        required: int,
        folder: Path,
        timing: shmacc.ray.Timing,
        parameters: Parameters | None = None,
    ) -> None:
        self.name, self.required, self._parameters = name, required, parameters
        self.happened = Counter[str]()
        self.group = shmacc.ray.AccumulatorGroup(members, name, timing=timing)
        if parameters is not None:
            parameters.follow(name)
        folder.mkdir()
        others = len(members) - len(MEMBERS)
        self.journals = Journals(nodes, name, folder, self.group.global_step, others=others)
        for rank, node in homes.items():
            self.journals.start(rank, node)
        self.step = 0  # the highest that the chief knows of
        self.closed = -1  # the step that its last round has closed
        self.block = 0.0  # seconds that its next block is to take
        self.longest = dict.fromkeys(("wait", "block", "end"), 0.0)
        self._over, self._thread = threading.Event(), threading.Thread()
        self._failures: list[BaseException] = []

    def start(self) -> None:
        """Make rounds in a thread: Ray adds nodes in the main thread only."""
        self._over.clear()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Make no more rounds, and raise what failed."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for failure in self._failures:
            raise failure

    def _train(self) -> None:
        try:
            while not self._over.is_set():
                self.round()
        except BaseException as error:  # noqa: BLE001  the test's
            self._failures.append(error)

    def round(self, required: int | None = None) -> None:
        """Make a round; after a lost owner, start the thread again."""
        number = self.required if required is None else required
        times = [time.monotonic()]
        pause, self.block = self.block, 0.0
        try:
            self.step = max(self.step, self.group.global_step)
            with self.group.round(number, timeout=PATIENCE) as taken:
                times.append(time.monotonic())
                if self._parameters is not None:
                    self._parameters.hand_on(taken.step + 1)
                times.append(time.monotonic())
                time.sleep(pause)
        except FailedPreconditionError as error:
            self.happened["rounds ended"] += 1
            if "set_global_step" in str(error):
                # Higher than all that it may have been at: workers never wait for a lower one.
                self.step += len(self.journals.homes)
                self.group.set_global_step(self.step)
        except CancelledError:
            self.happened["rounds ended"] += 1
        else:
            self.journals.enter(taken, number)
            self.happened["rounds"] += 1
            self.happened["long blocks"] += pause > 0
            self.closed = taken.step
        times.append(time.monotonic() - pause)
        for name, (begin, end) in zip(self.longest, itertools.pairwise(times), strict=False):
            self.longest[name] = max(self.longest[name], end - begin)

    def round_of_all(self) -> None:
        """Make a round of all workers; the first attempt may find that the owner was lost."""
        before = self.happened["rounds"]
        while self.happened["rounds"] == before:
            self.round(len(self.journals.homes))

    def settle(self, strikes: int) -> None:
        """Make rounds with all parts back, and compare all rounds with the journals."""
        self.round_of_all()
        before = set(self.journals.lost())
        for _ in range(3):
            self.round(len(self.journals.homes))
        longest = {name: round(seconds, 1) for name, seconds in self.longest.items()}
        sys.stdout.write(
            f"{self.name}: {dict(self.happened)}; {len(self.journals.consumed)} gradients, "
            f"{len(before)} lost; the longest times in a round: {longest} s\n"
        )
        assert set(self.journals.lost()) == before, "nothing went wrong, and a gradient is lost"
        # Each time, at most those that were accepted on hosts which were lost or begun again.
        assert len(before) <= len(self.journals.homes) * (strikes + self.happened["rounds ended"])

    def end(self) -> None:
        self._over.set()
        self.journals.end()
        self.group.unlink()
        if self._parameters is not None:
            self._parameters.end()
