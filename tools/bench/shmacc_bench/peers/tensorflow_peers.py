"""TensorFlow's own accumulators, in a graph and a compat.v1 Session with feeds."""

import os
from typing import Any

from shmacc_bench.peers import Peer, Taken
from shmacc_bench.processes import CONTEXT

# Set these before the import of TensorFlow, which would print messages otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from multiprocessing.connection import Connection

import tensorflow as tf

from shmacc_bench.workload import Gradient, Workload

NEVER_STALE = 2**63 - 1
_START = 90.0


class LocalPeer(Peer):
    """A session in the same process. The step is a constant, which saves TensorFlow a feed."""

    target = ""

    def open(self, workload: Workload) -> None:
        """Build the graph and run it once, so that placing and optimising it is not timed."""
        compat = tf.compat.v1
        graph = tf.Graph()
        with graph.as_default():
            step = tf.constant(NEVER_STALE, tf.int64)
            dense = workload.kind == "dense"
            kind = compat.ConditionalAccumulator if dense else compat.SparseConditionalAccumulator
            accumulator = kind(tf.float32, shape=workload.shape, shared_name=f"b{os.getpid()}")
            self.indices: Any = None if dense else compat.placeholder(tf.int64, (None,))
            shape = workload.shape if dense else (None, workload.width)
            self.values: Any = compat.placeholder(tf.float32, shape)
            given = (self.values,) if dense else (self.indices, self.values)
            self.apply_op: Any = accumulator.apply_grad(*given, local_step=step)
            self.required: Any = compat.placeholder(tf.int32, ())
            self.take_op: Any = accumulator.take_grad(self.required)
            count = accumulator.num_accumulated()
        self.session: Any = compat.Session(self.target, graph=graph)
        self.session.run(count)

    def prepare(self, gradient: Gradient) -> dict[Any, Any]:
        """Return the feeds."""
        feeds = {self.values: gradient.values}
        return feeds if gradient.indices is None else feeds | {self.indices: gradient.indices}

    def apply(self, prepared: dict[Any, Any]) -> None:
        """Run the apply op with the gradient fed."""
        self.session.run(self.apply_op, feed_dict=prepared)

    def take(self, num_required: int) -> Taken:
        """Run the take op and fetch what it returns."""
        taken = self.session.run(self.take_op, feed_dict={self.required: num_required})
        return (None, taken) if self.indices is None else (taken[0], taken[1])

    def close(self) -> None:
        """Close the session; this frees the resources of a local session."""
        self.session.close()


class ServerPeer(LocalPeer):
    """A session to a tf.distribute.Server in another process, which has the accumulator.

    It is the only way in which TensorFlow shares an accumulator between processes.
    """

    def __init__(self) -> None:
        receiver, sender = CONTEXT.Pipe(duplex=False)
        self.server = CONTEXT.Process(target=_serve, args=(sender,), daemon=True)
        self.server.start()
        if not receiver.poll(_START):
            raise TimeoutError("the TensorFlow server did not start")
        self.target = receiver.recv()

    def close(self) -> None:
        """Close the session, and let the server forget the accumulator."""
        super().close()
        tf.compat.v1.Session.reset(self.target)

    def shutdown(self) -> None:
        """Kill the server, which does not end by itself."""
        self.server.kill()
        self.server.join()


def _serve(started: Connection) -> None:
    server = tf.distribute.Server.create_local_server()
    started.send(server.target)
    server.join()
