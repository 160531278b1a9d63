"""What tests of training with torch share: children that have torch, a model, its contents."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import signal
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from shmacc import _core

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


def kill_myself(*_: Any) -> None:
    """Die, as by another's kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_update() -> None:
    """Die in the block."""
    kill_myself()


def after_the_update() -> None:
    """Die at the end of the block, before the round is consumed."""
    real = _core.update

    def update_and_die(*args: Any) -> Any:
        real(*args)
        kill_myself()

    _core.update = update_and_die  # type: ignore[assignment]


def in_the_update() -> None:
    """Die by the last array's new contents, which cannot be read: all others are changed then."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    real = _core.update

    def update_and_crash(*args: Any) -> Any:
        made = args[4]
        number, region, rate, rows, values, size = made[-1]
        nobodys = mmap.mmap(-1, mmap.PAGESIZE, prot=0)
        unreadable = np.frombuffer(nobodys, np.uint8)[: len(values)]
        made[-1] = (number, region, rate, rows, unreadable, size)
        return real(*args)

    _core.update = update_and_crash  # type: ignore[assignment]


# Where four chiefs die in one round, and what it knows of its update then.
PLACES: Final = (
    (before_the_update, None),
    (in_the_update, "begun"),
    (before_the_update, "begun"),
    (after_the_update, "in"),
)
