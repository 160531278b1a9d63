"""torch with one thread: its notes on multiprocessing advise it when processes share cores."""

from __future__ import annotations

from shmacc_bench.peers.torch_shared import TorchSharedPeer


class TorchOneThreadPeer(TorchSharedPeer):
    """As the other torch peer, with `torch.set_num_threads(1)`."""

    how = f"torch.set_num_threads(1), otherwise: {TorchSharedPeer.how}"
    threads = 1


PeerImplementation = TorchOneThreadPeer
