"""Explains why importing the source tree without its extension fails, and what to do."""

import importlib
import os

try:
    importlib.import_module("shmacc._core")
except ModuleNotFoundError as missing:
    _TREE = os.path.dirname(__file__)
    if missing.name != "shmacc._core" or not os.path.isdir(f"{_TREE}/native"):
        raise
    # Usually shmacc is installed too, but Python searches the checkout first.
    raise ImportError(
        f"{_TREE} is the source of shmacc, without the compiled extension. Python found it before "
        "any installed shmacc, because the folder that it is in comes first in sys.path: it is the "
        "current folder, or the script's. Either install the source itself: pip install -e "
        f"{os.path.dirname(_TREE)}; or start Python in another folder, or with the option -P."
    ) from None
