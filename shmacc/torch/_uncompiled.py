"""Calls that `torch.compile` leaves as they are; importing it imports the compiler, for 2 s."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return the function's result: it reads what other processes change."""
    return function(*args)
