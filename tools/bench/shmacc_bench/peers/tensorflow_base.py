"""TensorFlow's own accumulators, in a graph and a compat.v1 Session with feeds.

The base of two peers that differ in where the session's server runs.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from shmacc_bench.peers.base import Peer, Reduced

# Before the import: its start-up talk is not a result. The Nones silence nothing that is an error.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

if TYPE_CHECKING:
    from shmacc_bench.workload import Gradient, Workload

NEVER_STALE = 2**63 - 1


class TensorFlowPeer(Peer):
    """Placeholders, the apply op and the take op of one accumulator, and the session to run them.

    The step that a gradient carries is a constant that is never stale: one feed less than a real
    training loop has.
    """

    blocks_in_take = True
    server_target = ""
    shared_name = ""
    opened = 0

    @abstractmethod
    def target(self) -> str:
        """Return the target of the session; starts the server if there has to be one."""

    def open(self, workload: Workload) -> None:
        """Build the graph and run it once, so that placing and optimising it is not timed."""
        self.server_target = self.target()
        self.workload = workload
        self.opened += 1
        self.shared_name = f"bench-{os.getpid()}-{self.opened}"
        self._build()

    def _build(self) -> None:
        compat = tf.compat.v1
        workload = self.workload
        graph = tf.Graph()
        with graph.as_default():
            dtype = tf.float32
            step = tf.constant(NEVER_STALE, tf.int64)
            if workload.kind == "dense":
                accumulator = compat.ConditionalAccumulator(
                    dtype, shape=workload.shape, shared_name=self.shared_name
                )
                self.values: Any = compat.placeholder(dtype, workload.shape)
                self.apply_op: Any = accumulator.apply_grad(self.values, step)
            else:
                accumulator = compat.SparseConditionalAccumulator(
                    dtype, shape=workload.shape, shared_name=self.shared_name
                )
                self.indices: Any = compat.placeholder(tf.int64, (None,))
                self.values = compat.placeholder(dtype, (None, workload.width))
                self.apply_op = accumulator.apply_grad(self.indices, self.values, local_step=step)
            self.required: Any = compat.placeholder(tf.int32, ())
            self.take_op: Any = accumulator.take_grad(self.required)
            self.count_op: Any = accumulator.num_accumulated()
        self.session: Any = compat.Session(self.server_target, graph=graph)
        self.session.run(self.count_op)

    def prepare(self, gradient: Gradient) -> dict[Any, Any]:
        """Return the feeds."""
        if self.workload.kind == "dense":
            return {self.values: gradient.values}
        return {self.indices: gradient.indices, self.values: gradient.values}

    def apply(self, prepared: dict[Any, Any]) -> None:
        """Run the apply op with the gradient fed."""
        self.session.run(self.apply_op, feed_dict=prepared)

    def take(self, num_required: int) -> Reduced:
        """Run the take op and fetch what it returns."""
        taken = self.session.run(self.take_op, feed_dict={self.required: num_required})
        if self.workload.kind == "dense":
            return Reduced(np.empty(0, np.int64), taken)
        return Reduced(taken[0], taken[1])

    def close(self) -> None:
        """Close the session; a local one's resources go with it."""
        self.session.close()

    def versions(self) -> dict[str, str]:
        """Return TensorFlow's version."""
        return {"tensorflow": tf.__version__}
