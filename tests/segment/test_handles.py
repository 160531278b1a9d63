"""Private and named handles: several in one process, pickled, closed."""

import os
import pickle
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, apply, in_shared_memory

import shmacc
from shmacc import errors


@pytest.mark.parametrize("kind", KINDS)
def test_private_segments_have_no_name(kind: Any, namespace: str) -> None:
    with kind(np.float32) as one, kind(np.float32, None, "") as two:
        assert one.shared_name
        assert one.shared_name != two.shared_name
        apply(one)
        with shmacc.attach(one.shared_name) as same, pickle.loads(pickle.dumps(one)) as again:
            assert same.num_accumulated() == again.num_accumulated() == 1
            assert two.num_accumulated() == 0
        assert one.num_accumulated() == 1
        for word in ("attach", "error", "replace"):  # always new
            with kind("f4", if_exists=word, unlink_on_close=True) as new:
                assert new.num_accumulated() == 0
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_without_a_shared_name_warns_that_it_is_private(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Users of TensorFlow expect other processes to find it by its name."""
    with (
        kind(np.float32, name="grads") as private,
        kind(np.float32),
        kind(np.float32, shared_name="one", name="grads") as shared,
        kind(np.float32, shared_name="one", name="other"),
        pickle.loads(pickle.dumps(private)),
    ):
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("shmacc", "WARNING")
        for part in ("name='grads'", kind.__name__, "private", "shared_name='grads'"):
            assert part in record.getMessage()
        shared.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_that_an_earlier_run_left_is_one_line_in_the_log(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose it is, since when, and its step."""
    caplog.set_level("INFO", "shmacc")
    kind(np.float32, shared_name="one").close()
    kind(np.float32, shared_name="one").close()
    assert caplog.records == [], "nothing is left in it"
    with kind.attach("one") as left:
        apply(left)
    kind(np.float32, shared_name="one").close()
    with kind.attach("one") as again:
        again.take(1)
    shmacc.attach("one").close()
    assert {(record.name, record.levelname) for record in caplog.records} == {("shmacc", "INFO")}
    states = ["its step is 0, gradients pending: 1"] * 2 + ["its step is 1, gradients pending: 0"]
    for record, state in zip(caplog.records, states, strict=True):
        assert "'one'" in record.getMessage()
        assert f"made by uid {os.geteuid()} at" in record.getMessage()
        assert record.getMessage().endswith(state)
    with kind.attach("one") as last:
        last.unlink()


CLOSED: Final[list[Callable[[Any], Any]]] = [
    apply,
    lambda acc: acc.take(1, timeout=0),
    lambda acc: acc.take_grad(1, timeout=0),
    lambda acc: acc.take_partial(0),
    lambda acc: acc.unseal(),
    lambda acc: acc.advance_step(4),
    lambda acc: acc.wait_step(-1),
    lambda acc: acc.num_accumulated(),
    lambda acc: acc.set_global_step(1),
    lambda acc: acc.global_step,
    lambda acc: acc.stats(),
    lambda acc: acc.cancel(),
    lambda acc: acc.state(),
    lambda acc: acc.snapshot(),
    lambda acc: acc.contributors(),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_handle_raises(kind: Any) -> None:
    acc = kind(np.float32, (3, 2), "one")
    with acc:
        state = acc.state()
        acc.unlink()
    for call in CLOSED:
        with pytest.raises(errors.FailedPreconditionError):
            call(acc)
    with pytest.raises(errors.FailedPreconditionError):
        acc.restore(state)
    # What it was can still be said, as for a closed file's name.
    assert (acc.dtype, acc.shape, acc.reduction_type) == (np.float32, (3, 2), "MEAN")
    assert acc.shared_name == "one"
    assert "one" in repr(acc)
