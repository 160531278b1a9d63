"""The process that one peer lives in: it does what the runner asks for, one request at a time.

A process for each peer, because two numerical libraries in one process share thread pools, heaps
and floating-point modes; and because a peer that crashes must not take the run with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import traceback
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from shmacc_bench.operations import Operation, Session
from shmacc_bench.peers import peer_class
from shmacc_bench.peers.base import Peer, UnsupportedError

if TYPE_CHECKING:
    from shmacc_bench.workload import Workload


class Worker:
    """The requests, one method each; what they return goes back to the runner."""

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.peer = peer
        self.session: Session | None = None
        self.scenario: Any = None

    def describe(self) -> dict[str, Any]:
        """Return how the peer is used, and its versions."""
        return {"how": self.peer.how, "versions": self.peer.versions()}

    def open(self, workload: Workload) -> str:
        """Open a workload and check the peer's answer; return what the check found."""
        self.session = Session(self.peer, workload)
        return self.session.check()

    def begin(self, operation: str) -> None:
        """Get ready for an operation."""
        self._session.begin(Operation(operation))
        gc.collect()

    def block(self, budget_ns: int, most: int) -> list[float]:
        """Run one block of the operation."""
        return self._session.block(budget_ns, most)

    def close(self) -> None:
        """Close the workload."""
        if self.session is not None:
            session, self.session = self.session, None
            session.close()

    def start(self, scenario: str, quick: bool) -> None:  # sent as positions
        """Set up a scenario, with the further processes that it needs."""
        module = importlib.import_module(f"shmacc_bench.scenarios.{scenario}")
        self.scenario = module.Scenario(self.name, self.peer, quick=quick)

    def step(self) -> dict[str, Any]:
        """Run one step of the scenario and return what it measured."""
        measured: dict[str, Any] = self.scenario.step()
        return measured

    def finish(self) -> None:
        """End the scenario."""
        if self.scenario is not None:
            scenario, self.scenario = self.scenario, None
            scenario.close()

    @property
    def _session(self) -> Session:
        if self.session is None:
            raise RuntimeError("no workload is open")
        return self.session


def answer(worker: Worker, connection: Connection) -> None:
    """Answer requests until the runner says stop or goes away."""
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "stop":
            return
        try:
            result = ("done", getattr(worker, name)(*arguments))
        except UnsupportedError as unsupported:
            result = ("unsupported", str(unsupported))
        except Exception:  # noqa: BLE001  # whatever a peer raises is a result, not our end
            result = ("failed", traceback.format_exc())
        connection.send(result)


def main(name: str, address: str) -> None:
    """Connect to the runner and serve it with the peer called `name`."""
    if name == "mpi" and _is_idle_rank():
        return
    with Client(address, family="AF_UNIX") as connection:
        try:
            peer = peer_class(name)()
        except Exception as error:  # noqa: BLE001  # a broken install is as missing as none
            connection.send(("missing", f"{type(error).__name__}: {error}"))
            return
        worker = Worker(name, peer)
        connection.send(("done", worker.describe()))
        try:
            answer(worker, connection)
        finally:
            for end in (worker.finish, worker.close, peer.shutdown):
                with contextlib.suppress(Exception):  # the runner may have gone already
                    end()


def _is_idle_rank() -> bool:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        return False
    from shmacc_bench.peers.mpi_idle import idle

    idle()
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
