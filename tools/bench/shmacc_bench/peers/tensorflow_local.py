"""TensorFlow in one process: nothing is shared with anyone."""

from __future__ import annotations

from shmacc_bench.peers.tensorflow_base import TensorFlowPeer


class TensorFlowLocalPeer(TensorFlowPeer):
    """A plain local session."""

    how = "tf.compat.v1.Session in the same process, session.run with feeds, constant local_step"

    def target(self) -> str:
        """Return the local target."""
        return ""


PeerImplementation = TensorFlowLocalPeer
