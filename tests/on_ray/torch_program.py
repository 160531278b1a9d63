"""A torch program that trains on one host or over several; only the chief's class differs.

Gradients and statistics are rounded to few bits, so that their sums are the same in any order.
"""

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Final, Self

import ray
import torch
from helpers.support import LONG
from on_ray.nodes import Nodes
from on_ray.replicated import Replicated
from torch import nn

import shmacc
import shmacc.ray
from shmacc import errors, init, optim
from shmacc.torch import Replica, TableEmbedding, clip_grad_norm_, optimizer_of

TOTAL: Final = 3
STEPS: Final = 40


class Model(nn.Module):
    """A model with rows by number, a table, a dense layer, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.user = TableEmbedding(4, initial=init.Uniform(-1, 1, seed=3))
        self.layer = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, words: torch.Tensor) -> Any:
        vectors = self.rows(words) + self.user(words << 33)
        if vectors.requires_grad:
            vectors.register_hook(lambda gradient: coarse(gradient.clone()))
        return self.norm(self.layer(vectors))


def coarse(values: torch.Tensor) -> torch.Tensor:
    """Round values in place, to multiples of 1/4096."""
    return values.mul_(4096).round_().div_(4096)


def compute(model: Model, step: int, rank: int) -> None:
    """Compute the gradients of this step and rank."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    words = torch.randint(0, 20, (8,), generator=random)
    nn.functional.cross_entropy(model(words), words % 2).backward()
    for parameter in (*model.layer.parameters(), *model.norm.parameters()):
        assert parameter.grad is not None
        coarse(parameter.grad)
    with torch.no_grad():
        for name in ("running_mean", "running_var"):
            coarse(getattr(model.norm, name))


def chief(kind: Any, model: Model, name: str) -> Any:
    """Make and return a chief of the class `kind`."""
    optimizers = {
        "rows.weight": optim.Adam(0.02),
        "user.rows": optim.Adagrad(0.1),
        "*": optimizer_of(torch.optim.AdamW(model.parameters(), lr=0.05)),
    }
    how: dict[str, Any] = {"optimizer": optimizers, "schedule": rate}
    return kind(model, name, total_num_replicas=TOTAL, **how)


def rate(step: int) -> dict[str, float]:
    return {"user.rows": 0.1, "*": 0.05 / (1 + step)}


def block(model: Model, update: shmacc.torch.Update) -> None:
    """Do what the chief does in a round's block."""
    assert clip_grad_norm_(model, 0.125) > 0.125
    if update.step % 7 == 3:
        update.skip()
    elif update.step % 7 == 5:
        update.remove(model.user, update.ids(model.user)[:1])
        with torch.no_grad():
            model.norm.running_mean += 0.5


def digest(model: Model) -> str:
    parts = [value.detach().numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def compared(state: dict[str, Any]) -> dict[str, Any]:
    """Return a chief's state without the entries that void steps change."""
    found = {"global_step": state["step"]}
    for part in ("model", "optimizer"):
        found |= {f"{part} {key}": value.clone() for key, value in state[part].items()}
    return {key: value for key, value in found.items() if not key.endswith((" step", "last_steps"))}


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two states, to the bit."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        same = torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value
        assert same, key


class Trio:
    """A chief and its replicas in this process; `on(rank)` enters a replica's node."""

    def __init__(
        self, kind: Any, name: str, on: Callable[[int], AbstractContextManager[None]]
    ) -> None:
        self.model = Model()
        self.others: list[tuple[Model, Replica]] = []
        with ExitStack() as stack:
            self.replicas = stack.enter_context(chief(kind, self.model, name))
            for rank in range(TOTAL):
                other = Model()
                with on(rank):
                    made = stack.enter_context(Replica(other, name, rank, timeout=LONG))
                self.others.append((other, made))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def hand_over(self) -> None:
        """Let all replicas apply a gradient, but not wait for the update."""
        for model, replica in self.others:
            compute(model, replica.global_step, replica.rank)
            replica._timeout = 0.0
            with contextlib.suppress(errors.DeadlineExceededError):
                replica.step()
            replica._timeout = LONG

    def train(self, steps: int) -> list[str]:
        """Make rounds; return the digest of the replicas' models before each round."""
        found = []
        for _ in range(steps):
            (seen,) = {digest(model) for model, _ in self.others}
            found.append(seen)
            self.hand_over()
            with self.replicas.round(timeout=LONG) as update:
                block(self.model, update)
            assert all(replica.step() for _, replica in self.others)
        return found


def lead(name: str, address: str, host: str, folder: str) -> None:
    """Be the chief, until all replicas have left."""
    torch.set_num_threads(1)
    ray.init(address=address, _node_ip_address=host, log_to_driver=False, configure_logging=False)
    model = Model()
    with chief(shmacc.ray.SyncReplicas, model, name) as replicas:
        while replicas.active:
            with replicas.round(timeout=10 * LONG) as update:
                block(model, update)
        torch.save(replicas.state_dict(), Path(folder, "state"))


def work(name: str, rank: int, log: str) -> None:
    """Be a replica, for all steps."""
    torch.set_num_threads(1)
    model = Model()
    with (
        Path(log).open("a", 1, encoding="utf-8") as file,
        Replica(model, name, rank, timeout=10 * LONG) as replica,
    ):
        while replica.running and replica.global_step < STEPS:
            print(replica.global_step, digest(model), file=file)
            compute(model, replica.global_step, rank)
            replica.step()


class TorchTraining(Replicated):
    """The program over three nodes: a replica on each, and a chief."""

    def __init__(self, nodes: Nodes, name: str, folder: Path) -> None:
        super().__init__(nodes, name, folder, TOTAL)
        head = "import sys; from on_ray import torch_program; torch_program."
        chief = f"lead(*sys.argv[1:4], {str(self.folder)!r})"
        worker = "work(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
        self.programs = head + chief, head + worker

    def seen(self) -> list[set[str]]:
        """Return, for each step, the digests of the replicas' models."""
        found: list[set[str]] = [set() for _ in range(STEPS)]
        for log in self.folder.glob(f"{self.name}.[0-9]*"):
            steps = [-1]
            for line in log.read_text().splitlines():
                step, what = line.split()
                steps.append(int(step))
                found[steps[-1]].add(what)
            assert steps == sorted(steps), "the training began again"
        return found

    def result(self) -> dict[str, Any]:
        return compared(torch.load(self.folder / "state", weights_only=True))
