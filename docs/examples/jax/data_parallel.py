"""Data-parallel training with JAX and optax: handwritten digits, two workers and a chief.

Each worker has half of the data and computes the gradient of its own half, with as much weight as
it has images. The mean is the gradient over all data, so the result is that of one process.
Parameters and the optimizer's state are one tree in shared memory, which each round updates whole.
"""

import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shmacc
import shmacc.jax
from sklearn.datasets import load_digits

WORKERS, STEPS = 2, 40
optimizer = optax.adam(0.01)


def initial_params():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": {"w": jax.random.normal(first, (64, 32)) / 8, "b": jnp.zeros(32)},
        "output": {"w": jax.random.normal(second, (32, 10)) / 6, "b": jnp.zeros(10)},
    }


@jax.jit
def loss(params, images, labels):
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["output"]["w"] + params["output"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


gradient = jax.jit(jax.grad(loss))


def data(rank=None):  # all of it, or a worker's part
    images, labels = load_digits(return_X_y=True)
    part = slice(None) if rank is None else slice(rank, None, WORKERS)
    return (images[part] / 16).astype(np.float32), labels[part].astype(np.int32)


def work(rank, group, shared):
    spec = shmacc.jax.TreeSpec({"params": jax.eval_shape(initial_params)})
    images, labels = data(rank)
    for step in group.steps(timeout=100, on_death="raise"):
        params = spec.unflatten(shared)["params"]  # read when the step is known
        grads = spec.flatten({"params": gradient(params, images, labels)})
        group.apply(grads, step, contributor=rank, weight=len(labels))


def train():
    params = initial_params()
    tree = {"params": params, "state": optimizer.init(params)}
    whole, spec = shmacc.jax.TreeSpec(tree), shmacc.jax.TreeSpec({"params": params})
    group = shmacc.AccumulatorGroup(spec.members)
    shared = shmacc.Parameters(whole.flatten(tree))
    context = multiprocessing.get_context("spawn")  # JAX has threads: no fork
    crew = [context.Process(target=work, args=(rank, group, shared)) for rank in range(WORKERS)]
    with group, shared:
        for process in crew:
            process.start()
        for _ in range(STEPS):
            with group.round(WORKERS, timeout=100, on_death="raise") as taken:
                mean, now = spec.unflatten(taken)["params"], whole.unflatten(shared)
                updates, state = optimizer.update(mean, now["state"], now["params"])
                params = optax.apply_updates(now["params"], updates)
                shared.update(taken, whole.flatten({"params": params, "state": state}))
        group.finish()
        for process in crew:
            process.join()
    return params


def train_alone():
    params = initial_params()
    state = optimizer.init(params)
    everything = data()
    for _ in range(STEPS):
        updates, state = optimizer.update(gradient(params, *everything), state, params)
        params = optax.apply_updates(params, updates)
    return params


if __name__ == "__main__":
    together, alone = train(), train_alone()
    before, after = (float(loss(params, *data())) for params in (initial_params(), together))
    print(f"loss {before:.3f} before, {after:.3f} after {STEPS} steps")
    assert after < before / 5
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-3), together, alone))
