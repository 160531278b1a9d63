"""Runs calls that Ray has pickled by value, with the functions and classes of the program."""

import pickle
import sys
from typing import Any

from shmacc._run import child


def call(pickled: bytes, *first: Any) -> Any:
    """Call the pickled function once, with the arguments `first` and then the pickled arguments.

    The child pickles the result or exception by value, too: the program may define its class.
    """
    function, args = pickle.loads(pickled)  # noqa: S301  the run's own process wrote it
    by_value = sys.modules.get("ray.cloudpickle")  # loaded if the pickle needs it
    if by_value is not None:
        child.dumps = by_value.dumps
    return function(*first, *args)
