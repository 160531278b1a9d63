"""A state or a checkpoint is checked whole before anything is changed."""

from __future__ import annotations

import io
from collections.abc import Iterator  # noqa: TC003  a fixture's return type is looked at
from pathlib import Path  # noqa: TC003  likewise
from typing import Any, Final

import numpy as np
import pytest

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

Both = dict[str, Any]


@pytest.fixture
def both() -> Iterator[Both]:
    """Parameters after a round, and their group with a gradient."""
    with (
        Parameters({"a": np.ones((4, 2)), "b": np.ones(3)}, optimizer=optim.Adam(0.1)) as params,
        AccumulatorGroup(params.member_specs(["a"])) as group,
    ):
        made = {"params": params, "group": group}
        gradient = {"a": ([1, 3], np.ones((2, 2))), "b": np.ones(3)}
        for step in range(2):
            group.apply(gradient, step, contributor=1)
            if step == 0:
                with group.round(1) as taken:
                    params.update(taken)
        yield made


def everything(both: Both) -> dict[str, bytes]:
    """All that is saved."""
    return {
        f"{name}.{key}": saved.tobytes()
        for name, one in both.items()
        for key, saved in one.state().items()
    }


WRONG: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "a count below 0": ("params", {"updates": np.array([-1, 1])}),
    "a count that the next update takes past its range": (
        "params",
        {"updates": np.array([2**63 - 1, 1])},
    ),
    "too few counts": ("params", {"updates": np.array([1])}),
    "too many counts": ("params", {"updates": np.array([1, 1, 1])}),
    "counts in a table": ("params", {"updates": np.array([[1, 1]])}),
    "counts that are no integers": ("params", {"updates": np.array([1.0, 1.0])}),
    "counts that do not fit": ("params", {"updates": np.array([1, 2**64 - 1], np.uint64)}),
    "no counts": ("params", {"updates": None}),
    "a step that is none": ("params", {"step": np.array([1, 2])}),
    "a step with a fraction": ("params", {"step": np.array(1.5)}),
    "a step out of range": ("params", {"step": np.array(2**63, np.uint64)}),
    "a step before all others": ("params", {"step": np.array(-(2**63))}),
    "fewer specs than arrays": ("params", {"specs": np.array(["float64 [4,2] None"])}),
    "an array twice": ("params", {"arrays": np.array(["a", "b", "a"])}),
    "names that are no strings": ("params", {"arrays": np.array([1, 2])}),
    "contents of another shape": ("params", {"0.array": np.ones((2, 4))}),
    "contents that are none": ("params", {"0.array": {}}),
    "a slot that is missing": ("params", {"1.m": ...}),
    "a group's count below 0": ("group", {"count": np.array(-1)}),
    "a group's step with a fraction": ("group", {"step": np.array(0.5)}),
    "a member twice": ("group", {"members": np.array(["a", "b", "a"])}),
    "row numbers that are missing": ("group", {"0.indices": ...}),
    "row numbers below 0": ("group", {"0.indices": np.array([-1, 3])}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_state_is_refused_and_changes_nothing(both: Both, what: str) -> None:
    name, change = WRONG[what]
    state = both[name].state()
    for key, value in change.items():
        if value is ...:
            del state[key]
        else:
            state[key] = value
    before = everything(both)
    with pytest.raises(errors.InvalidArgumentError):
        both[name].restore(state)
    assert everything(both) == before
    both["params"].update  # noqa: B018  still open
    with both["group"].round(1) as taken:
        assert both["params"].update(taken)


def _damaged(content: bytes) -> Iterator[bytes]:
    """Every seventh byte flipped in some bits, and the file cut off at some places."""
    for at in range(0, len(content), 7):
        for flip in (0x01, 0x80, 0xFF):
            yield content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    for length in range(0, len(content), 131):
        yield content[:length]


def test_a_damaged_checkpoint_is_refused_or_the_same(both: Both, tmp_path: Path) -> None:
    """zipfile, zlib and NumPy raise a dozen classes of errors for it."""
    path = tmp_path / "checkpoint.npz"
    shmacc.save(path, both)
    whole, saved = path.read_bytes(), everything(both)
    with both["group"].round(1) as taken:
        both["params"].update(taken)
    before = everything(both)
    states = {name: one.state() for name, one in both.items()}
    refused = 0
    for content in _damaged(whole):
        path.write_bytes(content)
        try:
            shmacc.load(path, both)
        except (errors.DataLossError, errors.InvalidArgumentError, errors.ResourceExhaustedError):
            refused += 1
            assert everything(both) == before
        else:
            assert everything(both) == saved
            for name, one in both.items():
                one.restore(states[name])
    assert refused > len(whole) // 7


def test_a_damaged_file_of_a_state_is_refused(both: Both) -> None:
    """``np.load`` reads an array when it is asked for."""
    before = everything(both)
    for one in both.values():
        file = io.BytesIO()
        np.savez_compressed(file, **one.state())
        content = bytearray(file.getvalue())
        at = content.index(b"step.npy") + len(b"step.npy")
        content[at : at + 40] = b"\xff" * 40
        with (
            np.load(io.BytesIO(bytes(content))) as lazy,
            pytest.raises((errors.DataLossError, errors.InvalidArgumentError)),
        ):
            one.restore(lazy)
    assert everything(both) == before


def test_an_array_alone_is_no_checkpoint(both: Both, tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    np.save(path, np.ones(3))
    with pytest.raises(errors.DataLossError, match=r"no file of shmacc\.save"):
        shmacc.load(path, both)


@pytest.mark.parametrize("name", ["a\0b", "\0", "\udc80", "a\ud800"])
def test_a_name_that_a_file_does_not_give_back_is_refused(
    both: Both, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "checkpoint.npz"
    for call in (shmacc.save, shmacc.load):
        with pytest.raises(errors.InvalidArgumentError, match="NUL"):
            call(path, {name: both["params"]})
    assert not path.exists()


@pytest.mark.parametrize("name", ["a/b", "a b", "ä", "..", "/", "x" * 300, "a.npy", "file"])
def test_any_other_name_is_given_back(both: Both, tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint.npz"
    what = {name: both["params"], "group": both["group"]}
    shmacc.save(path, what)
    shmacc.load(path, what)
