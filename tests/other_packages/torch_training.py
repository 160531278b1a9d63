"""Children with torch, a model, a chief and a replica, for the tests of training."""

import contextlib
import mmap
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from helpers.apart import call
from helpers.support import LONG
from torch import nn

from shmacc import _core, errors
from shmacc.torch import Replica, SyncReplicas

NAME: Final = "replicas"

# This server's children have torch, whose import takes seconds. They are not forks of a process
# that has used torch.
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "shmacc.torch", "helpers.apart"])


def start_server() -> None:
    """Start the forkserver once, from a directory without the source tree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("/")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        forkserver.ensure_running()


def within(namespace: str, function: Callable[..., Any], *args: Any, pipe: Any) -> Any:
    """Call the function in a child of a forkserver that has another namespace."""
    os.environ["SHMACC_NAMESPACE"] = namespace
    torch.set_num_threads(1)
    return call(function, args, pipe)


def one_layer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(2, 1)


class Words(nn.Module):
    """Rows by number, a dense layer, statistics."""

    def __init__(self, seed: int = 7, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.Embedding(20, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, words: torch.Tensor) -> Any:
        return self.norm(self.layer(self.rows(words)))


class Mixed(Words):
    """Words, a frozen bfloat16 parameter, an unused layer, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False]))


def backward(model: nn.Module, step: int, rank: int = 0) -> None:
    """Compute the gradients of a model of words for the batch of this step and rank."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(0, 20, (8,), generator=random)
    nn.functional.cross_entropy(model(words), words % 2).backward()


@contextlib.contextmanager
def pair(
    model: nn.Module, other: nn.Module, kind: Any = SyncReplicas, total: int = 1, **options: Any
) -> Iterator[tuple[Any, Replica]]:
    """Make a chief and its first replica, both in this process."""
    with (
        kind(model, NAME, total_num_replicas=total, **options) as replicas,
        Replica(other, NAME, 0, timeout=0.01) as replica,
    ):
        yield replicas, replica


def hand_over(replica: Replica) -> None:
    """Apply the pending gradient, and do not wait for the update."""
    with contextlib.suppress(errors.DeadlineExceededError):
        replica.step()


@contextlib.contextmanager
def in_a_round(replicas: Any, replica: Replica, **options: Any) -> Iterator[Any]:
    """Make a round of the pending gradient around the block; the replica then gets the update."""
    hand_over(replica)
    with replicas.round(timeout=LONG, **options) as update:
        yield update
    if isinstance(replicas, SyncReplicas):
        assert replica.step()


def make_round(replicas: Any, replica: Replica, **options: Any) -> Any:
    """Make a round of the pending gradient; return the update."""
    with in_a_round(replicas, replica, **options) as update:
        return update


def contents(model: nn.Module) -> dict[str, Any]:
    """Return copies of the model's parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two contents, to the bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def kill_myself(*_: Any) -> None:
    """Die, as by another process's kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def after_the_update() -> None:
    """Die at the end of the block, before the round is consumed."""
    real = _core.update

    def update_and_die(*args: Any) -> Any:
        real(*args)
        kill_myself()

    _core.update = update_and_die  # type: ignore[assignment]


def in_the_update() -> None:
    """Die in an update after all arrays but the last, whose new contents cannot be read."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    real = _core.update

    def update_and_crash(*args: Any) -> Any:
        made = args[4]
        values = made[-1].values
        is_array = isinstance(values, list)  # by region; a table has rows
        nobodys = mmap.mmap(-1, mmap.PAGESIZE, prot=0)
        unreadable = np.frombuffer(nobodys, np.uint8)[: len(values[0] if is_array else values)]
        made[-1] = made[-1]._replace(values=[unreadable] if is_array else unreadable)
        return real(*args)

    _core.update = update_and_crash  # type: ignore[assignment]


# Where four chiefs die in one round, and the state of the round's update after each death.
PLACES: Final = (
    (kill_myself, None), (in_the_update, "begun"), (kill_myself, "begun"), (after_the_update, "in"),
)  # fmt: skip
