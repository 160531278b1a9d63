"""Explains why importing the source tree without its extension fails, and what to do."""

import importlib
import os
from types import ModuleType


def extension() -> ModuleType:
    """Return the extension, ``shmacc._core``.

    Raises:
        ImportError: No extension; in the source tree the message says why, and what to do.
    """
    try:
        return importlib.import_module("shmacc._core")
    except ModuleNotFoundError as missing:
        tree = os.path.dirname(__file__)
        # Else the extension lacks something, or the installed package is damaged.
        if missing.name != "shmacc._core" or not os.path.isdir(f"{tree}/native"):
            raise
        # Usually shmacc is installed too, but Python looks first into the current folder, or into
        # that of the script.
        root = os.path.dirname(tree)
        raise ImportError(
            f"{tree} is the source of shmacc, not compiled: start Python in another folder, or "
            f"with -P (what is installed by `pip install {root}` is found there)"
        ) from None
