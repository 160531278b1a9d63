"""TensorFlow across processes: its shared_name is shared through a server, here one of our own."""

from __future__ import annotations

import multiprocessing
import socket
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from shmacc_bench.peers.tensorflow_base import TensorFlowPeer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from shmacc_bench.workload import Workload

START_TIMEOUT = 90.0  # importing TensorFlow on a loaded machine


def free_port() -> int:
    """Return a port that was free a moment ago; the server fails loudly if it no longer is."""
    with socket.create_server(("localhost", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def serve(port: int, started: Connection) -> None:
    """Run the server until the process is ended."""
    cluster = tf.train.ClusterSpec({"ps": [f"localhost:{port}"]})
    server = tf.distribute.Server(cluster, job_name="ps", task_index=0)
    started.send(server.target)
    server.join()


class TensorFlowServerPeer(TensorFlowPeer):
    """A session to a tf.distribute.Server in another process, which holds the accumulator."""

    how = (
        "tf.distribute.Server in a process of its own on this machine; tf.compat.v1.Session(target)"
        ", session.run with feeds, constant local_step"
    )

    def __init__(self) -> None:
        self.server: Any = None

    def target(self) -> str:
        """Start the server once and return its target."""
        if self.server is None:
            context = multiprocessing.get_context("spawn")
            receiver, sender = context.Pipe(duplex=False)
            self.server = context.Process(target=serve, args=(free_port(), sender), daemon=True)
            self.server.start()
            if not receiver.poll(START_TIMEOUT):
                raise TimeoutError("the TensorFlow server did not start")
            self.server_target = receiver.recv()
        return self.server_target

    def close(self) -> None:
        """Close the session and make the server forget the accumulator."""
        super().close()
        tf.compat.v1.Session.reset(self.server_target)

    def shutdown(self) -> None:
        """End the server's process."""
        if self.server is not None:
            self.server.kill()  # it has no other end: join() never returns
            self.server.join()

    def ticket(self) -> tuple[str, str, Workload]:
        """Return where the server is, and the accumulator's name and shape."""
        return self.server_target, self.shared_name, self.workload

    @classmethod
    def join(cls, ticket: tuple[str, str, Workload]) -> TensorFlowServerPeer:
        """Open another session to the same server, and the same accumulator by its name."""
        peer = cls()
        peer.server_target, peer.shared_name, peer.workload = ticket
        peer._build()  # a classmethod is inside its class
        return peer


PeerImplementation = TensorFlowServerPeer
