import logging
import time

import numpy as np
import shmacc


def work(rank):
    with shmacc.Parameters.attach("params", timeout=60) as params:
        with shmacc.AccumulatorGroup.attach("model", timeout=60) as group:
            for step in group.steps(timeout=60):  # until the chief has finished
                rows = np.random.default_rng((step, rank)).integers(200, size=8)  # its batch
                gradient = params["table"][rows] - 1.0  # of its loss: here all ones are best
                group.apply({"table": (rows, gradient)}, step, contributor=rank)


def lead():
    table, adagrad = {"table": np.zeros((200, 16), np.float32)}, shmacc.optim.Adagrad(0.5)
    with shmacc.Parameters(table, "params", optimizer=adagrad) as params:
        with shmacc.AccumulatorGroup(params.member_specs(sparse=["table"]), "model") as group:
            while params.step < 300:
                with group.round(4, timeout=60) as taken:  # four gradients have come
                    params.update(taken)  # their mean, by Adagrad: only the rows that they have
                time.sleep(0.05)  # so that there is time to kill some
            group.finish()  # the workers' loops end
            return np.mean(abs(params["table"] - 1) < 0.01)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # says which process is which
    print(f"{shmacc.run(lead, work, workers=4):.0%} of the table is learnt")
