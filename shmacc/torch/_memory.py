"""Refuses models whose tensors share memory: in shared memory, each tensor gets its own."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from shmacc.errors import InvalidArgumentError

_MOST_WORK = 1_000_000
"""The most candidates that NumPy tries for a pair of tensors. A pair that needs more counts as
overlapping. Two slices of one tensor need a handful."""


def check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that share an element, and a tensor of which two indices share an element.

    Slices of one tensor without a common element are accepted, even if they are interleaved.

    Args:
        tensors: The tensors by name, each once; on the CPU.

    Raises:
        InvalidArgumentError: An element is shared. The message says by what, and what to do.
    """
    within: list[tuple[int, str]] = []  # (end, name) of earlier tensors that reach beyond `start`
    for start, name in sorted((one.data_ptr(), name) for name, one in tensors.items()):
        if not tensors[name].numel():
            continue
        within = [(end, other) for end, other in within if end > start]
        for _, other in within:
            if _share(tensors[other], tensors[name]):
                first, second = (one for one in tensors if one in {name, other})
                remedy = _remedy(first, tensors[first], second, tensors[second])
                raise InvalidArgumentError(
                    f"{first!r} and {second!r} share memory, but are two tensors, which would get "
                    f"memory of their own: {remedy}"
                )
        if _repeats(tensors[name]):
            raise InvalidArgumentError(
                f"Elements of {name!r} share memory with each other (it is a view, as by unfold() "
                "or as_strided()): give it memory of its own, by clone()"
            )
        within.append((_end(tensors[name]), name))


def check_attributes(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a module's attributes that are views of tensors, but are not registered.

    Such views would stay in the old memory. The attribute that `torch.nn.utils.spectral_norm`
    leaves is accepted: each forward pass makes it anew.

    Args:
        model: The model.
        tensors: The model's parameters and buffers, by name, on the CPU.

    Raises:
        InvalidArgumentError: An attribute, or a member of a list, tuple or dict that is an
            attribute, shares an element with a tensor. The message names both, and says what to do.
    """
    registered = {id(one) for one in (*model.parameters(), *model.buffers())}
    spans = sorted((one.data_ptr(), _end(one), name) for name, one in tensors.items())
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if hasattr(module, f"{attribute}_orig"):
                continue
            name = f"{path}.{attribute}" if path else attribute
            for one in _within(value):
                if id(one) in registered or one.device.type != "cpu" or not one.numel():
                    continue
                if one.layout != torch.strided:
                    continue
                start, end = one.data_ptr(), _end(one)
                for first, last, other in spans:
                    if first < end and start < last and _share(tensors[other], one):
                        raise InvalidArgumentError(
                            f"The attribute {name!r} shares memory with {other!r}, but is another "
                            f"tensor, which would not follow it into shared memory: let forward() "
                            f"make it from {other!r}, or give it memory of its own (clone)"
                        )


def _within(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, torch.Tensor):
                yield each


def _remedy(first: str, one: torch.Tensor, second: str, other: torch.Tensor) -> str:
    trained = [isinstance(each, nn.Parameter) for each in (one, other)]
    if place_of(one) == place_of(other) and trained[0] == trained[1]:
        if trained[0]:
            return "tie them by giving both modules one parameter"
        return "register one tensor under both names, or give one of them memory of its own (clone)"
    kept, left = (second, first) if one.numel() < other.numel() else (first, second)
    if trained[0] != trained[1]:  # keep the tensor that is trained
        kept, left = (first, second) if trained[0] else (second, first)
    how = f"self.{kept}.mT" if _are_transposed(one, other) else f"a view of self.{kept}"
    return (
        f"to tie them, keep {kept!r} alone, and let forward() use {how} where it used {left!r}; "
        f"or give {left!r} memory of its own (clone)"
    )


def _are_transposed(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dim() > 1 and place_of(one.detach().mT) == place_of(other)


def place_of(one: torch.Tensor) -> tuple[Any, ...]:
    """Return a key, which is equal for tensors that have the same memory, element for element."""
    return one.data_ptr(), one.dtype, one.shape, one.stride()


def _reach(one: torch.Tensor) -> int:
    """Return how many elements a tensor's memory spans; torch's strides are not negative."""
    steps = zip(one.shape, one.stride(), strict=True)
    return 1 + sum((int(n) - 1) * int(step) for n, step in steps)


def _end(one: torch.Tensor) -> int:
    size = _reach(one) * one.element_size() if one.numel() else 0
    return int(one.data_ptr()) + size


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return bool(np.shares_memory(_as_bytes(one), _as_bytes(other), max_work=_MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _as_bytes(one: torch.Tensor) -> Any:
    """Return an array in the tensor's memory, for any dtype. Its contents are not read."""
    size = one.element_size()
    interface = {
        "version": 3, "data": (one.data_ptr(), True), "shape": tuple(one.shape),
        "strides": tuple(step * size for step in one.stride()), "typestr": f"|V{size}",
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _repeats(one: torch.Tensor) -> bool:
    """Return whether two indices lead to the same element. Expanded dimensions do not count."""
    dimensions = sorted(
        (step, n) for n, step in zip(one.shape, one.stride(), strict=True) if n > 1 and step
    )
    reach, apart = 1, True
    for step, n in dimensions:
        apart = apart and step >= reach
        reach += (n - 1) * step
    if apart:  # always, except for some tensors that torch.as_strided made
        return False
    places = np.zeros(1, np.int64)
    for step, n in dimensions:
        places = (places[:, None] + np.arange(n) * step).reshape(-1)
    return len(np.unique(places)) < len(places)
