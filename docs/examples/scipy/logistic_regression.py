"""Logistic regression on sparse features: CSR batches, and Ftrl, whose l1 keeps few weights."""

import multiprocessing

import numpy as np
import scipy.sparse
import shmacc
from scipy.special import expit

FEATURES, RELEVANT, BATCH, STEPS, WORKERS = 5000, 50, 200, 300, 2
OURS = {"if_exists": "replace", "unlink_on_close": True}  # a run begins again, and leaves nothing


def data(random, rows):
    """Return inputs with 20 entries a row, and labels that depend on the first features alone."""
    columns = random.integers(0, FEATURES, (rows, 20))
    columns[:, :5] %= RELEVANT
    where = np.repeat(np.arange(rows), 20), columns.ravel()
    inputs = scipy.sparse.csr_array((np.ones(rows * 20), where), shape=(rows, FEATURES))
    truth = np.zeros((FEATURES, 1))
    truth[:RELEVANT, 0] = np.random.default_rng(0).choice([-2.0, 2.0], RELEVANT)
    return inputs, inputs @ truth > 0


def work(rank):
    with (
        shmacc.SparseConditionalAccumulator.attach("clicks") as acc,
        shmacc.Parameters.attach("clicks.params") as params,
    ):
        for step in acc.steps(timeout=60, on_death="raise"):
            inputs, labels = data(np.random.default_rng((rank, step)), BATCH)
            error = expit(inputs @ params["weights"]) - labels
            slope = inputs.T @ scipy.sparse.csr_array(error) / BATCH  # of its features alone
            acc.apply_indexed_slices_grad(slope, local_step=step, contributor=rank)


if __name__ == "__main__":
    weights, ftrl = {"weights": np.zeros((FEATURES, 1))}, shmacc.optim.Ftrl(0.5, l1=0.1)
    shape = (FEATURES, 1)
    with (
        shmacc.Parameters(weights, "clicks.params", optimizer=ftrl, **OURS) as params,
        shmacc.SparseConditionalAccumulator("float64", shape, "clicks", **OURS) as acc,
    ):
        context = multiprocessing.get_context("spawn")
        crew = [context.Process(target=work, args=(rank,)) for rank in range(WORKERS)]
        for process in crew:
            process.start()
        for _ in range(STEPS):
            with acc.round(WORKERS, timeout=60, on_death="raise") as taken:
                params.update(taken)  # the rows of these features, and no others
        acc.finish()
        for process in crew:
            process.join()
        inputs, labels = data(np.random.default_rng(10**6), 2000)
        right = ((inputs @ params["weights"] > 0) == labels).mean()
        used = np.count_nonzero(params["weights"])
    print(f"{right:.1%} are right; {used} of {FEATURES} weights are not zero")
    assert right > 0.9
    assert used < FEATURES / 10
