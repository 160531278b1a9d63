"""Federated averaging: clients train on data of their own, and only their models travel.

The clients of a region meet in its group. What travels from there to the root is a partial: sums
that are not divided yet. A client's model weighs as much as the samples it was trained on.
"""

import multiprocessing

import numpy as np
import shmacc

ROUNDS, CLIENTS, FEATURES = 5, {"east": (0, 1, 2), "west": (3, 4)}, 8
SAMPLES = (40, 10, 200, 5, 80)  # of each client
MEMBERS = {"weights": shmacc.TensorSpec((FEATURES,), "float64")}
OURS = {"if_exists": "replace", "unlink_on_close": True}


def train(weights, client):
    """Return a client's model: some steps from the common one, on this client's samples."""
    random = np.random.default_rng(client)
    inputs = random.normal(size=(SAMPLES[client], FEATURES))
    wanted = inputs @ np.arange(FEATURES) + random.normal(size=SAMPLES[client])
    for _ in range(5):
        weights = weights - 0.1 * inputs.T @ (inputs @ weights - wanted) / SAMPLES[client]
    return weights


def be_client(region, client):
    with shmacc.attach(region) as group, shmacc.Parameters.attach("model") as model:
        for step in group.steps(timeout=60, on_death="raise"):
            mine = {"weights": train(model["weights"], client)}
            group.apply(mine, step, contributor=client, weight=SAMPLES[client])


def lead(model, regions, root):
    """Return the common model after each round."""
    for step in range(ROUNDS):
        for name, region in regions.items():
            partial = region.take_partial(len(CLIENTS[name]), seal=True, timeout=20)
            root.apply_partial(partial, step)  # counts as all its clients, with their weights
        with root.round(len(SAMPLES)) as taken:
            assert taken.contributors.tolist() == [0, 1, 2, 3, 4]
            assert taken.weight == sum(SAMPLES)
            model.update(taken, {"weights": taken["weights"].value})  # the mean is the model
        yield model["weights"].copy()
        for region in regions.values():
            region.advance_step(root.global_step)  # only now clients read the model
    for region in regions.values():
        region.finish()


if __name__ == "__main__":
    with (
        shmacc.Parameters({"weights": np.zeros(FEATURES)}, "model", **OURS) as model,
        shmacc.AccumulatorGroup(MEMBERS, "east", **OURS) as east,
        shmacc.AccumulatorGroup(MEMBERS, "west", **OURS) as west,
        shmacc.AccumulatorGroup(MEMBERS) as root,
    ):
        context = multiprocessing.get_context("spawn")
        places = [(region, client) for region, clients in CLIENTS.items() for client in clients]
        clients = [context.Process(target=be_client, args=place) for place in places]
        for process in clients:
            process.start()
        expected = np.zeros(FEATURES)
        for weights in lead(model, {"east": east, "west": west}, root):
            models = [train(expected, client) for client in range(len(SAMPLES))]
            expected = np.average(models, axis=0, weights=SAMPLES)
            np.testing.assert_allclose(weights, expected)
        for process in clients:
            process.join()
        print("the common model:", weights.round(2).tolist())
