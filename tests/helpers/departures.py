"""Helpers for tests in which processes leave, fail or die, and takes report it."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pytest
from helpers.apart import Apart, Pipe

import shmacc
from shmacc import ConditionalAccumulator, errors

NAME: Final = "gone"


def make() -> ConditionalAccumulator:
    return ConditionalAccumulator("f8", (), NAME, reduction_type="SUM", lanes=2)


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with make() as made:
        yield made
        made.unlink()


def news(acc: Any) -> tuple[Any, ...] | None:
    """Return pids, reasons and contributors of the deaths that a take reports; None: no death."""
    try:
        acc.take(2**40, timeout=0, on_death="raise")
    except errors.WorkerDiedError as error:
        return error.pids, error.reasons, error.contributors
    except errors.DeadlineExceededError:
        return None
    raise AssertionError


def _stay(name: str, *, pipe: Pipe) -> None:
    with shmacc.attach(name):
        pipe.turn()


def bystander(name: str) -> Apart:
    """Start a process that attaches, and stays until told to end."""
    return Apart(_stay, name).ready()


def _work(name: str, contributor: int | None, *, pipe: Pipe) -> None:
    own = ConditionalAccumulator.attach(name)
    own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
    pipe.turn()
    own.close()


def worker(contributor: int | None = None, name: str = NAME) -> Apart:
    """Start a process that applies a gradient, and stays until told to end."""
    return Apart(_work, name, contributor).ready()


def fail_in_a_block(error: BaseException, contributor: int, *, pipe: Pipe) -> None:
    """Leave an accumulator's `with` block by an exception; the process lives on."""
    with suppress(type(error)), ConditionalAccumulator.attach(NAME) as own:
        own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
        raise error
    pipe.turn()
