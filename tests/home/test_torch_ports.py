"""Public programs, as their users port them: equal to torch in one process, whoever is killed.

After mnist_hogwild of pytorch/examples, facebookresearch/dlrm and ikostrikov/pytorch-a3c.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from helpers.support import LONG
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from shmacc.torch import Replica, StepSampler, SyncReplicas, clip_grad_norm_, optimizer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from helpers.apart import Apart

NAME: Final = "port"
RANKS: Final = 2  # the sum of two gradients is the same to the bit in either order
# Says torch itself, of what its optimizers make.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Net(nn.Module):
    """The model of mnist_hogwild, smaller: convolutions and dropout."""

    def __init__(self) -> None:
        """Make it, always the same."""
        super().__init__()
        torch.manual_seed(1)
        self.conv1 = nn.Conv2d(1, 4, kernel_size=3)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(32, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logarithms of probabilities."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = functional.dropout(functional.relu(self.fc1(x.flatten(1))), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


_random = torch.Generator().manual_seed(0)
IMAGES: Final = TensorDataset(
    torch.rand(200, 1, 14, 14, generator=_random),
    torch.randint(0, 10, (200,), generator=_random),
)


def digits(model: nn.Module, batch: Any, step: int, rank: int) -> None:
    torch.manual_seed(RANKS * step + rank)  # of dropout
    functional.nll_loss(model(batch[0]), batch[1]).backward()


class Dlrm(nn.Module):
    """Clicks: bags of ids in three tables, of which one has padding, and dense features."""

    def __init__(self) -> None:
        """Make it, always the same."""
        super().__init__()
        torch.manual_seed(2)
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(size, 4, mode=mode, sparse=True, padding_idx=padding)
            for size, mode, padding in [(50, "sum", None), (20, "mean", None), (9, "sum", 0)]
        )
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, bags: list[Any]) -> Any:
        """Return logits."""
        x = self.bot_l(dense)
        rows = [table(ids, offsets) for table, (ids, offsets) in zip(self.emb_l, bags, strict=True)]
        stacked = torch.stack([x, *rows], dim=1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        one, two = torch.triu_indices(4, 4, offset=1)
        return self.top_l(torch.cat([x, pairs[:, one, two]], dim=1)).squeeze(1)


def clicks(model: nn.Module, _: Any, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(RANKS * step + rank)
    bags = []
    for size in (50, 20, 9):
        lengths = torch.randint(0, 4, (6,), generator=random)
        ids = torch.randint(0, size, (int(lengths.sum()),), generator=random)
        bags.append((ids, lengths.cumsum(0) - lengths))
    clicked = torch.randint(0, 2, (6,), generator=random).float()
    found = model(torch.rand(6, 5, generator=random), bags)
    functional.binary_cross_entropy_with_logits(found, clicked).backward()


class ActorCritic(nn.Module):
    """The model of pytorch-a3c, smaller: an LSTM cell and two heads."""

    def __init__(self) -> None:
        """Make it, always the same."""
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(7, 8)
        self.lstm = nn.LSTMCell(8, 8)
        self.critic_linear = nn.Linear(8, 1)
        self.actor_linear = nn.Linear(8, 2)

    def forward(self, place: torch.Tensor, memory: Any) -> Any:
        """Return a value, logits and memory."""
        hx, cx = self.lstm(functional.elu(self.encoder(place)), memory)
        return self.critic_linear(hx), self.actor_linear(hx), (hx, cx)


def play(model: nn.Module, _: Any, step: int, rank: int) -> None:
    """A walk on a line, to its right end; advantages as pytorch-a3c estimates them."""
    random = torch.Generator().manual_seed(RANKS * step + rank)
    place, memory = 3, (torch.zeros(1, 8), torch.zeros(1, 8))
    values, logs, rewards, entropies = [], [], [], []
    for _turn in range(8):
        value, logits, memory = model(functional.one_hot(torch.tensor([place]), 7).float(), memory)
        log_probabilities = functional.log_softmax(logits, dim=-1)
        probabilities = log_probabilities.exp()
        action = probabilities.multinomial(1, generator=random)
        entropies.append(-(log_probabilities * probabilities).sum())
        place = min(max(place + (1 if int(action) else -1), 0), 6)
        values.append(value.squeeze())
        logs.append(log_probabilities.gather(1, action).squeeze())
        rewards.append(1.0 if place == 6 else -0.1)
    value_loss = policy_loss = expected = advantage = following = torch.zeros(())
    for i in reversed(range(8)):
        expected = 0.99 * expected + rewards[i]
        value_loss = value_loss + 0.5 * (expected - values[i]).pow(2)
        advantage = advantage * 0.99 + rewards[i] + 0.99 * following - values[i].detach()
        following = values[i].detach()
        policy_loss = policy_loss - logs[i] * advantage - 0.01 * entropies[i]
    (policy_loss + 0.5 * value_loss).backward()


@dataclass(frozen=True)
class Port:
    """What the chief and the replicas of a program use.

    Attributes:
        model: Makes it.
        backward: Computes gradients of a batch, for a step and a rank.
        optimizers: torch's.
        steps: How many the program makes.
        rates: The schedule; in the order of the optimizers.
        clip: The largest norm.
        data: A dataset, if batches are from one.
    """

    model: type[nn.Module]
    backward: Callable[[nn.Module, Any, int, int], None]
    optimizers: Callable[[Any], list[torch.optim.Optimizer]]
    steps: int = 24
    rates: Callable[[int], dict[str, float]] | None = None
    clip: float | None = None
    data: TensorDataset | None = None


PORTS: Final = {
    "mnist_hogwild": Port(
        Net,
        digits,
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)],
        steps=24,  # two epochs
        data=IMAGES,
    ),
    "dlrm": Port(
        Dlrm,
        clicks,
        lambda model: [
            torch.optim.SparseAdam(model.emb_l.parameters()),
            torch.optim.AdamW([*model.bot_l.parameters(), *model.top_l.parameters()]),
        ],
        rates=lambda step: {"emb_l*": 0.05 / (1 + step), "*": 0.01 * min(1, (step + 1) / 8)},
    ),
    "a3c": Port(
        ActorCritic,
        play,
        lambda model: [torch.optim.Adam(model.parameters(), lr=0.01)],
        clip=0.5,
    ),
}


def compute(name: str, rank: int) -> None:
    """A replica, from the beginning of its data to the end."""
    port = PORTS[name]
    model = port.model()
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        batches: Any = range(port.steps)
        if port.data is not None:
            sampler = StepSampler(port.data, replica, 8, epochs=port.steps // 12)
            batches = DataLoader(port.data, batch_sampler=sampler)
        for batch in batches:
            port.backward(model, batch, replica.global_step, rank)
            assert replica.step()


def lead(name: str, dies_at: int) -> dict[str, Any]:
    """A chief, until all have left; it is killed in the block of a step."""
    port = PORTS[name]
    model = port.model()
    optimizer = optimizer_of(*port.optimizers(model))
    with SyncReplicas(
        model, NAME, total_num_replicas=RANKS, optimizer=optimizer, schedule=port.rates
    ) as replicas:
        while replicas.active:
            with replicas.round(timeout=LONG) as update:
                if port.clip is not None:
                    clip_grad_norm_(model.parameters(), port.clip)
                if update.step == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        assert replicas.global_step == port.steps
    return {key: value.numpy() for key, value in model.state_dict().items()}


def alone(port: Port) -> dict[str, Any]:
    """In one process, by torch."""
    model = port.model()
    optimizers = port.optimizers(model)
    samplers: list[Any] = [None] * RANKS
    if port.data is not None:
        samplers = [StepSampler(port.data, Place(rank), 8) for rank in range(RANKS)]  # type: ignore[arg-type]
    for step in range(port.steps):
        model.zero_grad()
        for rank, sampler in enumerate(samplers):
            batch = None if sampler is None else port.data[sampler.batch(step)]  # type: ignore[index]
            port.backward(model, batch, step, rank)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / RANKS
        if port.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), port.clip)
        rates = port.rates(step).values() if port.rates is not None else ()
        for optimizer, rate in zip(optimizers, rates, strict=False):
            optimizer.param_groups[0]["lr"] = rate
        for optimizer in optimizers:
            optimizer.step()
    return {key: value.numpy() for key, value in model.state_dict().items()}


@dataclass
class Place:
    """What a sampler asks a replica for."""

    rank: int
    total_num_replicas: int = RANKS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PORTS)
def test_a_port_is_torch_in_one_process_and_survives_its_chief(
    start: Callable[..., Apart], name: str
) -> None:
    ends = []
    for deaths in ((), (0, 7, 7)):
        children = [start(compute, name, rank) for rank in range(RANKS)]
        for step in deaths:
            assert start(lead, name, step).wait() == signal.SIGKILL
        ends.append(start(lead, name, -1).result())
        for child in children:
            child.result()
    expected = alone(PORTS[name])
    before = PORTS[name].model().state_dict()
    for key, value in ends[0].items():
        assert ends[1][key].tobytes() == value.tobytes(), f"{key}: a death has changed it"
        np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5, err_msg=key)
        assert not np.allclose(value, before[key], atol=1e-3), f"{key} was not trained"
