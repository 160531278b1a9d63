"""Embeddings of ids compute what torch's embeddings do; chief and replicas share them."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.support import LONG
from other_packages.torch_tables import BOTH, USERS, Clicks, backward, chief_of, make_rounds
from other_packages.torch_training import (
    NAME,
    contents,
    hand_over,
    in_a_round,
    make_round,
    pair,
    same,
)
from torch import nn

from shmacc import errors, optim, testing
from shmacc.torch import Replica, TableEmbedding, Viewer, clip_grad_norm_, optimizer_of


def test_a_row_that_is_used_several_times_has_all_its_gradients() -> None:
    """The row is used twice: in a batch, in lookups, in backward passes, under tied names."""

    class Pairs(nn.Module):
        def __init__(self, rows: nn.Module) -> None:
            super().__init__()
            self.rows, self.tied = rows, rows

        def forward(self, ids: torch.Tensor) -> Any:
            return (self.rows(ids) * self.tied(ids.flip(0)) ** 2).sum()

    model, other = (Pairs(TableEmbedding(3, initial=USERS)) for _ in range(2))
    ids = torch.tensor([5, 9, 5, 2**62])
    known = nn.Embedding.from_pretrained(model.rows(torch.tensor([5, 9, 2**62])), freeze=False)
    expected = Pairs(known)
    for _ in range(2):
        expected(torch.tensor([0, 1, 0, 2])).backward()
    with pair(model, other, optimizer=optim.SGD(1.0)) as (replicas, replica):
        loss = other(ids)
        loss.backward(retain_graph=True)
        loss.backward()
        hand_over(replica)
        before = model.rows(torch.tensor([5, 9, 2**62]))
        with replicas.round(timeout=LONG):
            torch.testing.assert_close(model.rows.grad, known.weight.grad)
            model.rows.grad *= 0.5
        assert list(replicas._shared) == ["rows.rows", ".run", ".left"]
        after = model.rows(torch.tensor([5, 9, 2**62]))
        torch.testing.assert_close(after, before - known.weight.grad / 2)
        replica.close()


@pytest.mark.parametrize(("mode", "padding", "flat"), [
    ("sum", None, True), ("mean", None, False), ("mean", 3, True), ("sum", 3, False),
    ("sum", -1, True), ("mean", -1, False),
])  # fmt: skip
def test_embedding_bags_equal_torchs(mode: Any, padding: int | None, *, flat: bool) -> None:
    """Some bags are empty or have only padding; gradients are compared, too."""
    ids = torch.tensor([[1, 1, 2], [0, -1 if padding == -1 else 3, 4], [3, 3, 3]])
    if padding == -1:
        ids[2] = -1
    where = ids.where(ids >= 0, 5)
    bags: tuple[torch.Tensor, ...] = ()
    if flat:
        ids, where, bags = ids.flatten(), where.flatten(), (torch.tensor([0, 2, 2, 7, 9]),)
    model, other = (TableEmbedding(2, mode=mode, padding_idx=padding) for _ in range(2))
    rows = TableEmbedding(2)(torch.arange(6))
    if padding is not None:
        rows[padding] = 0.0
    theirs = nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode=mode, padding_idx=padding)
    expected = theirs(where, *bags)
    scale = torch.arange(1.0, 1 + expected.numel()).view_as(expected)
    (expected * scale).sum().backward()
    with pair(model, other, optimizer=optim.SGD(1.0)) as (replicas, replica):
        found = other(ids, *bags)
        assert torch.equal(found, expected)
        (found * scale).sum().backward()
        make_round(replicas, replica)
        trained = sorted(set(ids.flatten().tolist()) - {padding})
        assert model.table.ids().tolist() == trained
        after = rows.detach() - theirs.weight.grad
        torch.testing.assert_close(torch.from_numpy(model.table[trained]), after[trained])
        replica.close()


NO_BAGS: dict[str, tuple[Any, Any]] = {
    "ascend from 0 to at most 5.*[3, 2]": (5, [0, 3, 2]), "ascend from 0 .*[1]": (5, [1, 2]),
    "ascend from 0 .*[-1]": (5, [-1, 0]), "ascend from 0 .*[0, -1]": (5, [0, -1, 5]),
    "at most 5.*[6]": (5, [0, 6]),
    "at most 5.*[9223372036854775807]": (5, [0, 2**63 - 1]),
    "at most 5.*none": (5, torch.tensor([], dtype=torch.int64)), "at most 0.*[1]": (0, [0, 1]),
    "must be given": (5, None), "vector, but have shape (1, 2)": (5, [[0, 2]]),
    "vector, but have shape ()": (5, torch.tensor(0)), "integers, but are float32": (5, [0.0, 1.0]),
    "integers, but are bool": (5, [False, True]),
    "on 'meta'": (5, torch.tensor([0, 1], device="meta")),
    "below 2**63": (5, torch.tensor([2**63 + 1], dtype=torch.uint64)),
    "each row is a bag": ((2, 3), [0, 3]), "matrix, or a vector": ((1, 2, 3), None),
    "matrix, or a vector with": ((), [0]),
}  # fmt: skip


@pytest.mark.parametrize("words", NO_BAGS)
def test_bad_bags_are_refused_before_torch(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal, torch would read other memory, or crash."""
    shape, begins = NO_BAGS[words]
    offsets = torch.tensor(begins) if isinstance(begins, list) else begins
    monkeypatch.delattr(nn.functional, "embedding_bag")
    for mode in ("sum", "mean"):
        with pytest.raises(
            errors.InvalidArgumentError, match=".*".join(map(re.escape, words.split(".*")))
        ):
            TableEmbedding(2, mode=mode)(torch.zeros(shape, dtype=torch.int64), offsets)


def test_bags_may_have_no_ids() -> None:
    for shape, offsets, bags in (((3, 0), None, 3), ((0, 3), None, 0), (0, [], 0), (0, [0, 0], 2)):
        found = TableEmbedding(2, mode="mean", padding_idx=1)(
            torch.zeros(shape, dtype=torch.int64),
            None if offsets is None else torch.tensor(offsets, dtype=torch.int16),
        )
        assert torch.equal(found, torch.zeros(bags, 2))


def test_an_embedding_with_padding_equals_torchs() -> None:
    """The ids may have any shape, or be empty. Padding gives zeros; the result may be changed."""
    rows = TableEmbedding(4, initial=USERS, padding_idx=0)
    plain = TableEmbedding(4, initial=USERS)
    ids = torch.tensor([[[7, 0], [0, 2**63 - 1]]])
    found = rows(ids)
    assert found.shape == (1, 2, 2, 4)
    assert torch.equal(found == 0, (ids == 0)[..., None].expand(found.shape))
    assert torch.equal(found[0, 0, 0], plain(torch.tensor(7)))
    assert rows(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 4)
    assert torch.equal(plain(torch.tensor([200], dtype=torch.uint8)), plain(torch.tensor([200])))
    found += 1


def test_a_blocks_gradients_of_tables_can_be_clipped(namespace: str) -> None:  # noqa: ARG001
    """Tables are clipped together with other gradients; a replica that left does not count."""
    model, others = Clicks(), [Clicks(), Clicks()]
    with pair(model, others[0], total=2, optimizer=optim.SGD(0.1)) as (replicas, replica):
        with Replica(others[1], NAME, 1, timeout=0.01):
            pass
        backward(others[0], 0, 0)
        pending: Any = others[0].users._own.gradient()
        hand_over(replica)
        before = contents(model)
        with replicas.round(timeout=LONG) as update:
            assert update.replicas == (0,)
            grad: Any = model.users.grad
            torch.testing.assert_close(grad.sum(), torch.from_numpy(pending.values).sum())
            trained: list[Any] = [*model.parameters(), model.users, model.tags]
            total = clip_grad_norm_(model, 1e-3)
            assert total > 1e-3
            norms = torch.stack([one.grad.norm() for one in trained]).norm()
            torch.testing.assert_close(norms, torch.tensor(1e-3))
        assert model.users.grad is None
        assert replica.step()
        moved = model.layer.weight.detach() - before["layer.weight"]
        assert 0 < float(moved.norm()) <= 1e-4
        backward(others[0], 0, 1)
        others[0].zero_grad()
        others[0].users.zero_grad()
        others[0].tags.zero_grad()
        hand_over(replica)
        with replicas.round(timeout=LONG):
            assert model.users.grad is model.layer.weight.grad is None
        replica.close()


def test_frozen_rows_are_not_trained() -> None:
    """The embedding's own `requires_grad_` freezes them."""
    model, other = Clicks(), Clicks()
    with pair(model, other, optimizer=BOTH) as (replicas, replica):
        assert other.users.requires_grad_(requires_grad=False) is other.users
        make_rounds(replicas, replica, other, 1)
        assert (len(model.users.table), len(model.tags.table) > 0) == (0, True)
        other.users.requires_grad_()
        make_rounds(replicas, replica, other, 1)
        assert len(model.users.table) > 0


def test_an_embedding_that_is_replaced_is_refused() -> None:
    """The new embedding has its own rows, which nobody trains."""
    model, other = Clicks(), Clicks()
    with pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 1)
        backward(other, 0, 1)
        hand_over(replica)
        for one in (model, other):
            one.users = TableEmbedding(4, initial=USERS)
        with pytest.raises(errors.FailedPreconditionError, match=r"'users.rows' is not the"):
            replicas.round(timeout=LONG).__enter__()
        replica._handed = None
        with pytest.raises(errors.FailedPreconditionError, match=r"'users.rows' is not the"):
            replica.step()
        replica.close()


def test_rows_are_removed_and_counted() -> None:
    """An update that would leave too many rows changes nothing; then the block may remove some."""
    model, other = Clicks(max_rows=6), Clicks(max_rows=6)
    with pair(model, other, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, other, 1)
        before = contents(model)
        other.users(torch.arange(100, 104)).sum().backward()
        hand_over(replica)
        with (
            pytest.raises(errors.ResourceExhaustedError, match=r"users.rows.*6"),
            replicas.round(timeout=LONG),
        ):
            pass
        same(contents(model), before)
        with replicas.round(timeout=LONG) as update:
            calls: Any = update.ids, lambda x: update.remove(x, [0]), lambda x: update.forget(x, 0)
            for call in calls:
                with pytest.raises(errors.InvalidArgumentError, match="TableEmbedding of the mo"):
                    call(Clicks().users)
            assert update.ids(model.users).tolist() == [100, 101, 102, 103]
            assert update.ids(model.tags).tolist() == []
            update.remove(model.users, before["users.ids"][:2])
            update.remove(model.users, before["users.ids"][1:])
            update.remove(model.tags, [0])
            with pytest.raises(errors.FailedPreconditionError, match="cannot be skipped"):
                update.skip()
        with pytest.raises(errors.FailedPreconditionError, match="has ended"):
            update.remove(model.users, [0])
        assert replica.step()
        assert model.users.table.ids().tolist() == [100, 101, 102, 103]
        assert model.tags.table.contains(before["tags.ids"]).sum() == len(before["tags.ids"]) - 1
        other.users(torch.arange(3)).sum().backward()
        with in_a_round(replicas, replica) as update:
            update.skip()
            for call in (
                lambda: update.remove(model.users, [100]),
                lambda: update.forget(model.users, 0),
            ):
                with pytest.raises(errors.FailedPreconditionError, match="removes nothing"):
                    call()
        assert model.users.table.ids().tolist() == [100, 101, 102, 103]
        replica.close()


def test_rows_that_were_in_no_round_for_long_are_forgotten() -> None:
    model, other = Clicks(), Clicks()
    with pair(model, other, optimizer=BOTH) as (replicas, replica):
        for step, ids in enumerate(([1, 2], [2, 3], [3, 4], [2, 5], [5])):
            other.users(torch.tensor(ids)).sum().backward()
            with in_a_round(replicas, replica) as update:
                for wrong, words in ((-1, "negative"), (True, "integer"), (1.5, "integer")):
                    with pytest.raises(errors.InvalidArgumentError, match=words):
                        update.forget(model.users, wrong)
                if step >= 3:
                    update.forget(model.users, 2 if step == 3 else 1)
                    with pytest.raises(errors.FailedPreconditionError, match="cannot be skipped"):
                        update.skip()
            if step == 3:  # row 1 was in round 0 only; row 2 is in this round, too
                assert model.users.table.ids().tolist() == [2, 3, 4, 5]
        assert model.users.table.ids().tolist() == [2, 5]
        replica.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler's
def test_a_replica_may_be_compiled() -> None:
    model, other = Clicks(), Clicks()
    first, second = (torch.compile(one, backend="eager") for one in (model, other))
    with pair(first, second, optimizer=BOTH) as (replicas, replica):
        make_rounds(replicas, replica, torch.compile(other, backend="eager"), 2)
        assert set(replicas._shared) >= {"users.rows", "tags.rows"}
        assert len(model.users.table)
        replica.close()


def test_only_compiled_models_import_torchs_compiler() -> None:
    """The import takes two seconds in each spawned worker."""
    code = "import sys, shmacc.torch; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_bad_options_and_ids_raise(namespace: str) -> None:
    def refused(words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(errors.InvalidArgumentError, match=words):
            call()

    model = Clicks()
    refused("optimizers of torch do not know", lambda: chief_of(model, optimizer=None))
    adam = optimizer_of(torch.optim.Adam(model.parameters()))
    wrong: Any
    for wrong in adam, {"layer*": optim.SGD(0.1), "*": adam}:
        made = functools.partial(chief_of, model, optimizer=wrong)
        refused("'users.rows.*do not know.*{.users.rows", made)
    mixed: Any = {"users*": optim.Adagrad(0.1), "tags.rows": optim.SGD(0.1), "*": adam}
    with chief_of(model, optimizer=mixed) as replicas:
        slots = {name: [*kept] for name, kept in replicas._shared.slots.items()}
        assert slots["layer.weight"] == ["m", "v"]
        assert (slots["users.rows"], slots["tags.rows"]) == (["accumulator"], [])
    refused(
        "'users.rows' requires grad, but there is no",
        lambda: chief_of(model, optimizer={"layer*": optim.SGD(0.1), "tags*": optim.SGD(0.1)}),
    )
    for name, wrong in {"mode": "max", "max_rows": 0, "initial": 0.0, "padding_idx": 0.5}.items():
        options: dict[str, Any] = {name: wrong}
        refused(".", functools.partial(TableEmbedding, 4, **options))
    refused(".", lambda: TableEmbedding(-1))
    refused("float16", Clicks().half)
    refused("on the CPU", lambda: Clicks().to("meta"))
    one = torch.tensor([1])
    refused("offsets are for bags", lambda: model.users(one, torch.tensor([0])))
    refused("not be negative", lambda: model.users(-one))
    refused("0x7FFF", lambda: model.users(torch.tensor([2**63 + 1], dtype=torch.uint64)))
    refused("integer", lambda: model.users(one.float()))
    for ids, rows in (([2, 1], (2, 4)), ([2], (2, 4)), ([2], (1, 3))):
        state = {"users.ids": torch.tensor(ids), "users.rows": torch.ones(*rows)}
        with pytest.raises(RuntimeError, match="users"):
            model.load_state_dict(model.state_dict() | state)
    with pytest.raises(RuntimeError, match="users"):
        model.load_state_dict(model.state_dict() | {"users.more": torch.ones(1)})
    assert not testing.leaked_names(namespace)
    with chief_of(model):
        refused("'users.rows'", lambda: chief_of(Clicks(max_rows=5)))
        for other in (Clicks(max_rows=5), Clicks().double()):
            refused("is TableSpec.* in the chief's", functools.partial(Replica, other, NAME, 0))
        dense: Any = Clicks()
        dense.users = nn.Embedding(4, 4)
        refused("model has 'users", lambda: Viewer(dense, NAME))
