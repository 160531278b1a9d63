"""A group whose chief takes rounds in a thread, and checks each round against the journals."""

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from on_ray.journals import MEMBERS, Journals
from on_ray.nodes import Nodes

import shmacc
import shmacc.ray
from shmacc import GroupTaken
from shmacc.errors import CancelledError, FailedPreconditionError

PATIENCE = 180.0


CONTENTS = {"rows": shmacc.TableSpec((2,)), "rest": np.zeros(5)}


def parameters_of(name: str) -> shmacc.ray.Parameters:
    """Return parameters for MEMBERS, with a row for each gradient."""
    return shmacc.ray.Parameters(CONTENTS, f"{name}.params", optimizer=shmacc.optim.SGD(1.0))


def check_copies(journals: Journals, params: shmacc.ray.Parameters) -> None:
    """Check that the nodes' copies are equal, and have each gradient of the rounds once."""
    states = []
    for node in set(journals.homes.values()):
        with journals.nodes.on(node), shmacc.Parameters.attach(params.shared_name) as copy:
            states.append(copy.state())
    for state in states:
        for key, values in state.items():
            np.testing.assert_array_equal(values, states[0][key], err_msg=key)
    wanted = Counter(journals.consumed)
    for own in wanted:
        wanted[own] = 1
    wanted.update(10**9 + own // 1_000_000 for own in journals.consumed)
    found = dict(zip(states[0]["0.ids"].tolist(), states[0]["0.rows"].tolist(), strict=True))
    assert found == {row: [-count, -count] for row, count in wanted.items()}


class Training:
    """The group, its workers, and its chief.

    `homes` says which node each worker is on. A round needs `required` gradients, few enough that
    one node may be missing. If there are `params`, the chief updates them in each round's block.
    """

    def __init__(
        self,
        nodes: Nodes,
        name: str,
        members: Mapping[str, shmacc.TensorSpec],
        homes: Mapping[int, int],
        required: int,
        folder: Path,
        timing: shmacc.ray.Timing,
        params: shmacc.ray.Parameters | None = None,
    ) -> None:
        self.name, self.required, self._params = name, required, params
        self.happened = Counter[str]()
        self.group = shmacc.ray.AccumulatorGroup(members, name, timing=timing)
        folder.mkdir()
        others, copies = len(members) - len(MEMBERS), params.shared_name if params else ""
        given = nodes, name, folder, self.group.global_step
        self.journals = Journals(*given, others=others, copies=copies)
        for rank, node in homes.items():
            self.journals.start(rank, node)
        self.step = 0  # the highest step that the chief knows of
        self.closed = -1  # the step of its last round
        self.block = 0.0  # how many seconds its next block takes
        self.updates = threading.Event()  # set when an update begins
        self._in_doubt: tuple[GroupTaken, int, int] | None = None  # a round to be checked
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
        """Make a round; if the owner was lost, give the next owner a step."""
        number = self.required if required is None else required
        times, params = [time.monotonic()], self._params
        pause, self.block = self.block, 0.0
        try:
            if params is None:
                self.step = max(self.step, self.group.global_step)
            with self.group.round(number, timeout=PATIENCE) as taken:
                times.append(time.monotonic())
                if params is not None:
                    self._settle_doubt()
                    self._in_doubt = taken, number, params.step
                    self.updates.set()
                    params.update(taken)
                times.append(time.monotonic())
                time.sleep(pause)
        except FailedPreconditionError as error:
            self.happened["rounds ended"] += 1
            if "set_global_step" in str(error):
                # A step above any that the lost owner had, so that all workers' waits end.
                self.step += len(self.journals.homes)
                self.group.set_global_step(self.step)
        except CancelledError:
            self.happened["rounds ended"] += 1
        else:
            if params is None:
                self.journals.enter(taken, number)
            self.happened["rounds"] += 1
            self.happened["long blocks"] += pause > 0
            self.closed = taken.step
        times.append(time.monotonic() - pause)
        for name, (begin, end) in zip(self.longest, itertools.pairwise(times), strict=False):
            self.longest[name] = max(self.longest[name], end - begin)

    def _settle_doubt(self) -> None:
        """Check the last round if its update took effect, even after an error of the chief."""
        doubt, self._in_doubt = self._in_doubt, None
        if doubt is not None and self._params is not None and self._params.step > doubt[0].step:
            self.journals.enter(*doubt)

    def round_of_all(self) -> None:
        """Make a round of all workers; the first attempt may find that the owner was lost."""
        before = self.happened["rounds"]
        while self.happened["rounds"] == before:
            self.round(len(self.journals.homes))

    def settle(self, strikes: int) -> None:
        """Make rounds once all parts are back; compare all rounds with the journals."""
        self.round_of_all()
        self._settle_doubt()
        before = set(self.journals.lost())
        for _ in range(3):
            self.round(len(self.journals.homes))
        self._settle_doubt()
        if self._params is not None:
            check_copies(self.journals, self._params)
        longest = {name: round(seconds, 1) for name, seconds in self.longest.items()}
        sys.stdout.write(
            f"{self.name}: {dict(self.happened)}; {len(self.journals.consumed)} gradients, "
            f"{len(before)} lost; the longest times in a round: {longest} s\n"
        )
        assert set(self.journals.lost()) == before, "nothing went wrong, and a gradient is lost"
        # A strike costs at most the gradients of hosts that were lost or started again.
        assert len(before) <= len(self.journals.homes) * (strikes + self.happened["rounds ended"])

    def end(self) -> None:
        self._over.set()
        self.journals.end()
        self.group.unlink()
        if self._params is not None:
            self._params.unlink()
            self._params.close()
