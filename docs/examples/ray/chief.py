"""The chief of a job over many hosts: fits a line, here through gradients of all workers."""

import sys

import numpy as np
import ray
import shmacc
import shmacc.ray

TRUTH = np.array([2.0, -1.0, 0.5, 3.0])
MEMBERS = {"weights": shmacc.TensorSpec((4,), "float64")}


def main(workers: int, steps: int) -> None:
    ray.init(address="auto")
    start = {"weights": np.zeros(4)}
    with (
        shmacc.ray.PublishedArrays(start, "line.parameters", unlink_on_close=True) as parameters,
        shmacc.ray.AccumulatorGroup(
            MEMBERS, "line", if_exists="replace", unlink_on_close=True
        ) as group,
    ):
        for _ in range(steps):
            with group.round(workers, timeout=600) as taken:
                parameters["weights"][...] -= 0.1 * taken["weights"].value
                parameters.publish()  # in the block: so no worker sees the new step without them
        error = np.abs(parameters["weights"] - TRUTH).max()
    assert error < 0.1, error
    print(f"{steps} rounds of {workers} gradients: {error:.4f} from the truth")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
