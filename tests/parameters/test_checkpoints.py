"""What is saved is restored as a whole, or nothing is."""

from __future__ import annotations

from collections.abc import Iterator  # noqa: TC003  a fixture's return type is looked at
from pathlib import Path  # noqa: TC003  likewise
from typing import Any

import numpy as np
import pytest

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

Both = dict[str, Any]


@pytest.fixture
def both() -> Iterator[Both]:
    """Parameters and a group of sums of their gradients."""
    with (
        Parameters({"a": np.zeros((4, 2)), "b": np.ones(3)}, optimizer=optim.Adam(0.1)) as params,
        AccumulatorGroup(params.member_specs(["a"]), reduction_type="SUM") as group,
    ):
        yield {"grads": group, "params": params}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where to save."""
    return tmp_path / "checkpoint.npz"


def apply(both: Both, seed: int = 0) -> None:
    """Put a gradient in."""
    rng = np.random.default_rng(seed)
    gradient = {"a": ([1, 3], rng.standard_normal((2, 2))), "b": rng.standard_normal(3)}
    assert both["grads"].apply(gradient, both["grads"].global_step, contributor=seed)


def one_round(both: Both, seed: int = 0) -> None:
    """Make a round of one gradient."""
    apply(both, seed)
    with both["grads"].round(1) as taken:
        both["params"].update(taken)


def everything(both: Both) -> dict[str, bytes]:
    """All that is saved."""
    return {
        f"{name}.{key}": saved.tobytes()
        for name, one in both.items()
        for key, saved in one.state().items()
    }


def test_a_run_goes_on_from_where_it_was_saved(both: Both, path: Path) -> None:
    one_round(both, 1)
    apply(both, 2)  # pending
    shmacc.save(path, both)
    saved = everything(both)
    one_round(both, 3)
    one_round(both, 4)
    shmacc.load(path, both)
    assert everything(both) == saved
    assert (both["params"].step, both["grads"].global_step) == (1, 1)
    assert both["grads"].contributors().tolist() == [2]


@pytest.mark.parametrize("updated", [False, True])
def test_in_a_block_it_is_what_the_update_made_it(both: Both, path: Path, *, updated: bool) -> None:
    one_round(both, 1)
    apply(both, 2)
    with both["grads"].round(1) as taken:
        if updated:
            both["params"].update(taken)
        shmacc.save(path, both)
        if not updated:
            both["params"].update(taken)
    after = everything(both)
    shmacc.load(path, both)
    assert both["params"].step == both["grads"].global_step == 1 + updated
    if not updated:
        with both["grads"].round(1, timeout=0) as taken:
            both["params"].update(taken)
    assert everything(both) == after


def test_an_existing_file_is_replaced_at_once(both: Both, path: Path) -> None:
    path.write_text("something else")
    shmacc.save(path, both)
    shmacc.load(path, both)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_is_left_of_a_save_that_fails(both: Both, path: Path) -> None:
    shmacc.save(path, both)
    before = path.read_bytes()
    both["params"].close()
    with pytest.raises(errors.FailedPreconditionError, match="closed"):
        shmacc.save(path, both)
    with pytest.raises(FileNotFoundError):
        shmacc.save(path.parent / "nowhere" / "file", {"grads": both["grads"]})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_does_not_fit_restores_nothing(both: Both, path: Path) -> None:
    one_round(both, 1)
    shmacc.save(path, both)
    one_round(both, 2)
    before = everything(both)
    group, params = both["grads"], both["params"]
    with Parameters({"a": np.zeros((4, 2))}, optimizer=optim.Adam(0.1)) as other:
        for wrong in (
            {"grads": group},
            {**both, "more": group},
            {"grads": group, "params": other},
            {"grads": params, "params": group},
        ):
            with pytest.raises(errors.InvalidArgumentError):
                shmacc.load(path, wrong)
    assert everything(both) == before


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_other_files_are_refused(both: Both, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(errors.DataLossError, match=r"no file of shmacc\.save"):
        shmacc.load(path, both)


def test_a_damaged_file_is_refused(both: Both, path: Path) -> None:
    shmacc.save(path, both)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)
    before = everything(both)
    with pytest.raises((errors.DataLossError, errors.InvalidArgumentError)):
        shmacc.load(path, both)
    assert everything(both) == before


@pytest.mark.parametrize("what", [None, {"a": 1}, {1: None}])
def test_what_cannot_be_saved_is_refused(path: Path, what: Any) -> None:
    for call in (shmacc.save, shmacc.load):
        with pytest.raises(errors.InvalidArgumentError):
            call(path, what)
    assert not path.exists()
