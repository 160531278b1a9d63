"""A worker of the demo over several hosts: it knows a name and its rank, and nothing of Ray."""

import sys

import shmacc
from shmacc_demo.model import Batches, Plan


def main(name: str, rank: int, workers: int, steps: int) -> None:
    """Compute this rank's gradient of every step from the parameters of this host."""
    with (
        shmacc.SharedArrays.attach(f"{name}.arrays", timeout=60) as shared,
        shmacc.attach(name, timeout=60) as group,
    ):
        assert isinstance(group, shmacc.AccumulatorGroup)  # noqa: S101  one of a chief's
        plan = Plan(workers, steps=steps)
        batches, step = Batches(shared, plan), group.global_step
        while step < plan.steps:
            group.apply(batches.gradient(shared, step, rank), step, contributor=rank)
            step = group.wait_step(step, timeout=120)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    if "ray" in sys.modules:
        sys.exit("A worker has imported Ray")
