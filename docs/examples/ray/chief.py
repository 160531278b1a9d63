"""The chief of a job over many hosts: trains a table by Adagrad, with gradients of all workers.

Killed and started again, it goes on with the parameters that the nodes have.
"""

import sys

import numpy as np
import ray
import shmacc
import shmacc.ray


def main(workers: int, steps: int) -> None:
    ray.init(address="auto")
    table, adagrad = {"table": np.zeros((200, 16), np.float32)}, shmacc.optim.Adagrad(0.5)
    with (
        shmacc.ray.Parameters(table, "params", optimizer=adagrad) as params,
        shmacc.ray.AccumulatorGroup(params.member_specs(sparse=["table"]), "model") as group,
    ):
        while params.step < steps:
            with group.round(workers, timeout=600) as taken:
                params.update(taken)
        group.finish()  # the workers' loops end
        learnt = np.mean(abs(params["table"] - 1) < 0.1)
        group.unlink()
        params.unlink()
    print(f"{steps} updates of {workers} gradients: {learnt:.0%} of the table is learnt")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
