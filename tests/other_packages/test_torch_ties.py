"""Tensors of a model, and gradients, share memory without being the same tensor."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from other_packages.torch_training import NAME, in_a_round, make_round, pair
from torch import nn

from shmacc import errors, testing
from shmacc.optim import SGD
from shmacc.torch import Replica, SyncReplicas, Viewer, _memory


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def model_of(**tensors: torch.Tensor) -> nn.Module:
    """Return a model with these parameters and buffers, and a trained parameter."""
    model = nn.Module()
    model.trained = nn.Parameter(torch.ones(2))
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            model.register_parameter(name, tensor)
        else:
            model.register_buffer(name, tensor)
    return model


# The tests take two views, a and b, of this matrix.
def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).to(dtype)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda m: m, "transposed": lambda m: m.t(), "flat": lambda m: m.view(-1),
    "first half": lambda m: m[:2], "second half": lambda m: m[2:],
    "even columns": lambda m: m[:, ::2], "odd columns": lambda m: m[:, 1::2],
    "left": lambda m: m[:, :3], "right": lambda m: m[:, 3:], "diagonal": lambda m: m.diagonal(),
    "expanded": lambda m: m[3, 5].expand(7), "none": lambda m: m[:0], "one": lambda m: m[2:3, 1:2],
    "bits": lambda m: m.view(torch.int32),
}  # fmt: skip


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(VIEWS, 2)))
def test_views_of_one_tensor_are_refused_if_they_overlap(a: str, b: str) -> None:
    """The views are parameters or buffers, in any order; the error names both and a remedy."""
    places = {"a": set(), "b": set()}  # type: ignore[var-annotated]
    for name, view in (("a", VIEWS[a]), ("b", VIEWS[b])):
        places[name] = set(view(matrix()).view(torch.int32).flatten().tolist())
    kinds = (frozen, torch.Tensor.detach)
    for first, second in itertools.product(kinds, kinds):
        base = matrix()
        one, other = first(VIEWS[a](base)), second(VIEWS[b](base))
        for names in ({"a": one, "b": other}, {"b": other, "a": one}):
            model = model_of(**names)
            if places["a"] & places["b"]:
                with pytest.raises(
                    errors.InvalidArgumentError, match=r"'[ab]' and '[ab]' share.*(clone|one para)"
                ):
                    SyncReplicas(model, NAME, total_num_replicas=1)
            else:
                _memory.check_apart(dict(model.named_parameters()) | dict(model.named_buffers()))


def test_two_views_overlap_if_and_only_if_their_elements_do() -> None:
    draw = random.Random(5)
    counts = [0, 0]
    for _ in range(1500):
        base = torch.arange(200)
        views = []
        for _ in "ab":
            shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
            strides = [draw.choice([1, 2, 3, 5, 8, 12]) for _ in shape]
            views.append(base.as_strided(shape, strides, draw.randint(0, 40)))
        elements = [view.flatten().tolist() for view in views]
        repeated = any(len(set(one)) < len(one) for one in elements)
        shared = bool(set(elements[0]) & set(elements[1]))
        counts[repeated or shared] += 1
        try:
            _memory.check_apart({"a": views[0], "b": views[1]})
            found = False
        except errors.InvalidArgumentError:
            found = True
        assert found == (repeated or shared), [(v.shape, v.stride()) for v in views]
    assert min(counts) > 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128, torch.float64])
def test_overlapping_views_of_any_dtype_are_refused(dtype: torch.dtype, namespace: str) -> None:
    base = matrix(dtype)
    with pytest.raises(errors.InvalidArgumentError, match="'a' and 'b' share memory"):
        SyncReplicas(model_of(a=base[:3], b=base[2:]), NAME, total_num_replicas=1)
    with pytest.raises(errors.InvalidArgumentError, match="'a' share memory with each other"):
        SyncReplicas(model_of(a=base.as_strided((3, 3), (1, 1))), NAME, total_num_replicas=1)
    assert not testing.leaked_names(namespace)
    with SyncReplicas(model_of(a=base[:2], b=base[2:]), NAME, total_num_replicas=1) as replicas:
        for wrong in (Replica, Viewer):  # only this model is tied
            options: Any = {"rank": 0} if wrong is Replica else {}
            with pytest.raises(errors.InvalidArgumentError, match="'a' and 'b' share memory"):
                wrong(model_of(a=base[:2], b=base[1:3]), NAME, **options)
        assert replicas.global_step == 0


def in_list(m: torch.Tensor) -> Any:
    return [None, m[0]]


ATTRIBUTES: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "the same memory": (lambda m: m, True), "a view": (lambda m: m[1:2], True),
    "other bits": (lambda m: m.view(torch.uint8)[-1, -1:], True), "in a list": (in_list, True),
    "in a dict": (lambda m: {"row": m[2, ::2]}, True),
    "a copy": (lambda m: (m.clone(), m[:0]), False), "a number": (lambda _: 1.0, False),
}  # fmt: skip


@pytest.mark.parametrize(("view", "shares"), ATTRIBUTES.values(), ids=ATTRIBUTES)
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.detach])
def test_attributes_that_view_parameters_are_refused(kind: Any, view: Any, *, shares: bool) -> None:
    """Such attributes would keep the old memory: the module would compute with old numbers."""

    def make(*, tied: bool) -> nn.Module:
        model = nn.Module()
        model.inner = model_of(a=kind(matrix()))
        model.inner.view = view(model.inner.a.detach()) if tied else None
        return model

    def refused() -> Any:
        return pytest.raises(
            errors.InvalidArgumentError, match=r"'inner\.view' shares memory with 'inner\.a'"
        )

    if not shares:
        with pair(make(tied=True), make(tied=True), optimizer=SGD(1.0)) as (_, replica):
            replica.close()
        return
    with refused():
        SyncReplicas(make(tied=True), NAME, total_num_replicas=1)
    with SyncReplicas(make(tied=False), NAME, total_num_replicas=1):
        if kind is nn.Parameter:  # a replica's buffers keep their memory
            with refused():
                Replica(make(tied=True), NAME, rank=0)
        Viewer(make(tied=True), NAME).close()


def test_attributes_that_each_forward_pass_makes_are_accepted() -> None:
    models = [nn.utils.spectral_norm(nn.Linear(2, 2)), nn.LSTM(2, 2)]
    for model in models:
        with SyncReplicas(model, NAME, total_num_replicas=1, if_exists="replace"):
            pass


class Flat(nn.Module):
    """Two layers whose parameters are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 16)
        self.first = nn.Parameter(flat.view(4, 4)[:, :2])
        self.second = nn.Parameter(flat.view(4, 4)[:, 2:].t())

    def forward(self, x: torch.Tensor) -> Any:
        return (x @ self.first.t() @ self.second.t()).square().sum()


class Transposed(nn.Module):
    """A tied autoencoder, written as the error suggests; its buffer is its parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(4, 2, bias=False)
        self.register_buffer("same", self.encoder.weight)

    def forward(self, x: torch.Tensor) -> Any:
        inner = self.encoder(x) + nn.functional.linear(x, self.get_buffer("same"))
        return nn.functional.linear(inner, self.encoder.weight.t()).square().sum()


@pytest.mark.parametrize("optimizer", [None, SGD(0.01)], ids=["of torch", "of shmacc"])
@pytest.mark.parametrize(("make", "width"), [(Flat, 2), (Transposed, 4)])
def test_slices_and_ties_in_the_forward_pass_train_as_in_one_process(
    make: Callable[[], Any], width: int, optimizer: Any
) -> None:
    model, other, alone = make(), make(), make()
    mine, theirs = (torch.optim.SGD(one.parameters(), 0.01) for one in (alone, model))
    with pair(model, other, optimizer=optimizer) as (replicas, replica):
        for step in range(3):
            x = torch.full((3, width), 1.0 + step)
            for one in (alone, other):
                one(x).backward()
            mine.step()
            mine.zero_grad()
            with in_a_round(replicas, replica):
                if optimizer is None:
                    theirs.step()
            for one in (model, other):
                for found, wanted in zip(one.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(found, wanted)
        assert make is Flat or model.same is model.encoder.weight
        replica.close()


def exchanged(a: nn.Parameter, b: nn.Parameter) -> None:
    a.grad, b.grad = b.grad, a.grad


def followed(a: nn.Parameter, b: nn.Parameter) -> None:
    """Give b the gradient of a; a gets a new gradient of zeros."""
    kept = a.grad
    a.grad, b.grad = torch.zeros_like(a), kept


def viewed(a: nn.Parameter, b: nn.Parameter) -> None:
    assert a.grad is not None
    assert b.grad is not None
    a.grad, b.grad = b.grad.t(), a.grad.flip(0).t()


def one_for_both(a: nn.Parameter, b: nn.Parameter) -> None:
    a.grad = b.grad


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("change", [exchanged, followed, viewed, one_for_both])
def test_gradients_may_share_memory_in_the_block(change: Any, *, turned: bool) -> None:
    """Like torch's optimizers, the update uses the gradients as the block leaves them."""

    def make() -> Any:
        return model_of(a=nn.Parameter(torch.zeros(3, 3)), b=nn.Parameter(torch.zeros(3, 3)))

    def backward(model: Any) -> None:
        scale = torch.arange(9.0).view(3, 3)
        ((model.a * scale).sum() + (model.b * (scale + 10)).sum()).backward()

    def changed(model: Any) -> None:
        change(*((model.b, model.a) if turned else (model.a, model.b)))

    model, other, alone = make(), make(), make()
    backward(alone)
    changed(alone)
    torch.optim.SGD(alone.parameters(), 1.0).step()
    with pair(model, other, optimizer=SGD(1.0)) as (replicas, replica):
        backward(other)
        with in_a_round(replicas, replica):
            changed(model)
        for name in "ab":
            assert torch.equal(getattr(model, name), getattr(alone, name)), name
        replica.close()


def test_gradients_may_share_memory_in_a_replica() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pair(model, other, optimizer=SGD(1.0)) as (replicas, replica):
        before = model.bias.detach().clone(), model.weight.detach().clone()
        other.weight.grad = torch.ones(1, 2)
        other.bias.grad = other.weight.grad[0, 1:]
        make_round(replicas, replica)
        assert torch.equal(model.bias, before[0] - 1)
        assert torch.equal(model.weight, before[1] - 1)
        replica.close()
