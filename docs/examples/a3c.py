"""A3C: asynchronous actor-critic, with the 16 tensors of its two networks in one group.

Actors walk through a maze, each at its own pace, and apply a gradient after each stretch, whatever
the step is by then (`NEVER_STALE`). The chief's round takes what has come, and updates the
parameters in place, by RMSprop. An actor may read them while they are updated: asynchronous
training bears that, its gradients are a little old anyway. With `capacity` they are not much older,
and actors whose chief is gone wait for room, and end. For synchronous training (A2C) apply with the
step that the parameters belong to, follow it with `steps`, and take `round(ACTORS)`.
"""

import multiprocessing

import numpy as np
import shmacc

ACTORS, UPDATES, STRETCH, DISCOUNT = 3, 700, 20, 0.95
SHORTEST = 6  # steps from S to G, down along the left
MAZE = ["S.#.", "..#.", ".#..", "...G"]
SIDE = len(MAZE)
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]
OURS = {"if_exists": "replace", "unlink_on_close": True}  # a run begins again, and leaves nothing
LAYERS = {"actor": [SIDE * SIDE, 32, 32, 32, len(MOVES)], "critic": [SIDE * SIDE, 32, 32, 32, 1]}


def shapes():
    """Return the shapes of the tensors: weights and biases of four layers, of two networks."""
    for network, widths in LAYERS.items():
        for layer in range(4):
            yield f"{network}.{layer}.weights", (widths[layer], widths[layer + 1])
            yield f"{network}.{layer}.bias", (widths[layer + 1],)


def move(place, action):
    """Return the next place, and the reward."""
    row, column = (at + by for at, by in zip(divmod(place, SIDE), MOVES[action], strict=True))
    inside = 0 <= row < SIDE and 0 <= column < SIDE
    if inside and MAZE[row][column] != "#":
        place = row * SIDE + column
    return place, 1.0 if MAZE[place // SIDE][place % SIDE] == "G" else -0.05


def forward(params, network, places):
    """Return the outputs of all layers, beginning with the input."""
    outputs = [np.eye(SIDE * SIDE)[places]]
    for layer in range(4):
        sums = (
            outputs[-1] @ params[f"{network}.{layer}.weights"] + params[f"{network}.{layer}.bias"]
        )
        outputs.append(np.tanh(sums) if layer < 3 else sums)
    return outputs


def backward(params, network, outputs, slope):
    """Return the gradient of a network's tensors, given that of its last output."""
    gradient = {}
    for layer in reversed(range(4)):
        gradient[f"{network}.{layer}.weights"] = outputs[layer].T @ slope
        gradient[f"{network}.{layer}.bias"] = slope.sum(axis=0)
        slope = slope @ params[f"{network}.{layer}.weights"].T * (1 - outputs[layer] ** 2)
    return gradient


def chances(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def walk(params, place, random):
    """Walk a stretch, and return where it ends and the gradient of the actor-critic loss."""
    places, actions, rewards, ends = [], [], [], []
    for _ in range(STRETCH):
        odds = chances(forward(params, "actor", [place])[-1][0])
        action = random.choice(len(MOVES), p=odds)
        arrival, reward = move(place, action)
        places, actions, rewards = [*places, place], [*actions, action], [*rewards, reward]
        ends.append(reward > 0)
        place = 0 if ends[-1] else arrival  # from the goal back to the start
    critic = forward(params, "critic", places)
    value = forward(params, "critic", [place])[-1][0, 0]
    returns = np.empty(STRETCH)
    for at in reversed(range(STRETCH)):
        returns[at] = value = rewards[at] + (0 if ends[at] else DISCOUNT * value)
    advantage = returns - critic[-1][:, 0]
    actor = forward(params, "actor", places)
    odds = chances(actor[-1])
    logs = np.log(odds)
    slope = (odds - np.eye(len(MOVES))[actions]) * advantage[:, None]
    slope += 0.02 * odds * (logs - (odds * logs).sum(axis=1, keepdims=True))  # against certainty
    gradient = backward(params, "actor", actor, slope / STRETCH)
    return place, gradient | backward(params, "critic", critic, -advantage[:, None] / STRETCH)


def act(rank):
    random, place = np.random.default_rng(rank), 0
    with shmacc.attach("a3c") as group, shmacc.Parameters.attach("a3c.params") as params:
        while group.running:
            place, gradient = walk(params, place, random)
            group.apply(gradient, shmacc.NEVER_STALE, timeout=10)


def steps_to_the_goal(params):
    place = 0
    for step in range(1, 100):
        place, reward = move(place, int(np.argmax(forward(params, "actor", [place])[-1])))
        if reward > 0:
            return step
    return None


if __name__ == "__main__":
    random = np.random.default_rng(0)
    start = {name: random.normal(size=shape) / np.sqrt(shape[0]) for name, shape in shapes()}
    for name in start:
        start[name] *= "weights" in name  # biases start as zeros
    rmsprop = shmacc.optim.RMSprop(0.003, rho=0.99, epsilon=1e-6)
    with (
        shmacc.Parameters(start, "a3c.params", optimizer=rmsprop, **OURS) as params,
        shmacc.AccumulatorGroup(params.member_specs(), "a3c", capacity=ACTORS, **OURS) as group,
    ):
        context = multiprocessing.get_context("spawn")
        actors = [context.Process(target=act, args=(rank,)) for rank in range(ACTORS)]
        for process in actors:
            process.start()
        # Gradients interleave differently in each run, which takes more or fewer of them.
        while steps_to_the_goal(params) != SHORTEST and params.step < 20 * UPDATES:
            for _ in range(UPDATES // 10):
                with group.round(1, timeout=60, on_death="raise") as taken:
                    params.update(taken)
        group.finish()
        for process in actors:
            process.join()
        print(f"{steps_to_the_goal(params)} steps to the goal")
        assert steps_to_the_goal(params) == SHORTEST
