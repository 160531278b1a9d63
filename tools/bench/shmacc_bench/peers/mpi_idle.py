"""The MPI ranks that make a window a shared one, and otherwise sleep."""

from __future__ import annotations

import time
from typing import Any

from mpi4py import MPI

POLL_SECONDS = 0.02  # MPI's own waiting would burn the core that the measured rank needs


def tell_idlers(order: tuple[Any, ...]) -> None:
    """Send an order to every rank but this one (0)."""
    for rank in range(1, MPI.COMM_WORLD.size):
        MPI.COMM_WORLD.send(order, dest=rank)


def idle() -> None:
    """Follow rank 0's orders until it says stop: the whole life of the other ranks."""
    comm = MPI.COMM_WORLD
    windows: list[MPI.Win] = []
    while True:
        while not comm.iprobe(source=0):
            time.sleep(POLL_SECONDS)
        order = comm.recv(source=0)
        if order[0] == "open":
            windows = [MPI.Win.Allocate_shared(0, 1, comm=comm) for _ in range(order[1])]
        elif order[0] == "close":
            for window in windows:
                window.Free()
        else:
            return
