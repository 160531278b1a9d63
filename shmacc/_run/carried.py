"""Runs calls that Ray has pickled by value, with the functions and classes of the program."""

import pickle
import sys
from typing import Any

from shmacc._run import child


def call(pickled: bytes, *first: Any) -> Any:
    """Call the pickled function with the arguments `first`, then with its pickled arguments.

    The result or exception will be pickled by value, too: the program may define its class.
    """
    function, args = pickle.loads(pickled)  # noqa: S301  the run's own process wrote it
    by_value = sys.modules.get("ray.cloudpickle")  # loaded if the pickle needs it
    if by_value is not None:
        child.dumps = by_value.dumps
    return function(*first, *args)
