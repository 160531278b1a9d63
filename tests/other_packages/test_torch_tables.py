"""Embedding tables whose ids appear during training equal a dict and torch's embeddings."""

import copy
import io
import pickle
import signal
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from helpers.apart import Apart
from helpers.segment_file import SegmentFile
from helpers.support import LONG
from other_packages import torch_training
from other_packages.torch_tables import (
    BOTH,
    SPREAD,
    Clicks,
    backward,
    batch,
    chief_of,
    kinds,
    make_rounds,
)
from torch import nn

import shmacc
from shmacc import errors, inspection, optim
from shmacc._base import names
from shmacc.torch import Replica, Viewer, clip_grad_norm_

UPDATES: Final = 8


class Reference(nn.Module):
    """torch's own embeddings of the ids in the batches, with the same first rows."""

    def __init__(self) -> None:
        super().__init__()
        model, bags = Clicks(), Clicks().tags
        bags.mode = None
        self.layer = model.layer
        users = model.users(torch.arange(20) * SPREAD).detach()
        tags = torch.cat([torch.zeros(1, 4), bags(torch.arange(20)).detach()])
        self.users = nn.Embedding.from_pretrained(users, freeze=False, sparse=True)
        self.tags = nn.EmbeddingBag.from_pretrained(
            tags, freeze=False, mode="mean", sparse=True, padding_idx=0
        )

    def forward(self, users: torch.Tensor, tags: torch.Tensor) -> Any:
        return self.layer(torch.cat([self.users(users // SPREAD), self.tags(tags + 1)], dim=1))


def reference(make: Callable[[Any], Any], steps: int) -> Reference:
    """Return the model that one process trains with the batches of two replicas."""
    model = Reference()
    theirs = [
        make([model.users.weight, model.tags.weight]),
        torch.optim.SGD(model.layer.parameters(), 0.1),
    ]
    for step in range(steps):
        for optimizer in theirs:
            optimizer.zero_grad()
        for rank in range(2):
            users, tags = batch(rank, step)
            (nn.functional.cross_entropy(model(users, tags), users % 2) / 2).backward()
        for optimizer in theirs:
            optimizer.step()
    return model


@pytest.mark.parametrize(("ours", "theirs"), [
    (optim.SGD(0.3), lambda rows: torch.optim.SGD(rows, 0.3)),
    (optim.Adagrad(0.1, 0.0, 1e-10), lambda rows: torch.optim.Adagrad(rows, 0.1, eps=1e-10)),
    (optim.Adam(0.01, as_torch=True), lambda rows: torch.optim.SparseAdam(rows, 0.01)),
], ids=["SGD", "Adagrad", "SparseAdam"])  # fmt: skip
def test_updates_equal_a_dict_and_torchs_optimizer(ours: Any, theirs: Callable[[Any], Any]) -> None:
    steps, model = 6, Clicks()
    others = [Clicks(), Clicks()]
    optimizer = {"layer*": optim.SGD(0.1), "*": ours}
    with (
        torch_training.pair(model, others[0], total=2, optimizer=optimizer) as (replicas, first),
        Replica(others[1], torch_training.NAME, 1, timeout=0.01) as second,
    ):
        for step in range(steps):
            for replica, other in zip((first, second), others, strict=True):
                backward(other, replica.rank, step)
                torch_training.hand_over(replica)
            with replicas.round(timeout=LONG):
                pass
            assert first.step()
            assert second.step()
        expected = reference(theirs, steps)
        trained = [batch(rank, step) for rank in range(2) for step in range(steps)]
        for number, name in enumerate(("users", "tags")):
            ids = torch.cat([each[number].flatten() for each in trained]).unique()
            ids = ids[ids >= 0]
            table = model.get_submodule(name).table
            assert table.ids().tolist() == ids.tolist()
            places = ids // SPREAD if name == "users" else ids + 1
            rows = expected.get_submodule(name).weight.detach()[places]
            torch.testing.assert_close(torch.from_numpy(table[ids.numpy()]), rows)
        torch.testing.assert_close(model.layer.weight, expected.layer.weight)


def compute(rank: int, dies_at: tuple[int, bool] | None) -> None:
    """Be a replica until the chief ends, or die at a step, before its gradient or after it."""
    model = Clicks()
    with Replica(model, torch_training.NAME, rank, timeout=LONG) as replica:
        while replica.running:
            step = replica.global_step
            backward(model, rank, step)
            if dies_at is not None and step == dies_at[0]:
                if dies_at[1]:
                    assert replica._hand_over(1)
                torch_training.kill_myself()
            replica.step()


def lead(die: Callable[[], None] | None) -> dict[str, bytes]:
    """Be a chief that dies in its first block, or trains to the end; return its whole state."""
    model = Clicks()
    with chief_of(model, 2) as replicas:
        while replicas.global_step < UPDATES:
            with replicas.round(timeout=LONG) as update:
                update.forget(model.users, 3)
                clip_grad_norm_(model, 0.5)
                if die is not None:
                    die()
        assert 0 < len(model.users.table) < 6 + UPDATES
        return {key: value.tobytes() for key, value in replicas._shared.state().items()}


def test_deaths_of_chiefs_and_replicas_change_nothing(start: Callable[..., Apart]) -> None:
    """Rows, slots, ids and last steps equal those of a run without deaths, to the bit."""
    undisturbed = [start(compute, rank, None) for rank in range(2)]
    expected = start(lead, None).result()
    for child in undisturbed:
        child.result()
    dying = [start(compute, 0, (2, True)), start(compute, 1, (4, False))]
    for die, update in torch_training.PLACES:
        status = start(lead, die).wait()
        assert status == (signal.SIGSEGV if die is torch_training.in_the_update else signal.SIGKILL)
        with shmacc.AccumulatorGroup.attach(torch_training.NAME) as group:
            assert group.stats().update == update
    chief = start(lead, None)
    again = []
    for rank, child in enumerate(dying):
        assert child.wait() == signal.SIGKILL
        again.append(start(compute, rank, None))
    assert chief.result() == expected
    for child in again:
        child.result()


def test_a_training_goes_on_from_a_checkpoint_to_the_bit() -> None:
    """Rows keep their ages. The checkpoint is loaded in the same training and in a new one."""
    model, other = Clicks(), Clicks()
    saved = io.BytesIO()

    def ages(replicas: Any) -> Any:
        table = model.users.table
        return (replicas._shared.step - table.last_updated(table.ids())).tolist()

    with torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 5)
        torch.save(replicas.state_dict(), saved)
        before, old = torch_training.contents(model), ages(replicas)
        assert {"users.ids", "users.rows", "tags.ids", "tags.rows"} < before.keys()
        assert len(before["users.rows"]) == len(before["users.ids"]) == len(model.users.table) > 5
        make_rounds(replicas, replica, other, 4)
        expected = torch_training.contents(model)
        slots = replicas._shared.slots["users.rows"]["accumulator"][expected["users.ids"]]
        saved.seek(0)
        checkpoint = torch.load(saved, weights_only=True)
        replicas.load_state_dict(checkpoint)
        torch_training.same(torch_training.contents(model), before)
        assert ages(replicas) == old
        replica._follow(replicas._group.global_step)
        make_rounds(replicas, replica, other, 4)
        torch_training.same(torch_training.contents(model), expected)
        replica.close()
    model, other = Clicks(), Clicks()
    with torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica):
        replicas.load_state_dict(checkpoint)
        assert ages(replicas) == old
        replica._follow(replicas._group.global_step)
        make_rounds(replicas, replica, other, 4)
        torch_training.same(torch_training.contents(model), expected)
        found = replicas._shared.slots["users.rows"]["accumulator"][expected["users.ids"]]
        np.testing.assert_array_equal(found, slots)
        replica.close()


def trained() -> Clicks:
    """Return a model that a training has left."""
    model, other = Clicks(), Clicks()
    with torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 3)
        replica.close()
    assert len(model.state_dict()["users.ids"])
    return model


def begin(kind: Any, initial: Clicks, die: Callable[[], None] | None) -> None:
    """Be a chief that may die while it gives its tables their first rows."""
    if die is not None:
        die()
    chief = kind(
        Clicks(), torch_training.NAME, total_num_replicas=1, optimizer=BOTH, initial=initial
    )
    assert len(chief._shared["users.rows"])
    torch_training.kill_myself()


@kinds
def test_a_training_starts_from_a_trained_model(kind: Any, start: Callable[..., Apart]) -> None:
    """A first chief may die at any time. An existing training goes on from its own rows."""
    before = trained()
    for die in (torch_training.in_the_update, torch_training.after_the_update, None):
        status = start(begin, kind, before, die).wait()
        assert status == (signal.SIGSEGV if die is torch_training.in_the_update else signal.SIGKILL)
    model, other = Clicks(), Clicks()
    options = {"total_num_replicas": 1, "optimizer": BOTH, "initial": before.state_dict()}
    with kind(model, torch_training.NAME, **options) as replicas:
        torch_training.same(torch_training.contents(model), torch_training.contents(before))
        with Replica(other, torch_training.NAME, 0, timeout=0.01) as replica:
            torch_training.same(torch_training.contents(other), torch_training.contents(before))
            make_rounds(replicas, replica, other, 1)
            after = torch_training.contents(model)
            assert not torch.equal(after["users.rows"], before.state_dict()["users.rows"])
            again = kind(late := Clicks(), torch_training.NAME, **options)
            torch_training.same(torch_training.contents(late), after)
            again.close()
            replica.close()


def test_a_model_without_a_training_has_its_own_rows() -> None:
    """After a training, models keep its last rows; so do copies, pickles and converted models."""
    model, other = Clicks(), Clicks()
    with torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 3)
        during, copied = torch_training.contents(model), copy.deepcopy(model)
        torch_training.same(torch_training.contents(copy.deepcopy(other)), during)
        for change in (lambda: model.load_state_dict(during), model.double):
            with pytest.raises(errors.FailedPreconditionError, match="rounds alone change"):
                change()
        make_rounds(replicas, replica, other, 1)
        replica.close()
        after = torch_training.contents(model)
    torch_training.same(torch_training.contents(model), after)
    torch_training.same(torch_training.contents(copied), during)
    assert not torch.equal(after["users.rows"], during["users.rows"])
    torch_training.same(torch_training.contents(pickle.loads(pickle.dumps(model))), after)
    ids = torch.tensor([0, 5, 2**61 // 100])
    assert torch.equal(model.double().users(ids), copied.users(ids).double()) is False
    assert model.users(ids).dtype == torch.float64
    assert torch.equal(
        model.float().users(ids),
        torch.stack([after["users.rows"][0], Clicks().users(ids)[1], after["users.rows"][1]]),
    )
    with pytest.raises(errors.FailedPreconditionError, match="are closed"):
        other.users(ids)
    other.load_state_dict(during)
    torch_training.same(torch_training.contents(other), during)
    with pytest.raises(errors.FailedPreconditionError, match="has no table"):
        len(model.users.table)


def test_a_viewer_has_the_rows_of_one_step() -> None:
    model, other, seen = Clicks(), Clicks(), Clicks()
    with (
        torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica),
        Viewer(seen, torch_training.NAME, timeout=LONG) as viewer,
    ):
        for step in range(1, 3):
            make_rounds(replicas, replica, other, 1)
            assert viewer.snapshot() == step
            torch_training.same(torch_training.contents(seen), torch_training.contents(model))
        before = torch_training.contents(seen)
        make_rounds(replicas, replica, other, 1)
        torch_training.same(torch_training.contents(seen), before)
        replica.close()


def lose_indices(name: str) -> None:
    """Overwrite the indices of the first members, so that they lead to no row."""
    with SegmentFile(names.segment_name(name).path) as file:
        for member in range(3):
            file.look_at(0, member)
            state = file.committed("member")
            file.write(file.table.region(f"index {state.index}"), bytes(64 * state.index_buckets))


def test_a_damaged_index_costs_no_row_of_a_state() -> None:
    """States, copies, and the model after the training have every row, like `Parameters.state`."""
    model, other = Clicks(), Clicks()
    with torch_training.pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 3)
        before, saved = torch_training.contents(model), replicas.state_dict()
        lose_indices(f"{torch_training.NAME}.params")
        assert list(inspection.check(f"{torch_training.NAME}.params"))
        for found in (model, other, copy.deepcopy(model)):
            torch_training.same(torch_training.contents(found), before)
        torch_training.same(replicas.state_dict()["model"], before)
        backward(other, 0, 3)
        torch_training.hand_over(replica)
        with (
            pytest.raises(errors.DataLossError, match="nothing was changed"),
            replicas.round(timeout=LONG),
        ):
            pass
        replicas.load_state_dict(saved)
        assert list(inspection.check(f"{torch_training.NAME}.params")) == []
        assert not replica.step()
        make_rounds(replicas, replica, other, 1)
        before = torch_training.contents(model)
        lose_indices(f"{torch_training.NAME}.params")
        replica.close()
    torch_training.same(torch_training.contents(model), before)
