"""A Ray actor has the model, others send gradients, as in Ray's example of a parameter server."""

from typing import Any

import ray
import torch

from shmacc_bench.compare.model import EVERY, Judge, Task

TITLE = "a Ray actor"
TOGETHER = False


def ranks(workers: int) -> range:  # noqa: ARG001
    """Return no ranks: Ray starts the workers' processes."""
    return range(0)


def share(task: Task, workers: int) -> None:
    """Return None: nothing has to be shared."""


def lead(shared: None, task: Task, workers: int, judge: Judge) -> None:  # noqa: ARG001
    """Start Ray, a server and the workers, and pass the server's weights to the workers."""
    ray.init("local", num_cpus=workers + 1, log_to_driver=False, include_dashboard=False)
    server = ray.remote(Server).options(max_restarts=1, max_task_retries=3).remote(task)
    crew = [
        ray.remote(Worker).options(max_restarts=1, max_task_retries=3).remote(task, rank)
        for rank in range(workers)
    ]
    step, model = 0, task.model()
    weights = server.weights.remote()
    while True:
        weights = server.update.remote(*(one.gradient.remote(weights, step) for one in crew))
        step += 1
        ray.wait([weights])
        if step % EVERY == 0:
            model.load_state_dict(ray.get(weights))
            if judge.satisfied(model, step):
                return


class Server:
    """The actor that has the model."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        self.model = task.model()
        self.optimizer = task.adagrad(self.model)

    def weights(self) -> dict[str, Any]:
        """Return the model's weights."""
        return self.model.state_dict()  # type: ignore[no-any-return, unused-ignore]

    def update(self, *given: Any) -> dict[str, Any]:
        """Update the model with the mean of the gradients; return its weights."""
        for number, parameter in enumerate(self.model.parameters()):
            rows = torch.cat([one[number][0] for one in given], dim=1)
            values = torch.cat([one[number][1] for one in given]) / len(given)
            parameter.grad = torch.sparse_coo_tensor(rows, values, parameter.shape)
        self.optimizer.step()
        return self.weights()


class Worker:
    """The actor that computes gradients."""

    def __init__(self, task: Task, rank: int) -> None:
        torch.set_num_threads(1)
        self.model, self.task, self.rank = task.model(), task, rank

    def gradient(self, weights: dict[str, Any], step: int) -> Any:
        """Return the gradient: rows and values of each table."""
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        self.task.loss(self.model, step, self.rank).backward()
        found = [parameter.grad.coalesce() for parameter in self.model.parameters()]
        return [(one.indices(), one.values()) for one in found]
