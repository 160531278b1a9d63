"""Packages whose names are imported when they are first asked for.

A worker needs no inspection, and a tool that looks at segments no NumPy; both are to start quickly.
What a package offers stands in one table here at run time, and with types in its ``__init__.pyi``;
a test holds the two against each other. As scientific Python's SPEC 1 has it, without a dependency.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def attach(
    package: str, submodules: set[str], homes: dict[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return what a package is to have as ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: Its name.
        submodules: Those of its modules that are public.
        homes: Private modules, by their full names, and what they give to the package.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    public = sorted(submodules | home_of.keys())

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: list(public), public
