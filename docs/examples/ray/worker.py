"""A worker on any host: it knows two names and its rank, and does not import Ray."""

import sys

import numpy as np
import shmacc


def main(rank: int) -> None:
    random = np.random.default_rng(rank)
    params = shmacc.Parameters.attach("params", timeout=600)
    group = shmacc.attach("model", timeout=600)
    for step in group.steps():  # until the chief has finished
        rows = random.integers(200, size=32)  # this worker's batch
        gradient = params["table"][rows] - 1.0  # of its loss: here all ones are best
        group.apply({"table": (rows, gradient)}, step, contributor=rank)


if __name__ == "__main__":
    main(int(sys.argv[1]))
