"""A torch model's tensors: their names, and their place in shared memory."""

import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shmacc._base.array_types import ValueArray
from shmacc._base.signals import pass_on
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._parameters.tables import Table
from shmacc._values import dtypes
from shmacc._values.conversions.torch import tensor
from shmacc._values.specs import IndexedSlicesSpec, TensorSpec
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch._memory import check_apart, place_of
from shmacc.torch._rows import spec_of
from shmacc.torch._tables import TableEmbedding, rows_of

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name. A tied tensor has only its first name.

    Raises:
        InvalidArgumentError: The model cannot be trained from shared memory.
    """
    found: dict[str, torch.Tensor] = {**parameters(model), **buffers(model)}
    for name, value in found.items():
        if nn.parameter.is_lazy(value):
            raise InvalidArgumentError(
                f"{name!r} has no shape yet: run the model once on an example, in every process"
            )
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise InvalidArgumentError(
                f"{name!r} must be a dense tensor on the CPU, as shared memory is, but is "
                f"{value.layout} on '{value.device}'"
            )
    check_apart(found)
    for name, module in model.named_modules():
        if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
            raise InvalidArgumentError(
                f"Module {name!r} has max_norm, by which its forward pass writes into parameters; "
                "these are written between rounds by nobody. Leave it out, and scale the rows that "
                "were looked up: rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )
    return found


def unexpand(own: Mapping[str, torch.Tensor]) -> None:
    """Give expanded views memory of their own: torch refuses to copy into such views."""
    for value in own.values():
        if 0 in value.stride():
            value.data = value.detach().clone()


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name. A tied parameter has only its first name."""
    return {plain(name): value for name, value in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the buffers that are not also parameters. A tied buffer occurs once."""
    trained = set(model.parameters())
    return {plain(name): one for name, one in model.named_buffers() if one not in trained}


def tables(model: nn.Module) -> dict[str, TableEmbedding]:
    """Return the embeddings with tables, by the table's name. A tied embedding occurs once."""
    return {
        plain(f"{path}.rows" if path else "rows"): module
        for path, module in model.named_modules()
        if isinstance(module, TableEmbedding)
    }


def plain(name: str) -> str:
    """Return the name that a tensor has in a model before `torch.compile`, which wraps modules."""
    return name.replace("_orig_mod.", "")


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's state by `plain` names."""
    return {plain(name): value for name, value in model.state_dict().items()}


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state into a model; the state's model and this one may be compiled.

    Raises:
        RuntimeError: The state is of another model. The message is torch's.
    """
    own = {plain(name): name for name in model.state_dict()}
    model.load_state_dict({own.get(plain(name), name): value for name, value in state.items()})


def member_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Return the group's members: parameters that require grad, tables, and buffers of numbers.

    Parameters are reduced by CMEAN: as in one batch of all samples, the divisor is the weight of
    the whole round, even if some replica's loss does not depend on a parameter. Buffers (running
    statistics) are the mean of the replicas that have changed them.
    """
    sparse = rows_alone(model)
    members: dict[str, TensorSpec] = {}
    for name, parameter in parameters(model).items():
        if parameter.requires_grad:
            kind = IndexedSlicesSpec if name in sparse else TensorSpec
            try:
                members[name] = kind(tuple(parameter.shape), parameter.dtype)
            except InvalidArgumentError as error:
                pass_on(error)
                raise error.of_member(name) from error.__cause__
    for name, embedding in tables(model).items():
        spec = rows_of(embedding).spec
        members[name] = IndexedSlicesSpec((None, *spec.row_shape), spec.dtype)
    if not members:
        raise InvalidArgumentError("The model has no parameter that requires grad")
    for name, buffer in buffers(model).items():
        if dtypes.is_one(buffer.dtype):
            members[name] = TensorSpec(tuple(buffer.shape), buffer.dtype, reduction_type="MEAN")
    return members


def rows_alone(model: nn.Module) -> set[str]:
    """Return the names of parameters with sparse gradients: only sparse embeddings use these.

    A parameter that a dense layer also uses is left out: the sum of both gradients is dense.
    """
    dense: set[int] = set()
    sparse: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            of_rows = isinstance(module, _EMBEDDINGS) and module.sparse
            (sparse if of_rows else dense).add(id(parameter))
    return {
        name
        for name, parameter in parameters(model).items()
        if id(parameter) in sparse and id(parameter) not in dense
    }


def check_differences(
    own: Mapping[str, torch.Tensor], embeddings: Mapping[str, TableEmbedding], shared: SharedArrays
) -> None:
    """Refuse a model whose tensors or tables differ from the shared ones.

    Raises:
        InvalidArgumentError: A tensor or table differs. The message names the first one.
    """
    theirs = {name: shared[name] for name in shared if not name.startswith(".")}
    at = {name: table for name, table in theirs.items() if isinstance(table, Table)}
    for found, wanted in ((theirs.keys() - at.keys(), own), (at.keys(), embeddings)):
        for name in sorted(found ^ wanted.keys()):
            has, has_not = ("The chief's", "this one") if name in found else ("This", "the chief's")
            raise InvalidArgumentError(f"{has} model has {name!r}, and {has_not} has not")
    for name, table in at.items():
        spec, existing = rows_of(embeddings[name]).spec, spec_of(table)
        if spec != existing:
            raise InvalidArgumentError(
                f"{name!r} is {spec} in this model, and {existing} in the chief's"
            )
    for name, value in own.items():
        there = in_memory(theirs[name])
        if (there.dtype, there.shape) != (value.dtype, value.shape):
            raise InvalidArgumentError(
                f"{name!r} is {value.dtype} {tuple(value.shape)} in this model, and {there.dtype} "
                f"{tuple(there.shape)} in the chief's"
            )


def in_memory(array: ValueArray) -> torch.Tensor:
    """Return a tensor in the array's memory. torch ignores that the memory may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return tensor(array)


def place(own: Mapping[str, torch.Tensor], shared: SharedArrays) -> dict[str, Any]:
    """Move the model's tensors into the shared memory; they stay the same objects.

    Returns:
        The place of each tensor, for `check_in_place`.
    """
    for name, value in own.items():
        value.data = in_memory(shared[name])
    return {name: place_of(value) for name, value in own.items()}


def check_in_place(own: Mapping[str, torch.Tensor], places: Mapping[str, Any]) -> None:
    """Refuse a model that has left shared memory: others would not see what it computes.

    Raises:
        FailedPreconditionError: A tensor has other memory. The message names the tensor.
    """
    for name, place in places.items():
        if place_of(own[name]) != place:
            raise FailedPreconditionError(
                f"{name!r} is not in shared memory any more: the model was converted or moved, or "
                "got other memory (`.to()`, `.half()`, `.share_memory()`, `parameter.data = ...`); "
                "do that before it is shared"
            )


def check_same(model: nn.Module, shared: Mapping[str, Any], *, with_grad: bool) -> None:
    """Refuse a model whose parameters were replaced, so that it does not use the shared ones.

    Args:
        model: The model.
        shared: The parameters, and embeddings with tables, that the model had when it was shared.
        with_grad: Whether to refuse also an additional parameter that has a gradient.

    Raises:
        FailedPreconditionError: A parameter was replaced or added. The message names the first.
    """
    own: dict[str, Any] = {**parameters(model)}
    if any(isinstance(one, TableEmbedding) for one in shared.values()):
        own |= tables(model)
    now, before = ({id(one): name for name, one in each.items()} for each in (own, shared))
    others = [name for each, name in before.items() if each not in now]
    if with_grad:
        others += [
            name for name, one in own.items() if one.grad is not None and id(one) not in before
        ]
    if others:
        raise FailedPreconditionError(
            f"{others[0]!r} is not the parameter that was shared: the model has got another one "
            "since (a module was replaced or added, or load_state_dict(assign=True) was called); "
            "do that before"
        )


def check_trained(all_of_them: Mapping[str, nn.Parameter], trained: Container[str]) -> None:
    """Refuse a model with a parameter that began to require grad after the model was shared.

    Raises:
        FailedPreconditionError: The group has no member for a parameter; the message names it.
    """
    for name, parameter in all_of_them.items():
        if parameter.requires_grad and name not in trained:
            raise FailedPreconditionError(
                f"{name!r} requires grad now, but did not when the chief shared the model. Let all "
                "that will ever be trained require grad then, in chief and replicas, and freeze it "
                "for a while by requires_grad_(False) after that"
            )


def given(trained: "nn.Module | nn.Parameter", taken: Any) -> torch.Tensor:
    """Return a round's gradient of a parameter, or the gradients of a table's rows."""
    of_table = isinstance(trained, TableEmbedding)
    gradient: torch.Tensor = tensor(taken.values) if of_table else taken.to_torch()
    return gradient


def gradients(
    left: Mapping[str, torch.Tensor], sparse: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients that backward passes have left in ``.grad``, in a group's form.

    Raises:
        InvalidArgumentError: A member takes sparse gradients, but its gradient is dense.
    """
    for name, gradient in left.items():
        if gradient.requires_grad:  # after backward(create_graph=True)
            gradient = gradient.detach()  # noqa: PLW2901
        dense = gradient.layout == torch.strided
        if dense and name in sparse:
            raise InvalidArgumentError(
                f"The gradient of {name!r} is dense, although its module has sparse=True: the loss "
                "depends on the weights in another way, too. Make the module sparse=False, in the "
                "chief as well"
            )
        yield name, gradient if dense or name in sparse else gradient.to_dense()
