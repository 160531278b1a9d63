"""A replica counts as soon as it is made: its death before its first gradient is reported."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.apart import Apart, Pipe
from helpers.support import LONG
from other_packages.torch_training import NAME, one_layer
from torch import nn

from shmacc import errors
from shmacc.optim import SGD
from shmacc.torch import AsyncReplicas, Replica, SyncReplicas, Viewer


def wrong_shape(replica: Replica, model: nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()
    replica.step()


def another_shape(replica: Replica, model: Any) -> None:
    model.weight.data = model.weight.data[:, :1]
    replica.step()


def killed(replica: Replica, model: nn.Module) -> None:  # noqa: ARG001
    os.kill(os.getpid(), 9)


FAILURES: dict[Callable[..., None], str] = {
    wrong_shape: "RuntimeError: mat1 and mat2 shapes cannot be",
    another_shape: "FailedPreconditionError: 'weight' is not in shared memory any more",
    killed: "killed",
}


def replica_that(fail: Callable[..., None], rank: int, *, pipe: Pipe) -> None:
    model = one_layer()
    with Replica(model, NAME, rank, timeout=LONG) as replica:
        pipe.say()
        pipe.hear()
        fail(replica, model)


def viewer_that_fails() -> None:
    with suppress(ValueError), Viewer(one_layer(), NAME) as viewer:
        viewer.snapshot()
        raise ValueError


def told(replicas: Any) -> Any:
    """Return what the next wait reports of deaths; None: it reports no death."""
    try:
        with replicas.round(timeout=0.01, on_death="raise"):
            pytest.fail("there was no gradient")
    except errors.WorkerDiedError as error:
        return error.pids, error.reasons, error.contributors
    except errors.DeadlineExceededError:
        return None


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["of torch", "of shmacc"])
@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
@pytest.mark.parametrize("fail", FAILURES)
def test_a_failure_before_the_first_gradient_is_reported_once(
    start: Callable[..., Apart], fail: Callable[..., None], kind: Any, optimizer: Any
) -> None:
    """The failure ends a wait that has begun. A viewer's failure is not reported."""
    with kind(one_layer(), NAME, total_num_replicas=2, optimizer=optimizer) as replicas:
        viewer = start(viewer_that_fails)
        replica = start(replica_that, fail, 1)
        viewer.result()
        replica.hear()
        assert told(replicas) is None
        replica.say()
        with (
            pytest.raises(errors.WorkerDiedError) as caught,
            replicas.round(timeout=LONG, on_death="raise"),
        ):
            pytest.fail("there was no gradient")
        found = caught.value
        assert (found.pids, found.contributors) == ((replica.pid,), ())
        assert FAILURES[fail] in (found.reasons or ("",))[0]
        assert told(replicas) is None
        with Replica(one_layer(), NAME, 1, timeout=LONG) as another:  # replaces the failed one
            assert another.running
        assert told(replicas) is None
