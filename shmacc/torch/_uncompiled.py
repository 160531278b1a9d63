"""Calls that `torch.compile` does not compile. Importing this imports the compiler (2 s)."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return the function's result, which depends on what other processes write."""
    return function(*args)
