"""Second chiefs, models that leave shared memory, and waits that are repeated."""

import copy
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
import torch
from helpers.apart import Apart
from helpers.support import LONG, until
from other_packages.torch_training import NAME, contents, one_layer, pair, same
from other_packages.torch_training import hand_over as pass_on
from other_packages.torch_training import in_a_round as in_its_round
from torch import nn

import shmacc
from shmacc import errors, testing
from shmacc.optim import SGD
from shmacc.torch import AsyncReplicas, Replica, SyncReplicas, Viewer, _replica, _run


def two_layers() -> nn.Sequential:
    return nn.Sequential(one_layer(), nn.Linear(1, 1))


def chief_of(model: nn.Module, total: int = 1) -> SyncReplicas:
    return SyncReplicas(model, NAME, total_num_replicas=total)


def hand_over(replica: Replica, model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    pass_on(replica)


def in_a_round(replicas: SyncReplicas, replica: Replica, model: nn.Module) -> Any:
    """Compute a gradient, and make a round of it around the caller's block."""
    model(torch.ones(1, 2)).sum().backward()
    return in_its_round(replicas, replica)


def assert_chief_refuses(replicas: SyncReplicas, saved: Any, match: str) -> None:
    """Expect refusals: a checkpoint must not have parameters that nobody trains."""
    for call in (
        replicas.round(timeout=LONG).__enter__,
        replicas.state_dict,
        partial(replicas.load_state_dict, saved),
    ):
        with pytest.raises(errors.FailedPreconditionError, match=match):
            call()


@pytest.fixture
def queued() -> Iterator[Callable[[SyncReplicas], Any]]:
    """Yield a function that enters a round in a thread, and returns its future once it waits."""
    with ThreadPoolExecutor() as executor:

        def wait(chief: SyncReplicas) -> Any:
            def update() -> None:
                with chief.round(timeout=LONG):
                    pytest.fail("parameters that are half updated were updated")

            ended = executor.submit(update)
            until(lambda: chief._group.stats().waiting > 0)
            return ended

        yield wait


def test_a_waiting_chief_does_not_go_on_from_half_an_update(queued: Any) -> None:
    model, other = one_layer(), one_layer()
    with pair(model, other) as (first, replica), chief_of(one_layer()) as second:
        hand_over(replica, other)
        with pytest.raises(ZeroDivisionError), first.round(timeout=LONG):  # noqa: PT012
            waits = queued(second)  # when this wait begins, no update is half done
            raise ZeroDivisionError
        with pytest.raises(errors.FailedPreconditionError, match="half updated"):
            waits.result(LONG)
        second.load_state_dict(first.state_dict())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "shmacc"]
    caplog.clear()
    return found


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["of torch", "of shmacc"])
def test_each_of_two_chiefs_is_warned(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each is warned once. A lone chief that loads a checkpoint or gives up a round is not."""
    models = [one_layer() for _ in range(3)]
    with pair(*models[:2], optimizer=optimizer) as (first, replica):

        def make_round(chief: Any) -> None:
            with in_a_round(chief, replica, models[1]):
                pass

        for chief in [first] * 3:
            make_round(chief)
            hand_over(replica, models[1])
            assert first.active
            with pytest.raises(ZeroDivisionError), first.round(timeout=LONG):  # noqa: PT012
                first.load_state_dict(first.state_dict())
                raise ZeroDivisionError
            replica.step()
        make_round(first)
        assert not warnings_of(caplog)
        second = SyncReplicas(models[2], NAME, total_num_replicas=1, optimizer=optimizer)
        (told,) = warnings_of(caplog)
        assert f"'{NAME}' has two chiefs: rounds were made by this process, and not" in told
        make_round(second)
        make_round(first)
        (told,) = warnings_of(caplog)
        assert "kill it" in told
        for chief in second, first, second:
            make_round(chief)
        assert not warnings_of(caplog)
        second.close()


def test_the_end_of_a_training_ends_all_chiefs(queued: Any) -> None:
    with chief_of(one_layer()) as first:
        waits = queued(first)
        chief_of(one_layer()).close()
        with pytest.raises(errors.FinishedError):
            waits.result(LONG)
        with pytest.raises(errors.FinishedError):
            first.round(timeout=LONG).__enter__()


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "finished"])
def test_parameters_that_are_left_without_their_group_are_trained_on(*, removed: bool) -> None:
    """A chief may die in its close, after it finished the group and before it removed the group."""
    model, other = one_layer(), one_layer()
    ended = chief_of(model)
    with Replica(other, NAME, 0, timeout=0.01) as replica:
        for _ in range(3):
            with in_a_round(ended, replica, other):
                pass
        ended._group.finish()
        assert not replica.running
    if removed:
        ended._group.unlink()
    ended._group.close()
    with chief_of(one_layer()) as replicas:
        assert replicas.global_step == 3
        with Replica(other, NAME, 0, timeout=0.01) as replica:
            assert replica.global_step == 3
            with in_a_round(replicas, replica, other) as update:
                assert update.replicas == (0,)
    ended._shared.close()


def leave_a_block_in_a_forked_child() -> list[bool]:
    with chief_of(one_layer()) as replicas:
        pid = os.fork()
        if pid == 0:
            try:
                replicas.__exit__()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        with Replica(one_layer(), NAME, 0, timeout=0) as replica:
            return [replica.running, not replica._left[0]]


def test_the_end_of_a_forked_child_does_not_end_the_training(start: Callable[..., Apart]) -> None:
    assert start(leave_a_block_in_a_forked_child).result() == [True, True]


def test_a_repeated_step_returns_whether_the_gradient_counted() -> None:
    other = one_layer()
    with pair(one_layer(), other) as (replicas, replica):
        with in_a_round(replicas, replica, other):
            hand_over(replica, other)  # already in the sealed round, so nothing is applied
        assert replicas._group.num_accumulated() == 0


@pytest.mark.parametrize("drop", ["checkpoint", "end"])
def test_a_step_whose_gradient_is_dropped_returns_false(drop: str) -> None:
    other = one_layer()
    with chief_of(one_layer()) as replicas:
        replica = Replica(other, NAME, 0, timeout=0.01)
        hand_over(replica, other)
        if drop == "checkpoint":
            replicas.load_state_dict(replicas.state_dict())
        else:
            replicas.close()
        assert replica.step() is False
        replica.close()


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)])
def test_an_asynchronous_gradient_from_before_a_load_is_dropped(optimizer: SGD | None) -> None:
    """An asynchronous gradient has no step that could be stale."""
    model, other = one_layer(), one_layer()
    with (
        AsyncReplicas(model, NAME, total_num_replicas=1, optimizer=optimizer) as replicas,
        Replica(other, NAME, 0, timeout=LONG) as replica,
    ):
        saved = copy.deepcopy(replicas.state_dict())
        other(torch.ones(1, 2)).sum().backward()
        replicas.load_state_dict(saved)
        assert replica.step() is False
        assert replicas._group.num_accumulated() == 0
        other(torch.ones(1, 2)).sum().backward()
        assert replica.step() is True
        with replicas.round(timeout=LONG) as update:
            assert update.replicas == (0,)


def test_a_round_counts_each_replica_once() -> None:
    other = one_layer()
    with chief_of(one_layer(), 2) as replicas:
        replica = Replica(other, NAME, 0, timeout=0.01)
        hand_over(replica, other)
        with pytest.raises(errors.DeadlineExceededError):
            replica.leave()  # waits for the update
        with pytest.raises(errors.DeadlineExceededError):
            replicas.round(timeout=0.01).__enter__()
        replicas._group.advance_step(1)
        replica.leave()
        replica.close()
        late = one_layer()
        with pytest.raises(errors.DeadlineExceededError):
            Replica(late, NAME, 0, timeout=0.01)  # it comes back, and waits for the round's end
        nn.init.zeros_(late.weight)  # this model was not shared
        assert not late.weight.any()
        with pytest.raises(errors.DeadlineExceededError):
            replicas.round(timeout=0.01).__enter__()
        assert replicas._group.num_accumulated() == 1


def test_a_replica_that_cannot_leave_in_time_is_closed() -> None:
    """The replica counts as failed, and the chief's wait reports that."""
    other = one_layer()
    with chief_of(one_layer(), 2) as replicas:
        with (
            pytest.raises(errors.DeadlineExceededError, match="step is still 0"),
            Replica(other, NAME, 0, timeout=0.01) as replica,
        ):
            hand_over(replica, other)
        assert not replica.running
        with pytest.raises(errors.WorkerDiedError, match="DeadlineExceededError"):
            replicas.round(timeout=LONG, on_death="raise").__enter__()


@pytest.mark.parametrize("end", [None, SystemExit(0), GeneratorExit(), ValueError()], ids=repr)
def test_a_replica_whose_block_ends_without_an_error_has_left(end: BaseException | None) -> None:
    """The chief no longer waits for the replica. A sys.exit() counts as an end without error."""
    with chief_of(one_layer(), 2) as replicas:
        with suppress(BaseException), Replica(one_layer(), NAME, 0, timeout=LONG):
            if end is not None:
                raise end
        left = [] if isinstance(end, Exception | GeneratorExit) else [_run.LEAVING]
        assert replicas._group.contributors().tolist() == left


@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
def test_an_exiting_replica_waits_for_no_chief(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM may come when the chief is dead or joins this process. The replica then fails."""
    monkeypatch.setattr(_replica, "_AT_EXIT", 0.01)
    other = one_layer()
    with kind(one_layer(), NAME, total_num_replicas=1) as replicas:
        with pytest.raises(SystemExit), Replica(other, NAME, 0, timeout=LONG) as replica:  # noqa: PT012
            other(torch.ones(1, 2)).sum().backward()
            assert replica._hand_over(1)  # then an asynchronous replica has no room to leave
            raise SystemExit
        assert len(replicas._group.take(1, timeout=0).contributors) == 1
        with pytest.raises(errors.WorkerDiedError, match="DeadlineExceededError"):
            replicas.round(timeout=LONG, on_death="raise").__enter__()


@pytest.mark.parametrize("kind", [SyncReplicas, AsyncReplicas])
def test_a_step_of_a_closed_replica_is_in_no_update(kind: Any) -> None:
    with pair(one_layer(), one_layer(), kind) as (_, replica):
        replica.close()
        assert replica.step() is False


def test_replicas_that_leave_do_not_prolong_a_chiefs_wait() -> None:
    chief = SyncReplicas(one_layer(), NAME, total_num_replicas=5, replicas_to_aggregate=1)
    with chief as replicas, ThreadPoolExecutor(1) as executor:
        leaving = [Replica(one_layer(), NAME, rank, timeout=LONG) for rank in range(4)]

        def leave() -> None:
            for replica in leaving:
                time.sleep(0.4)
                replica.leave()
                replica.close()

        left, began = executor.submit(leave), time.monotonic()
        with pytest.raises(errors.DeadlineExceededError):
            replicas.round(timeout=0.5).__enter__()
        assert time.monotonic() - began < 1.5
        assert not left.done()


def test_a_second_chief_does_not_end_the_first_ones_round() -> None:
    """The second chief comes between the first one's update and its commit."""
    other = one_layer()
    with pair(one_layer(), other) as (first, replica):
        real, come = first._updates.end, []

        def end(*args: Any) -> None:
            real(*args)
            come.append(chief_of(one_layer()))

        first._updates.end = end
        with in_a_round(first, replica, other):
            pass
        come[0].close()


MOVES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "double": nn.Module.double,
    "share_memory": nn.Module.share_memory,
    "data": lambda model: setattr(model.bias, "data", torch.zeros(1)),
    "a part": lambda model: setattr(model.weight, "data", model.weight.data[:, :1]),
    "turned": lambda model: setattr(model.weight, "data", model.weight.data.t()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_leaves_shared_memory_is_refused(move: str) -> None:
    model, other = one_layer(), one_layer()
    with pair(model, other) as (replicas, replica):
        saved = replicas.state_dict()
        hand_over(replica, other)
        MOVES[move](model)
        assert_chief_refuses(replicas, saved, "not in shared memory any")
        assert replicas._group.num_accumulated() == 1
        replicas._group.advance_step(1)
        replica._handed = None
        MOVES[move](other)
        with pytest.raises(errors.FailedPreconditionError, match="not in shared memory any"):
            replica.step()


def assigned(model: nn.Sequential) -> None:
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)


def replaced(model: nn.Sequential) -> None:
    model[1] = nn.Linear(1, 1)


def added(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1))


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["of torch", "of shmacc"])
@pytest.mark.parametrize("change", [assigned, replaced, added])
def test_a_model_that_gets_other_parameters_is_refused(change: Any, optimizer: Any) -> None:
    """Nobody would take the new parameters' gradients. A frozen copy of a layer is allowed."""
    model, other = two_layers(), two_layers()
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        other.append(copy.deepcopy(other[1]).requires_grad_(requires_grad=False))
        with in_a_round(replicas, replica, other):
            assert model[1].weight.grad is not None
        saved = replicas.state_dict()
        hand_over(replica, other)
        change(model)
        change(other)
        if change is not added:  # the chief has no gradient of an added layer
            assert_chief_refuses(replicas, saved, "not the parameter that")
            assert replicas._group.num_accumulated() == 1
        replica._handed = None
        other(torch.ones(1, 2)).sum().backward()
        with pytest.raises(errors.FailedPreconditionError, match="not the parameter that was"):
            replica.step()
        replica.close()


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    """The parameter requires grad at first, is frozen for a while, and is trained again later."""
    model, other = one_layer(), one_layer()
    with pair(model, other) as (replicas, replica):
        for frozen in (True, False):
            for layer in (model, other):
                layer.bias.requires_grad_(not frozen)
            with in_a_round(replicas, replica, other):
                assert model.weight.grad is not None
                assert (model.bias.grad is None) == frozen


def test_a_parameter_that_requires_grad_only_later_is_refused_with_a_remedy() -> None:
    model, other = one_layer(), one_layer()
    for layer in (model, other):
        layer.bias.requires_grad_(requires_grad=False)
    with pair(model, other) as (replicas, replica):
        hand_over(replica, other)
        model.bias.requires_grad_()
        with pytest.raises(errors.FailedPreconditionError, match="'bias' requires grad now"):
            replicas.round(timeout=LONG).__enter__()
        assert replicas._group.num_accumulated() == 1, "nothing was consumed"
        model.bias.requires_grad_(requires_grad=False)
        with replicas.round(timeout=LONG):
            assert model.weight.grad is not None
        replica._handed = None
        other.bias.requires_grad_()
        other(torch.ones(1, 2)).sum().backward()
        with pytest.raises(errors.FailedPreconditionError, match="'bias' requires grad now"):
            replica.step()


def test_models_that_cannot_be_trained_are_refused(namespace: str) -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    for model, words in (
        (tied, r"'0.weight' and '1.weight'.*memory"),
        (nn.Linear(2, 2).to(torch.float8_e4m3fn), r"'weight'.*float8"),
        (nn.Linear(2, 2, device="meta"), "on the CPU"),
        (nn.LazyLinear(2), "has no shape yet"),
        (nn.Linear(2, 2).requires_grad_(requires_grad=False), "no parameter that requires grad"),
        (nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=words):
            chief_of(model)
    for name in (None, ""):
        with pytest.raises(errors.InvalidArgumentError, match="shared_name"):
            SyncReplicas(one_layer(), name, total_num_replicas=1)  # type: ignore[arg-type]
    for total, needed in ((0, None), (2, 3), (2, 0), (True, 1)):
        with pytest.raises(errors.InvalidArgumentError):
            SyncReplicas(one_layer(), NAME, total_num_replicas=total, replicas_to_aggregate=needed)
    assert not testing.leaked_names(namespace)


def test_segments_of_that_name_without_a_model_are_refused() -> None:
    members = {"weight": shmacc.TensorSpec((1, 2), "float32")}
    with (
        shmacc.AccumulatorGroup(members, NAME, unlink_on_close=True),
        shmacc.SharedArrays(members, _run.of_params(NAME), unlink_on_close=True),
        pytest.raises(errors.InvalidArgumentError, match="no model's"),
    ):
        Replica(one_layer(), NAME, 0)


class Scaled(nn.Module):
    """A module with an attribute `sparse` of its own, which assigns its buffer anew."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.sparse = True
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = self.seen + len(x)
        return (self.scale * x) ** 2


def test_a_module_may_use_the_name_sparse_and_assign_its_buffer() -> None:
    """The module's gradient is dense, and its buffer is shared."""
    model, other = Scaled(), Scaled()
    with pair(model, other) as (replicas, replica):
        for step in range(2):
            with in_a_round(replicas, replica, other):
                assert model.scale.grad is not None
                assert model.scale.grad.item() == 8
            assert model.seen.item() == step + 1
        model.seen.fill_(7)
        replica._follow(replica._at.step)
        assert other.seen.item() == 7


def test_a_replica_has_the_chiefs_mask() -> None:
    """A buffer of booleans is no member of the group, but is shared."""
    model, other = one_layer(), one_layer()
    for each, on in (model, True), (other, False):
        each.register_buffer("mask", torch.tensor([on, False]))
    with pair(model, other) as (replicas, replica):
        assert other.mask.tolist() == [True, False]
        with in_a_round(replicas, replica, other):
            model.get_buffer("mask").fill_(1)
        assert other.mask.tolist() == [True, True]


def with_expanded_buffers(*, on: bool) -> nn.Linear:
    layer = one_layer()
    layer.register_buffer("mask", torch.tensor([on]).expand(3, 2))
    layer.register_buffer("seen", torch.full((1, 2), float(on)).expand(3, 2))
    return layer


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["of torch", "of shmacc"])
def test_buffers_may_be_expanded_views(optimizer: Any) -> None:
    """Even torch refuses copies into such views: elements share memory."""
    model, other, third = (with_expanded_buffers(on=on) for on in (True, False, False))
    before = contents(model)
    with pair(model, other, optimizer=optimizer, initial=before) as (replicas, replica):
        saved = {**replicas.state_dict(), "model": before}
        same(contents(other), before)
        other.get_buffer("seen").fill_(5)
        with in_a_round(replicas, replica, other):
            pass
        assert model.seen.tolist() == [[5, 5]] * 3
        replicas.load_state_dict(saved)
        same(contents(model), before)
        with Viewer(third, NAME, timeout=LONG) as viewer:
            viewer.snapshot()
        same(contents(third), before)


def test_gradients_made_with_create_graph_are_accepted() -> None:
    model, other = Scaled(), Scaled()
    with pair(model, other) as (replicas, replica):
        with pytest.warns(UserWarning, match="create_graph"):
            other(torch.ones(1, 2)).sum().backward(create_graph=True)
        pass_on(replica)
        with replicas.round(timeout=LONG):
            assert model.scale.grad is not None
            assert model.scale.grad.item() == 8


def test_a_dense_gradient_of_a_sparse_module_is_refused_with_a_remedy() -> None:
    model, other = (nn.Embedding(3, 2, sparse=True) for _ in range(2))
    with pair(model, other) as (_, replica):
        nn.functional.linear(other(torch.tensor([0, 1])), other.weight).sum().backward()
        with pytest.raises(errors.InvalidArgumentError, match=r"'weight' is dense.*sparse=False"):
            replica.step()
        other.weight.grad = None


def test_names_are_removed_with_the_chief_that_took_over() -> None:
    first = chief_of(one_layer())
    second = chief_of(one_layer())
    first._group._finalizer.detach()  # as if killed
    second.close()
    second.close()
    with pytest.raises(errors.NotFoundError):
        shmacc.attach(NAME)
    first._group.close()
    first._shared.close()


def test_a_replica_without_a_chief_raises_at_its_timeout() -> None:
    with pytest.raises(errors.DeadlineExceededError, match=NAME):
        Replica(one_layer(), NAME, 0, timeout=0.05)
