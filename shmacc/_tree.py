"""Explains why importing the source tree without its extension fails, and what to do."""

import importlib
import os
from types import ModuleType


def extension() -> ModuleType:
    """Return the extension, ``shmacc._core``.

    Raises:
        ImportError: The extension is missing. In the source tree, the message says what to do.
    """
    try:
        return importlib.import_module("shmacc._core")
    except ModuleNotFoundError as missing:
        tree = os.path.dirname(__file__)
        # The extension lacks another module, or an installed shmacc is damaged: explain nothing.
        if missing.name != "shmacc._core" or not os.path.isdir(f"{tree}/native"):
            raise
        # Usually shmacc is installed too, but Python first searches the current folder, or the
        # folder of the script.
        root = os.path.dirname(tree)
        raise ImportError(
            f"{tree} is the source of shmacc, not compiled: start Python in another folder, or "
            f"with -P (what is installed by `pip install {root}` is found there)"
        ) from None
