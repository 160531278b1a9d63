"""Applies without ``local_step`` become stale when the step advances, and a warning says so.

Each handle warns once, and names the remedy.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import raw_ops

MAKE: Final[dict[str, Callable[[], Any]]] = {
    "dense": lambda: shmacc.ConditionalAccumulator("f8", (2,)),
    "sparse": lambda: shmacc.SparseConditionalAccumulator("f8", (4, 2)),
    "group": lambda: shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,), "f8")}),
}
ONE: Final = np.ones((1, 2))
# Each way to apply with and without a step: `step` is {} or {"local_step": ...}.
APPLIES: Final[dict[str, Callable[..., bool]]] = {
    "dense: an array": lambda acc, **step: acc.apply_grad(ONE[0], **step),
    "dense: converted": lambda acc, **step: acc.apply_grad([1, 2], weight=3, **step),
    "dense: a partial": lambda acc, **step: acc.apply_partial(partial_of("dense"), **step),
    "dense: a partial of nothing": lambda acc, **step: acc.apply_partial(
        partial_of("dense", 0), **step
    ),
    "sparse: arrays": lambda acc, **step: acc.apply_grad([1], ONE, **step),
    "sparse: converted": lambda acc, **step: acc.apply_grad([1], [[1, 2]], [4, 2], **step),
    "sparse: what does not fit": lambda acc, **step: acc.apply_grad([1], [[1.0]], **step),
    "sparse: slices": lambda acc, **step: acc.apply_indexed_slices_grad(
        shmacc.IndexedSlices(ONE, [1]), **step
    ),
    "sparse: a partial": lambda acc, **step: acc.apply_partial(partial_of("sparse"), **step),
    "group: a partial": lambda acc, **step: acc.apply_partial(partial_of("group"), **step),
}


def partial_of(kind: str, gradients: int = 1) -> Any:
    with MAKE[kind]() as acc:
        for _ in range(gradients):
            if kind == "group":
                acc.apply({"w": ONE[0]}, 0)
            else:
                acc.apply_grad(*([[1], ONE] if kind == "sparse" else [ONE[0]]))
        return acc.take_partial(gradients)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage()
        for one in caplog.records
        if one.name == "shmacc" and one.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("how", APPLIES)
def test_a_stale_default_step_warns_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with MAKE[how.partition(":")[0]]() as acc:
        apply = APPLIES[how]
        if how != "sparse: what does not fit":
            apply(acc)
        assert told(caplog) == []
        acc.advance_step(7)
        assert not apply(acc, local_step=0)  # an explicit step is intended: no warning
        assert told(caplog) == []
        for _ in range(3):
            assert not apply(acc)
        (warning,) = told(caplog)
        for said in (acc.shared_name, "step 7", "local_step", "shmacc.NEVER_STALE"):
            assert said in warning
        with closing(type(acc).attach(acc.shared_name)) as another:
            assert not apply(another)
            assert len(told(caplog)) == 2


def test_correct_uses_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with MAKE["dense"]() as acc:
        acc.take_partial(0, seal=True)
        assert not acc.apply_grad(ONE[0])  # sealed, not stale
        acc.unseal()
        acc.set_global_step(-1)
        assert acc.apply_grad(ONE[0])  # the default step is ahead
        acc.set_global_step(5)
        assert acc.apply_grad(ONE[0], shmacc.NEVER_STALE)
        assert not raw_ops.AccumulatorApplyGradient(acc.accumulator_ref, 0, ONE[0])
    assert [one for one in told(caplog) if "dropped" in one] == []


def test_the_default_step_in_the_signature_is_0() -> None:
    """TensorFlow's signature has the same default."""
    for kind in (shmacc.ConditionalAccumulator, shmacc.SparseConditionalAccumulator):
        default = inspect.signature(kind.apply_grad).parameters["local_step"].default
        assert default == 0
        assert repr(default) == "0"


def test_repeated_drops_after_a_restore_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that never reads the new step loses every gradient. A single drop is normal."""
    with MAKE["dense"]() as acc:
        step = acc.global_step
        acc.restore(acc.state())
        assert not acc.apply_grad(ONE[0], step)
        assert told(caplog) == []
        for _ in range(2):
            assert not acc.apply_grad(ONE[0], step)
        (warning,) = told(caplog)
        assert "restored" in warning
        assert "global_step" in warning
        assert acc.apply_grad(ONE[0], acc.global_step)


def test_the_default_step_is_converted_to_0() -> None:
    assert shmacc._values.arguments.int64(shmacc._values.arguments.NO_STEP, "it") == 0
