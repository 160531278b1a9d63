"""Reinforcement learning (A2C): replicas walk through a maze, and learn one policy together.

Each replica walks a stretch with the present policy, and hands over the gradient of its loss; the
chief's round updates the model with their mean. `shmacc.run` starts again whichever of them is
killed. For A3C, in which replicas do not wait for each other, take `AsyncReplicas`.
"""

import shmacc
import torch
from torch import nn
from torch.distributions import Categorical

from shmacc.torch import Replica, SyncReplicas, clip_grad_norm_

REPLICAS, UPDATES, STRETCH, DISCOUNT = 3, 300, 20, 0.95
MAZE, SHORTEST = ["S.#.", "..#.", ".#..", "...G"], 6  # steps from S to G, down along the left
SIDE = len(MAZE)
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class Policy(nn.Module):
    """Two networks: the chances of the moves, and what a place is worth."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Embedding(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 4))
        self.critic = nn.Sequential(nn.Embedding(SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, places):
        """Return the moves' logits, and the values."""
        return self.actor(places), self.critic(places).squeeze(-1)


def move(place, action):
    """Return the next place, and the reward."""
    row, column = (at + by for at, by in zip(divmod(place, SIDE), MOVES[action], strict=True))
    inside = 0 <= row < SIDE and 0 <= column < SIDE
    if inside and MAZE[row][column] != "#":
        place = row * SIDE + column
    return place, 1.0 if MAZE[place // SIDE][place % SIDE] == "G" else -0.05


def walk(model, place):
    """Walk a stretch; return where it ends, and the loss."""
    places, actions, rewards, ends = [], [], [], []
    for _ in range(STRETCH):
        with torch.no_grad():
            action = int(Categorical(logits=model.actor(torch.tensor(place))).sample())
        arrival, reward = move(place, action)
        places, actions, rewards = [*places, place], [*actions, action], [*rewards, reward]
        ends.append(reward > 0)
        place = 0 if ends[-1] else arrival  # from the goal back to the start
    logits, values = model(torch.tensor([*places, place]))
    returns, value = [], values[-1].item()
    for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
        value = reward + (0 if end else DISCOUNT * value)
        returns.insert(0, value)
    advantage = torch.tensor(returns) - values[:-1]
    policy = Categorical(logits=logits[:-1])
    gained = policy.log_prob(torch.tensor(actions)) * advantage.detach()
    return place, (0.5 * advantage**2 - gained - 0.02 * policy.entropy()).mean()


def act(rank):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model, place = Policy(), 0
    with Replica(model, "maze", timeout=60) as replica:
        while replica.running:
            place, loss = walk(model, place)
            loss.backward()
            replica.step()  # in place of optimizer.step() and zero_grad()


def lead():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, adam = Policy(), shmacc.optim.Adam(0.01)
    with SyncReplicas(model, "maze", total_num_replicas=REPLICAS, optimizer=adam) as replicas:
        while replicas.global_step < UPDATES:
            with replicas.round(timeout=60):  # .grad is the replicas' mean
                clip_grad_norm_(model.parameters(), 1.0)
        return steps_to_the_goal(model)


def steps_to_the_goal(model):
    place = 0
    for step in range(1, 100):
        place, reward = move(place, int(model.actor(torch.tensor(place)).argmax()))
        if reward > 0:
            return step
    return None


if __name__ == "__main__":
    steps = shmacc.run(lead, act, workers=REPLICAS)
    print(f"{steps} steps to the goal")
    assert steps == SHORTEST
