"""Explains why importing the source tree without its extension fails, and what to do."""

import importlib
import os
from types import ModuleType


def extension() -> ModuleType:
    """Return the extension, ``shmacc._core``.

    Raises:
        ImportError: It is missing; in the source tree the message says why, and what to do.
    """
    try:
        return importlib.import_module("shmacc._core")
    except ModuleNotFoundError as missing:
        tree = os.path.dirname(__file__)
        # Else the extension lacks something, or the installed package is damaged.
        if missing.name != "shmacc._core" or not os.path.isdir(f"{tree}/native"):
            raise
        # Usually shmacc is installed too, but Python searches the checkout first.
        raise ImportError(
            f"{tree} is the source of shmacc, without the compiled extension. Python found it "
            "before any installed shmacc, because the folder that it is in comes first in "
            "sys.path: it is the current folder, or the script's. Either install the source "
            f"itself: pip install -e {os.path.dirname(tree)}; or start Python in another folder, "
            "or with the option -P."
        ) from None
