"""What is told of workers that torch starts."""

from __future__ import annotations

from typing import Final

import pytest
import torch.multiprocessing
from helpers.support import START_METHODS

import shmacc
from shmacc import errors

NAME: Final = "spawned"


def fail(rank: int) -> None:
    """Hand in a gradient, and fail."""
    own = shmacc.ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, 0, contributor=rank)
    raise ValueError("bad batch")


@pytest.mark.parametrize("method", START_METHODS)
def test_a_worker_of_torchs_spawn_is_told_by_its_exception(namespace: str, method: str) -> None:  # noqa: ARG001
    """Not by the SystemExit of 1 that torch makes of it."""
    with shmacc.ConditionalAccumulator("f4", (), NAME, unlink_on_close=True) as acc:
        with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="bad batch"):
            torch.multiprocessing.start_processes(fail, nprocs=1, start_method=method)
        with pytest.raises(errors.WorkerDiedError) as caught:
            acc.take(2, timeout=0, on_death="raise")
        assert caught.value.reasons == ("ValueError: bad batch",)
        assert caught.value.contributors == (0,)
