"""Packages whose names are imported when they are first used.

A worker needs no inspection, and an inspecting tool needs no NumPy; both must start quickly. A
package lists its names in one table for run time, and with types in its ``__init__.pyi``; a test
compares the two. A class may move between private modules. So ``__module__`` of the class and of
its methods is set to the package: documentation, tracebacks, pickles and ``help`` then name the
package. This follows scientific Python's SPEC 1, without a dependency.
"""

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any


def attach(
    package: str, submodules: set[str], homes: dict[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: The package's name.
        submodules: Its public modules.
        homes: The full name of each private module, with the public names that it provides.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    public = sorted(submodules | home_of.keys())

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        for shown in getattr(value, "__mro__", (value,)):
            methods = (getattr(m, "__func__", m) for m in getattr(shown, "__dict__", {}).values())
            for named in (shown, *methods):
                if isinstance(named, type | FunctionType) and named.__module__.startswith(
                    f"{package}._"
                ):
                    named.__module__ = package
        # From now on Python finds the name without this function.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: list(public), public
