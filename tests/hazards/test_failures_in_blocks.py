"""An exception that leaves an accumulator's block is a failure, and ends one wait for gradients."""

import concurrent.futures
import multiprocessing
import os
import threading
from contextlib import suppress
from typing import Any

import pytest
from helpers.apart import Apart, Pipe
from helpers.departures import NAME, fail_in_a_block, news
from helpers.departures import acc as acc
from helpers.support import LONG, until

import shmacc
from shmacc import ConditionalAccumulator, errors, raw_ops


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad batch"), "ValueError: bad batch"),
        (KeyError("w"), "KeyError: 'w'"),
        (RuntimeError(), "RuntimeError"),
        (GeneratorExit(), "GeneratorExit"),  # an error in a loop may have closed the generator
        (SystemExit("no data"), "SystemExit: no data"),
        (ValueError("\U0001f600" * 1000), "ValueError: " + "\U0001f600" * 200),
        (ValueError("a\nb\x00c\ud800"), "ValueError: a\nb\x00c?"),
        # This library's errors end with what to do, which is not cut off.
        (errors.DataLossError("é" * 300 + ": do"), "DataLossError: " + "é" * 300 + ": do"),
        (
            errors.DataLossError("é" * 1000 + ": do"),
            "DataLossError: " + "é" * 243 + " ... " + "é" * 248 + ": do",
        ),
    ],
)
def test_an_exception_that_leaves_the_block_is_reported(
    acc: ConditionalAccumulator, error: BaseException, reason: str
) -> None:
    with Apart(fail_in_a_block, error, 7).ready() as process:
        assert news(acc) == ((process.pid,), (reason,), (7,))
        assert news(acc) is None
        assert acc.stats().attached == 1
        process.finish()
    assert news(acc) is None


@pytest.mark.parametrize("status", [None, False])
def test_an_exit_with_success_is_no_failure(acc: ConditionalAccumulator, status: Any) -> None:
    with Apart(fail_in_a_block, SystemExit(status), 7).ready():
        assert news(acc) is None


def test_an_exit_is_reported_though_its_contexts_form_a_cycle(acc: ConditionalAccumulator) -> None:
    """The exception that a program handled by its exit is looked for in the contexts."""
    error, other = SystemExit(1), SystemExit(2)
    error.__context__, other.__context__ = other, error
    with Apart(fail_in_a_block, error, 7).ready() as process:
        assert news(acc) == ((process.pid,), ("SystemExit: 1",), (7,))
        process.finish()


def test_a_raw_op_that_refuses_its_argument_is_no_failure(acc: ConditionalAccumulator) -> None:
    """The op opens the accumulator by its name; the process goes on."""

    def refuse(*, pipe: Pipe) -> None:
        assert raw_ops.AccumulatorApplyGradient(NAME, shmacc.NEVER_STALE, 1.0)
        with suppress(errors.InvalidArgumentError):
            raw_ops.AccumulatorApplyGradient(NAME, shmacc.NEVER_STALE, [1.0])
        with suppress(errors.InvalidArgumentError):
            raw_ops.AccumulatorTakeGradient(NAME, 1, "int8")
        pipe.turn()

    with Apart(refuse).ready() as process:
        assert news(acc) is None
        process.finish()


def test_a_failure_ends_a_wait_that_has_begun(acc: ConditionalAccumulator) -> None:
    waits: list[Any] = []

    def wait() -> None:
        try:
            acc.take(9, timeout=LONG, on_death="raise")
        except errors.WorkerDiedError as error:
            waits.append(error.reasons)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: acc.stats().waiting == 1)
    with Apart(fail_in_a_block, ValueError("bad"), 7).ready():
        thread.join(LONG)
    assert waits == [("ValueError: bad",)]


def test_a_failure_is_reported_while_the_process_is_attached(acc: ConditionalAccumulator) -> None:
    """Another handle keeps the process attached. An exception through two blocks is one failure."""

    def fail(*, pipe: Pipe) -> None:
        kept = ConditionalAccumulator.attach(NAME)
        with (
            suppress(ValueError),
            ConditionalAccumulator.attach(NAME),
            ConditionalAccumulator.attach(NAME) as own,
        ):
            own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=3)
            raise ValueError("bad")
        pipe.turn()
        kept.apply_grad(1.0, shmacc.NEVER_STALE, contributor=4)
        kept.close()
        pipe.turn()

    with Apart(fail).ready() as process:
        assert acc.stats().attached == 2
        assert news(acc) == ((process.pid,), ("ValueError: bad",), (3,))
        assert news(acc) is None
        process.turn()
        assert acc.stats().attached == 1
        assert news(acc) is None
        process.finish()


def test_an_exception_raised_again_is_another_failure(acc: ConditionalAccumulator) -> None:
    """For example, a future raises the same exception each time."""

    def fail(*, pipe: Pipe) -> None:
        error = ValueError("bad")
        for contributor in (1, 2):
            with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
                own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
                raise error
            pipe.turn()

    with Apart(fail) as process:
        for contributor in (1, 2):
            process.hear()
            assert news(acc) == ((process.pid,), ("ValueError: bad",), (contributor,))
            assert news(acc) is None
            process.say()
        process.result()


def fail_in_pool() -> None:
    with ConditionalAccumulator.attach(NAME):
        raise ValueError("bad")


def test_an_exception_from_another_process_is_a_failure(acc: ConditionalAccumulator) -> None:
    """The exception left a block in a pool's worker, and the future raises it again here."""
    context: Any = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        error = executor.submit(fail_in_pool).exception()
    assert isinstance(error, ValueError)
    assert news(acc) is None
    with Apart(fail_in_a_block, error, 7).ready() as process:
        assert news(acc) == ((process.pid,), ("ValueError: bad",), (7,))


def test_a_forked_childs_exception_is_not_its_parents(acc: ConditionalAccumulator) -> None:
    """The child fails in its parent's block, but has not used the accumulator."""

    def fork(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0, shmacc.NEVER_STALE)
            child = os.fork()
            if child == 0:
                with suppress(ValueError), own:
                    raise ValueError("the child's")
                os._exit(0)
            os.waitpid(child, 0)
            pipe.turn()

    with Apart(fork).ready() as process:
        assert news(acc) is None
        process.finish()
    assert news(acc) is None


def test_a_failure_is_reported_after_its_process_has_left(acc: ConditionalAccumulator) -> None:
    def fail(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as kept:
            with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
                own.apply_grad(1.0, shmacc.NEVER_STALE)
                raise ValueError("bad")
            kept.apply_grad(1.0, shmacc.NEVER_STALE)
        pipe.say()

    with Apart(fail).ready() as process:
        process.wait()
        assert news(acc) == ((process.pid,), ("ValueError: bad",), ())
        assert news(acc) is None
