"""Calls that were pickled by value, with what is defined in the program, as Ray pickles them."""

import pickle
import sys
from typing import Any

from shmacc._run import child


def call(pickled: bytes, *first: Any) -> Any:
    """Make a call: a function and its arguments, to which those in `first` are added in front.

    What it returns or raises is pickled in the same way: its class may be the program's.
    """
    function, args = pickle.loads(pickled)  # noqa: S301  the run's own process wrote it
    by_value = sys.modules.get("ray.cloudpickle")  # it is loaded if the pickle needs it
    if by_value is not None:
        child.dumps = by_value.dumps
    return function(*first, *args)
