"""A checkpoint is restored as a whole or not at all: it is checked before any change."""

import enum
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.support import EVERY_INSTANT, everything

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

Both = dict[str, Any]


@pytest.fixture
def both() -> Iterator[Both]:
    """Yield parameters and a group that sums their gradients."""
    with (
        Parameters({"a": np.zeros((4, 2)), "b": np.ones(3)}, optimizer=optim.Adam(0.1)) as params,
        AccumulatorGroup(params.member_specs(["a"]), reduction_type="SUM") as group,
    ):
        yield {"grads": group, "params": params}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the checkpoint."""
    return tmp_path / "checkpoint.npz"


def apply(both: Both, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    gradient = {"a": ([1, 3], rng.standard_normal((2, 2))), "b": rng.standard_normal(3)}
    assert both["grads"].apply(gradient, both["grads"].global_step, contributor=seed)


def one_round(both: Both, seed: int = 0) -> None:
    apply(both, seed)
    with both["grads"].round(1) as taken:
        both["params"].update(taken)


TEXTS: Final = {
    optim.SGD(0.1, 0.9): "SGD(learning_rate=0.1, momentum=0.9, nesterov=False)",
    optim.Adagrad(0.1): "Adagrad(learning_rate=0.1, initial_accumulator_value=0.1, epsilon=0.0, "
    "rowwise=False)",
    optim.RMSprop(0.1): "RMSprop(learning_rate=0.1, rho=0.9, momentum=0.0, epsilon=1e-10)",
    optim.Adam(0.1): "Adam(learning_rate=0.1, beta_1=0.9, beta_2=0.999, epsilon=1e-08)",
    optim.Ftrl(0.1): "Ftrl(learning_rate=0.1, learning_rate_power=-0.5, "
    "initial_accumulator_value=0.1, l1=0.0, l2=0.0)",
    None: "None",
}


@pytest.mark.parametrize(("optimizer", "written"), TEXTS.items(), ids=repr)
def test_a_saved_state_has_the_documented_text_of_its_optimizer(
    optimizer: optim.Optimizer | None, written: str
) -> None:
    """The text must never change, since saved files contain it. It omits options that are off."""
    with Parameters({"a": np.ones(3)}, optimizer=optimizer) as params:
        state = params.state()
        assert state["specs"].tolist() == [f"float64 [3] {written}"]
        params.restore(state | {"0.array": np.full(3, 2.0)})
        assert params["a"].tolist() == [2.0] * 3


def test_a_state_with_other_options_of_the_optimizer_is_refused() -> None:
    given = (
        *(optim.Adam(0.1), optim.Adam(0.1, weight_decay=0.1), optim.Adam(0.1, as_torch=True)),
        *(optim.Adam(0.1, constraint=optim.Clip(-1, high)) for high in (1, 2)),
    )
    for one in given:
        with Parameters({"a": np.ones(3)}, optimizer=one) as params:
            state = params.state()
        for other in given:
            with Parameters({"a": np.ones(3)}, optimizer=other) as params:
                if other == one:
                    params.restore(state)
                else:
                    with pytest.raises(errors.InvalidArgumentError, match="state of array 'a'"):
                        params.restore(state)


def test_a_load_restores_a_run_as_it_was_saved(both: Both, path: Path) -> None:
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
def test_a_save_in_a_block_has_the_blocks_update(both: Both, path: Path, *, updated: bool) -> None:
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


def test_a_failed_save_keeps_the_old_file_and_adds_none(both: Both, path: Path) -> None:
    shmacc.save(path, both)
    before = path.read_bytes()
    both["params"].close()
    with pytest.raises(errors.FailedPreconditionError, match="closed"):
        shmacc.save(path, both)
    with pytest.raises(FileNotFoundError):
        shmacc.save(path.parent / "nowhere" / "file", {"grads": both["grads"]})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_checkpoint_that_does_not_fit_restores_nothing(both: Both, path: Path) -> None:
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


def test_files_that_save_did_not_write_are_refused(both: Both, path: Path) -> None:
    for content in (b"", b"nothing of the kind"):
        path.write_bytes(content)
        with pytest.raises(errors.DataLossError, match=r"no file of shmacc\.save"):
            shmacc.load(path, both)
    foreign = path.with_suffix(".npy"), path.with_suffix(".other"), path.with_suffix(".zip")
    np.save(foreign[0], np.ones(3))
    with foreign[1].open("wb") as file:
        np.savez(file, weights=np.ones(3))
    with zipfile.ZipFile(foreign[2], "w") as archive:
        archive.writestr("readme.txt", "hello")
    for file_name, said in zip(
        foreign, ("it is one array", "'weights'", "'readme.txt'"), strict=True
    ):
        with pytest.raises(errors.DataLossError, match=rf"no file of shmacc\.save: .*{said}"):
            shmacc.load(file_name, both)


def test_objects_that_cannot_be_saved_are_refused(both: Both, path: Path) -> None:
    names = "a\0b", "\0", "\udc80", "a\ud800", "x" * 65001, "é" * 32501, "x" * 2**20
    not_given_back = [{name: both["params"]} for name in names]
    no_mappings: list[Any] = [None, {"a": 1}, {1: None}]
    for what in [*no_mappings, *not_given_back]:
        for call in (shmacc.save, shmacc.load):
            with pytest.raises(errors.InvalidArgumentError):
                call(path, what)
    assert not path.exists()


def test_any_name_can_be_saved_and_loaded(both: Both, path: Path) -> None:
    for name in ("a/b", "a b", "ä", "..", "/", "x" * 300, "a.npy", "file", "x" * 65000):
        what = {name: both["params"], "group": both["grads"]}
        shmacc.save(path, what)
        shmacc.load(path, what)


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
    "a group's count below 0": ("grads", {"count": np.array(-1)}),
    "a group's step with a fraction": ("grads", {"step": np.array(0.5)}),
    "a member twice": ("grads", {"members": np.array(["a", "b", "a"])}),
    "row numbers that are missing": ("grads", {"0.indices": ...}),
    "row numbers below 0": ("grads", {"0.indices": np.array([-1, 3])}),
}


class Name(str, enum.Enum):  # noqa: UP042  StrEnum is shown as its string
    """An enum whose members are strings, although f-strings show them differently."""

    PARAMS = "params"


def test_a_name_may_be_a_member_of_an_enum_of_strings(both: Both, path: Path) -> None:
    shmacc.save(path, {Name.PARAMS: both["params"]})
    shmacc.load(path, {"params": both["params"]})


def test_a_wrong_state_is_refused_and_changes_nothing(both: Both) -> None:
    one_round(both, 1)
    apply(both, 1)
    before = everything(both)
    for what, (name, change) in WRONG.items():
        state = both[name].state() | change
        state = {key: value for key, value in state.items() if value is not ...}
        with pytest.raises(errors.InvalidArgumentError):
            both[name].restore(state)
        assert everything(both) == before, what
    with both["grads"].round(1) as taken:
        assert both["params"].update(taken)


def _damaged(content: bytes) -> Iterator[bytes]:
    """Yield the file with some bits flipped, and cut off at some places."""
    flips = (0x01, 0x80, 0xFF)
    for number, at in enumerate(range(0, len(content), 7 if EVERY_INSTANT else 47)):
        for flip in flips if EVERY_INSTANT else flips[number % 3 :][:1]:
            yield content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
    for length in range(0, len(content), 131 if EVERY_INSTANT else 1001):
        yield content[:length]


def test_a_damaged_checkpoint_is_refused_or_restores_the_same(both: Both, path: Path) -> None:
    """zipfile, zlib and NumPy report damage by a dozen classes of errors."""
    apply(both, 1)
    shmacc.save(path, both)
    whole, saved = path.read_bytes(), everything(both)
    one_round(both, 2)
    before = everything(both)
    states = {name: one.state() for name, one in both.items()}
    came = {True: 0, False: 0}
    for content in _damaged(whole):
        path.write_bytes(content)
        try:
            shmacc.load(path, both)
        except (errors.DataLossError, errors.InvalidArgumentError, errors.ResourceExhaustedError):
            came[False] += 1
            assert everything(both) == before
        else:
            came[True] += 1
            assert everything(both) == saved
            for name, one in both.items():
                one.restore(states[name])
    assert came[False] > 30
    assert came[True] > 0


def test_a_state_from_a_damaged_savez_file_is_refused(both: Both) -> None:
    """``np.load`` reads an array only when `restore` uses it, so damage shows late."""
    one_round(both)
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
