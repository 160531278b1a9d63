"""Everyday use of torch: warm starts, evaluators, loaders, compiled models, ends of programs."""

import copy
import io
import multiprocessing.process
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from helpers.apart import Apart
from helpers.support import LONG
from other_packages.torch_training import (
    NAME,
    Words,
    backward,
    contents,
    hand_over,
    make_round,
    pair,
    same,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shmacc
from shmacc import errors
from shmacc.optim import SGD, Adam
from shmacc.torch import AsyncReplicas, Replica, StepSampler, SyncReplicas, Viewer, optimizer_of

# torch's compiler gives this warning about its own code.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
of_each = pytest.mark.parametrize(
    ("kind", "optimizer"), [(SyncReplicas, Adam(0.05)), (SyncReplicas, None), (AsyncReplicas, None)]
)


def train(replicas: Any, replica: Replica, model: nn.Module) -> None:
    backward(model, replica.global_step)
    make_round(replicas, replica)


@pytest.mark.parametrize(
    ("kind", "of"),
    [(SyncReplicas, "a state"), (AsyncReplicas, "a model"), (SyncReplicas, "a compiled model")],
)
def test_a_training_starts_from_a_trained_model(kind: Any, of: str) -> None:
    """The new training's slots are new. An existing training goes on from its own numbers."""
    trained = Words(1)
    initial = {
        "a state": trained.state_dict(),
        "a model": trained,
        "a compiled model": torch.compile(trained, backend="eager"),
    }[of]
    model, other = Words(), Words()
    with kind(model, NAME, total_num_replicas=1, optimizer=SGD(0.1), initial=initial) as replicas:
        with Replica(other, NAME, 0, timeout=0.01) as replica:
            same(contents(model), contents(trained))
            same(contents(other), contents(trained))
            train(replicas, replica, other)
        after, late = contents(model), Words()
        again = kind(late, NAME, total_num_replicas=1, optimizer=SGD(0.1), initial=initial)
        same(contents(late), after)
        assert not torch.equal(after["layer.weight"], trained.layer.weight)
        again.close()


def test_a_state_of_another_model_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        SyncReplicas(Words(), NAME, total_num_replicas=1, initial={})
    with (
        SyncReplicas(Words(), NAME, total_num_replicas=1) as replicas,
        pytest.raises(errors.InvalidArgumentError, match="initial="),
    ):
        replicas.load_state_dict(Words().state_dict())


@of_each
def test_a_model_can_be_trained_after_the_block(kind: Any, optimizer: Any) -> None:
    """First torch trains it, then another training does: fine-tuning with a new head."""
    model, other = Words(), Words()
    with pair(model, other, kind, optimizer=optimizer) as (replicas, replica):
        train(replicas, replica, other)
    before = contents(model)
    model.layer = nn.Linear(4, 2)
    backward(model, 5)
    torch.optim.SGD(model.parameters(), 0.5).step()
    model.zero_grad()
    assert not torch.equal(model.rows.weight, before["rows.weight"])
    tuned = contents(model)
    with pair(model, other, kind, optimizer=SGD(0.5)) as (replicas, replica):
        same(contents(other), tuned)
        train(replicas, replica, other)
        assert not torch.equal(model.layer.weight, tuned["layer.weight"])


@of_each
def test_a_viewer_has_the_model_of_one_step(kind: Any, optimizer: Any) -> None:
    """A viewer has no rank, its model is its own, and nobody waits for it."""
    model, other, seen = Words(), Words(), Words(3)
    with (
        kind(model, NAME, total_num_replicas=1, optimizer=optimizer) as replicas,
        Viewer(seen, NAME, timeout=LONG) as viewer,
        Replica(other, NAME, 0, timeout=0.01) as replica,
    ):
        steps = viewer.steps()
        assert next(steps) == viewer.snapshot() == 0
        same(contents(seen), contents(model))
        before = contents(seen)
        train(replicas, replica, other)
        same(contents(seen), before)
        assert next(steps) == 1
        same(contents(seen), contents(model))
        assert replicas.global_step == 1
        with torch.no_grad():
            seen.layer.weight.zero_()
        assert viewer.snapshot() == 1
        assert seen.layer.weight.any()
        train(replicas, replica, other)
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copy.copy(viewer)
        replicas.close()
        assert not viewer.running
        assert list(steps) == [2]
        same(contents(seen), contents(model))


def test_a_viewer_does_not_see_half_an_update() -> None:
    """The viewer waits for the end of a block, and refuses half an update that a block left."""
    model, other = Words(), Words()
    with (
        SyncReplicas(model, NAME, total_num_replicas=1) as replicas,
        Viewer(Words(3), NAME, timeout=0.01) as viewer,
        Replica(other, NAME, 0, timeout=0.01) as replica,
    ):
        backward(other, 0)
        hand_over(replica)
        with pytest.raises(ZeroDivisionError), replicas.round(timeout=LONG):  # noqa: PT012
            with torch.no_grad():
                model.layer.weight.zero_()
            with pytest.raises(errors.DeadlineExceededError):
                viewer.snapshot()
            raise ZeroDivisionError
        with pytest.raises(errors.FailedPreconditionError, match="half updated"):
            viewer.snapshot()
        replica.close()


def test_a_viewer_gets_the_last_step_though_active_has_entered_the_next_round() -> None:
    """No block has begun, so no parameter can be half updated."""
    model, other = Words(), Words()
    with (
        SyncReplicas(model, NAME, total_num_replicas=1) as replicas,
        Viewer(Words(3), NAME, timeout=LONG) as viewer,
        Replica(other, NAME, 0, timeout=0.01) as replica,
    ):
        train(replicas, replica, other)
        backward(other, 1)
        hand_over(replica)
        assert replicas.active == 1
        assert replicas._group.stats().round_pid is not None
        replicas.close()
        assert list(viewer.steps()) == [1]


def test_giving_up_an_ended_round_does_not_hide_another_chiefs_half_update() -> None:
    model, other = Words(), Words()
    with (
        pair(model, other) as (first, replica),
        SyncReplicas(Words(), NAME, total_num_replicas=1) as second,
    ):
        backward(other, 0)
        hand_over(replica)
        assert first.active == 1
        second.load_state_dict(second.state_dict())  # ends the round that the first has entered
        assert replica.step() is False
        backward(other, 0)
        hand_over(replica)
        with pytest.raises(ZeroDivisionError), second.round(timeout=LONG):  # noqa: PT012
            first._give_up()
            raise ZeroDivisionError
        with pytest.raises(errors.FailedPreconditionError, match="half updated"):
            second.round(timeout=LONG).__enter__()
        replica.close()


@pytest.mark.parametrize("optimizer", [None, SGD(0.5)], ids=["of torch", "of shmacc"])
@pytest.mark.parametrize("skips", [False, True], ids=["ends", "is skipped"])
def test_training_goes_on_from_a_state_loaded_in_a_block(optimizer: Any, *, skips: bool) -> None:
    model, other = Words(), Words()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        train(replicas, replica, other)
        saved = copy.deepcopy(replicas.state_dict())
        for _ in range(2):
            train(replicas, replica, other)
        backward(other, 3)
        hand_over(replica)
        with (  # noqa: PT012
            pytest.raises(errors.FailedPreconditionError, match="was ended before"),
            replicas.round(timeout=LONG) as update,
        ):
            replicas.load_state_dict(saved)
            if skips:
                update.skip()
        assert replica.step() is False
        assert (replicas.global_step, replica.global_step) == (1, 1)
        same(contents(model), saved["model"])
        train(replicas, replica, other)
        assert replicas.global_step == 2
        replica.close()


def test_reading_active_loses_no_round() -> None:
    """The next call gets the round, or the wait's error; a load or the end gives it up."""
    model, other = Words(), Words()
    with pair(model, other, optimizer=SGD(0.5)) as (replicas, replica):
        saved = copy.deepcopy(replicas.state_dict())
        assert replicas.active == 1
        train(replicas, replica, other)
        with pytest.raises(errors.DeadlineExceededError), replicas.round(timeout=0.01):
            pass
        assert replicas.active == 1, "it waits no longer than the last round"
        with pytest.raises(errors.DeadlineExceededError), replicas.round(timeout=LONG):
            pass
        backward(other, 1)
        hand_over(replica)
        assert replicas.active == 1
        assert replicas._group.stats().sealed
        replicas.load_state_dict(saved)
        assert not replicas._group.stats().sealed
        assert replica.step() is False
        assert (replicas.global_step, replica.global_step) == (0, 0)
        same(contents(model), saved["model"])
        train(replicas, replica, other)
        backward(other, 1)
        hand_over(replica)
        assert replicas.active == 1, "a gradient is there"
        with replicas.round(learning_rate=0.0) as update:
            assert update.step == 1
            with pytest.raises(errors.FailedPreconditionError), replicas.round():
                pass
            assert replicas.active == 1
        assert replica.step()
        backward(other, 2)
        hand_over(replica)
        assert replicas.active == 1
        replica.close()


DATA: Final = TensorDataset(torch.arange(50))


def batches(rank: int, stop: int) -> list[list[int]]:
    """Be a replica that trains on a loader, and stops before step `stop` without leaving."""
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = Words()
    seen: list[list[int]] = []
    replica = Replica(model, NAME, rank, timeout=LONG)
    sampler = StepSampler(DATA, replica, 4, epochs=2, seed=3)
    for (words,) in DataLoader(DATA, batch_sampler=sampler, num_workers=1):
        if replica.global_step == stop:
            replica.close()
            return seen
        seen.append(words.tolist())
        nn.functional.cross_entropy(model(words % 20), words % 2).backward()
        assert replica.step()
    replica.leave()
    replica.close()
    return seen


def test_a_restarted_replica_goes_on_with_its_data(start: Callable[..., Apart]) -> None:
    with SyncReplicas(Words(), NAME, total_num_replicas=2, optimizer=SGD(0.1)) as replicas:
        whole = start(batches, 0, -1)
        first = start(batches, 1, 5)
        blocks = 0
        while replicas.active:
            with replicas.round(timeout=LONG):
                pass
            blocks += 1
            if blocks == 5:
                half = first.result()
                second = start(batches, 1, -1)
        found = [whole.result(), half + second.result()]
    assert blocks == 12
    for epoch in range(2):
        samples = [n for rank in found for batch in rank[6 * epoch : 6 * epoch + 6] for n in batch]
        assert len(samples) == len(set(samples)) == 48
    assert found[0][:6] != found[0][6:]


def test_a_samplers_batches_depend_on_the_step_alone() -> None:
    model, other = Words(), Words()
    with (
        SyncReplicas(model, NAME, total_num_replicas=2, optimizer=SGD(0.1)) as replicas,
        Replica(other, NAME, 1, timeout=0.01) as replica,
    ):
        assert replica.total_num_replicas == 2
        plain = StepSampler(DATA, replica, 10, shuffle=False)
        assert [plain.batch(step) for step in (0, 1, 2)] == [
            list(range(10, 20)),
            list(range(30, 40)),
            list(range(10, 20)),
        ]
        asked = iter(plain)
        assert [next(asked)[0] for _ in range(3)] == [10, 30, 10]
        saved = replicas.state_dict() | {"step": 7}
        replicas.load_state_dict(saved)
        backward(other, 0)
        assert not replica.step()
        assert next(asked) == plain.batch(7)
        assert [len(StepSampler(DATA, replica, 10, epochs=epochs)) for epochs in (9, 3)] == [11, 0]
        with pytest.raises(TypeError, match="without epochs has no length"):
            len(plain)
        whole = StepSampler(DATA, replica, 20, epochs=3, seed=4, drop_last=False)
        by_step = shmacc.StepSampler(len(DATA), 20, 2, 1, seed=4, drop_last=False)
        for step in range(6):
            assert whole.batch(step) == by_step[step].tolist()
        assert [len(whole.batch(step)) for step in (0, 1, 2)] == [20, 5, 20]
        assert len(StepSampler(DATA, replica, 20, epochs=9, drop_last=False)) == 11
        for size in (0, 26):
            with pytest.raises(errors.InvalidArgumentError, match="batch_size"):
                StepSampler(DATA, replica, size)
        for wrong in ({"epochs": -1}, {"epochs": 1.5}, {"shuffle": 0}, {"drop_last": None}):
            with pytest.raises(errors.InvalidArgumentError, match=next(iter(wrong))):
                StepSampler(DATA, replica, 10, **wrong)
        with pytest.raises(errors.InvalidArgumentError, match="must be a Replica, but was of Sync"):
            StepSampler(DATA, replicas, 10)  # type: ignore[arg-type]


def test_a_sampler_repeats_the_batch_of_a_step_that_is_made_again() -> None:
    """A block raised, and the chief went on from the checkpoint of the same step."""
    model, other = Words(), Words()
    with pair(model, other) as (replicas, replica):
        sampler = StepSampler(DATA, replica, 10)
        asked = iter(sampler)
        assert next(asked) == sampler.batch(0)
        train(replicas, replica, other)
        assert next(asked) == sampler.batch(1)
        saved = replicas.state_dict()
        backward(other, 1)
        hand_over(replica)
        with pytest.raises(ZeroDivisionError), replicas.round(timeout=LONG):
            raise ZeroDivisionError
        replicas.load_state_dict(saved)
        assert replica.step() is False
        assert next(asked) == sampler.batch(1)
        train(replicas, replica, other)
        assert next(asked) == sampler.batch(2)
        assert next(asked) == sampler.batch(3), "asked for ahead"
        replica.close()


@pytest.mark.parametrize("compiled", ["all", "a part"])
def test_models_may_be_compiled(compiled: str) -> None:
    """Chief and replicas may compile their models; the checkpoint fits an uncompiled model."""

    def compile_it(model: Words) -> Any:
        if compiled == "all":
            return torch.compile(model, backend="aot_eager")
        model.layer = torch.compile(model.layer, backend="aot_eager")
        return model

    model, theirs, alone = Words(), compile_it(Words()), Words()
    of_torch = [
        torch.optim.SparseAdam(model.rows.parameters()),
        torch.optim.Adam([*model.layer.parameters(), *model.norm.parameters()]),
    ]
    chosen = optimizer_of(*of_torch) if compiled == "all" else {"layer.*": SGD(0.1), "*": SGD(1)}
    model = compile_it(model)
    with (
        pair(model, theirs, optimizer=chosen) as (replicas, replica),
        Viewer(alone, NAME, timeout=LONG) as viewer,
    ):
        for _ in range(3):
            train(replicas, replica, theirs)
        saved = io.BytesIO()
        torch.save(replicas.state_dict(), saved)
        saved.seek(0)
        state = torch.load(saved, weights_only=True)
        assert viewer.snapshot() == 3
        same(contents(alone), state["model"])
        train(replicas, replica, theirs)
        replicas.load_state_dict(state)
        assert viewer.snapshot() == 3
        same(contents(alone), state["model"])
        assert int(alone.norm.num_batches_tracked) == 3
