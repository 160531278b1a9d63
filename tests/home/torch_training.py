"""What tests of training with torch share: children that have torch, a model, its contents."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

# Children of a server that has torch already, which takes seconds to import; and no forks of a
# process that has used it.
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "shmacc.torch", "helpers.support"])


def within(namespace: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, in a child of a server that has another namespace."""
    os.environ["SHMACC_NAMESPACE"] = namespace
    torch.set_num_threads(1)
    return function(*args)


class Words(nn.Module):
    """Rows by number, a dense layer, statistics."""

    def __init__(self, seed: int = 7, *, sparse: bool = True) -> None:
        """Make it, always the same for a seed."""
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.Embedding(20, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, words: torch.Tensor) -> Any:
        """Return logits."""
        return self.norm(self.layer(self.rows(words)))


def contents(model: nn.Module) -> dict[str, Any]:
    """Return copies of the model's parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Hold two contents to be the same to the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
