"""A wait that lasts too long, in any process, ends the test; the error has the counters."""

from collections.abc import Callable, Iterator

import pytest
from helpers.apart import run_apart
from helpers.patience import Watchdog

from shmacc import ConditionalAccumulator


@pytest.fixture(autouse=True)
def impatient(namespace: str) -> Iterator[None]:
    with Watchdog() as watchdog:
        watchdog.watch(namespace, 0.2)
        yield


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator("f4", (), "acc", unlink_on_close=True) as made:
        made.set_global_step(3)
        assert made.apply_grad(1.0, 3)
        assert not made.apply_grad(1.0, 2)
        yield made


def test_the_error_names_the_long_wait_and_the_counters(acc: ConditionalAccumulator) -> None:
    said = r"pid \d+ waits for 2 gradients in acc: 1 applied, 1 dropped, 1 pending, step 3"
    with pytest.raises(AssertionError, match=said):
        acc.take(2)


@pytest.mark.parametrize("wait", [lambda acc: acc.wait_step(3), lambda acc: acc.take(2)])
def test_a_long_wait_in_a_child_ends_the_test(
    acc: ConditionalAccumulator, wait: Callable[[ConditionalAccumulator], object]
) -> None:
    with pytest.raises(AssertionError, match=r"waits for (the step|2 gradients) in acc"):
        run_apart(wait, acc)
