"""Clips gradients like torch, but also tables' gradients and sparse ones, which torch refuses."""

import weakref
from collections.abc import Container, Iterable, Iterator
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from shmacc.errors import InvalidArgumentError
from shmacc.torch._tables import TableEmbedding, rows_of

_Trained: TypeAlias = "nn.Module | torch.Tensor | Iterable[torch.Tensor | nn.Module]"

_with_tables: dict[int, weakref.ref[nn.Module]] = {}
"""The models that have tables, of this process's chiefs and replicas, by ``id(model)``."""


def watch(model: nn.Module) -> None:
    """From now on, refuse to clip a model's parameters without its tables."""
    key = id(model)
    _with_tables[key] = weakref.ref(model, lambda _: _with_tables.pop(key, None))


def clip_grad_norm_(
    parameters: _Trained,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, taken together, is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` refuses sparse gradients, and does not see the gradients of a
    `TableEmbedding`. Here, rows that a gradient lacks count as zeros. A sparse gradient is
    coalesced first. Call it in a round's block, or in a replica before its step.

    Args:
        parameters: The model, to clip all its parameters and tables; or a parameter or module, or
            several of them.
        max_norm: The largest norm.
        norm_type: The norm's order, ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: Whether to raise RuntimeError if the norm is not finite.
        foreach: The same as in torch.

    Returns:
        The norm before clipping.

    Raises:
        InvalidArgumentError: All parameters of a module were given, as by ``model.parameters()``,
            but not its tables with gradients; or an item is neither a tensor nor a module.
    """
    dense = _dense(parameters)
    if not dense:
        return torch.zeros((), device="cpu")
    return nn.utils.clip_grad_norm_(dense, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_grad_value_(parameters: _Trained, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp each number of the gradients to +-`clip_value`, in place.

    Unlike `torch.nn.utils.clip_grad_value_`, this also clips tables, and sparse gradients, which
    are coalesced first.

    Args:
        parameters: What to clip, as for `clip_grad_norm_`.
        clip_value: The largest absolute value.
        foreach: The same as in torch.

    Raises:
        InvalidArgumentError: The same as for `clip_grad_norm_`.
    """
    dense = _dense(parameters)
    if dense:
        nn.utils.clip_grad_value_(dense, clip_value, foreach)


def _dense(parameters: _Trained) -> list[Any]:
    """Return, for each gradient, an object whose dense ``.grad`` shares its values."""
    one = isinstance(parameters, nn.Module | torch.Tensor)
    all_given: Any = [parameters] if one else parameters
    given = list(all_given)
    trained = {id(each): each for item in given for each in _trained(item)}
    named = {id(item) for item in given if isinstance(item, torch.Tensor)}
    if named or not given:
        _refuse_without_tables(trained, named)
    found = []
    for each in trained.values():
        gradient = _gradient(each)
        if gradient is not None and gradient.is_sparse:
            each.grad = gradient.coalesce()  # adds up rows that occur twice
            gradient = each.grad.detach().values()
        if gradient is not None and gradient.numel():  # an empty gradient has no largest element
            found.append(SimpleNamespace(grad=gradient))
    return found


def _trained(item: Any) -> Iterator[Any]:
    """Yield a module's parameters and its embeddings with tables; or the parameter itself."""
    if isinstance(item, nn.Module):
        yield from item.parameters()
        yield from (module for module in item.modules() if isinstance(module, TableEmbedding))
    elif isinstance(item, torch.Tensor):
        yield item
    else:
        raise InvalidArgumentError(
            "Gradients are clipped of a model, of parameters and of modules, but was given a "
            f"{type(item).__name__}"
        )


def _gradient(trained: Any) -> "torch.Tensor | None":
    """Return the gradient to change in place; for a replica's table, its pending rows' gradient."""
    gradient: torch.Tensor | None = trained.grad
    if gradient is None and isinstance(trained, TableEmbedding):
        return rows_of(trained).merged()
    return gradient


def _refuse_without_tables(clipped: Container[int], named: AbstractSet[int]) -> None:
    """Refuse to clip all of a module's parameters but not its tables, which the caller forgot.

    Args:
        clipped: The ids of the parameters and tables that are clipped.
        named: The ids of parameters that were given one by one, not as part of a module.
    """
    for model in [found for ref in list(_with_tables.values()) if (found := ref()) is not None]:
        for path, table in model.named_modules():
            if (
                isinstance(table, TableEmbedding)
                and id(table) not in clipped
                and _has_gradient(table)
                and any(_covers(named, module) for module in _modules_with(model, path))
            ):
                raise InvalidArgumentError(
                    f"The rows of {path!r}, a TableEmbedding, are none of the parameters that were "
                    "given, though they have gradients, too, and all parameters beside them are: "
                    "clip_grad_norm_(model, ...) and clip_grad_value_(model, ...) take both. (To "
                    "leave them out on purpose, call torch.nn.utils')"
                )


def _has_gradient(table: TableEmbedding) -> bool:
    return table.grad is not None or bool(rows_of(table).pending)


def _modules_with(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the module at this path, and the modules that contain it."""
    yield model.get_submodule(path)
    while path:
        path = path.rpartition(".")[0]
        yield model.get_submodule(path)


def _covers(given: AbstractSet[int], module: nn.Module) -> bool:
    """Return whether `given` has all parameters of the module that have a gradient."""
    own = list(module.parameters())
    named = any(id(each) in given for each in own) if own else not given
    return named and all(each.grad is None or id(each) in given for each in own)
