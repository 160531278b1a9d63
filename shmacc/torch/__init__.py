"""Training a torch model in several processes that may die: replicas and their chief.

The chief has the optimizer; the replicas compute gradients. Parameters are in shared memory, where
the chief's optimizer updates them in place. The gradients of a model are one group. So an update
has each replica's gradient wholly or not at all, and only once.
"""

from shmacc.torch._block import Update
from shmacc.torch._clipping import clip_grad_norm_, clip_grad_value_
from shmacc.torch._optimizers import optimizer_of
from shmacc.torch._replica import Replica
from shmacc.torch._replicas import AsyncReplicas, SyncReplicas
from shmacc.torch._sampler import StepSampler
from shmacc.torch._tables import TableEmbedding
from shmacc.torch._viewer import Viewer

__all__ = [
    "AsyncReplicas", "Replica", "StepSampler", "SyncReplicas", "TableEmbedding", "Update", "Viewer",
    "clip_grad_norm_", "clip_grad_value_", "optimizer_of",
]  # fmt: skip
