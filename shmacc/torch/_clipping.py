"""torch's clipping of gradients, also for sparse ones, which torch refuses."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from shmacc.torch._tables import TableEmbedding

_Trained = Iterable["torch.Tensor | TableEmbedding"]


def clip_grad_norm_(
    parameters: _Trained,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm, taken together, is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, which refuses sparse gradients: rows that a gradient does
    not have count as zeros. A sparse gradient is coalesced first.

    Args:
        parameters: Parameters (or one) whose ``.grad`` is clipped: ``model.parameters()``. An
            embedding of a table counts if it is among them: ``[*model.parameters(), model.user]``.
        max_norm: The largest norm.
        norm_type: The norm's order, ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: Whether a norm that is no finite number raises RuntimeError.

    Returns:
        The norm before clipping.
    """
    return nn.utils.clip_grad_norm_(_dense(parameters), max_norm, norm_type, error_if_nonfinite)


def clip_grad_value_(parameters: _Trained, clip_value: float) -> None:
    """Clamp each number of the gradients to +-`clip_value`, in place.

    As `torch.nn.utils.clip_grad_value_`, also for sparse gradients, which are coalesced first.

    Args:
        parameters: Parameters (or one) whose ``.grad`` is clipped, as for `clip_grad_norm_`.
        clip_value: The largest absolute value.
    """
    nn.utils.clip_grad_value_(_dense(parameters), clip_value)


def _dense(parameters: _Trained) -> list[Any]:
    """Return, for each gradient, an object whose dense ``.grad`` shares its values."""
    found = []
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient.coalesce()  # adds up rows that occur twice
            gradient = parameter.grad.detach().values()
        if gradient is not None and gradient.numel():  # an empty one has no largest element
            found.append(SimpleNamespace(grad=gradient))
    return found
