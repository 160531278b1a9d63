"""Private and named handles: several in one process, unpickled ones, and closed ones."""

import os
import pickle
from typing import Any

import numpy as np
import pytest
from helpers.opening import KINDS, USES, apply, in_shared_memory

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
        for word in ("attach", "error", "replace"):  # a private segment is always new
            with kind("f4", if_exists=word, unlink_on_close=True) as new:
                assert new.num_accumulated() == 0
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_alone_warns_it_is_private(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Users of TensorFlow expect that other processes find an accumulator by its `name`."""
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
def test_attaching_to_a_segment_that_an_earlier_run_left_logs_one_line(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says who made the segment and when, and its step."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_handle_raises(kind: Any) -> None:
    acc = kind(np.float32, (3, 2), "one")
    with acc:
        state = acc.state()
        acc.unlink()
    for call in (apply, kind.stats, *USES):
        with pytest.raises(errors.FailedPreconditionError):
            call(acc)
    with pytest.raises(errors.FailedPreconditionError):
        acc.restore(state)
    # A closed handle still has its dtype, shape and name, as a closed file has its name.
    assert (acc.dtype, acc.shape, acc.reduction_type) == (np.float32, (3, 2), "MEAN")
    assert acc.shared_name == "one"
    assert "one" in repr(acc)
