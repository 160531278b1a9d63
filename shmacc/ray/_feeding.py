"""A thread of the chief's process that sends the arrays to nodes that have joined or answer again.

A round may wait for workers on such a node, and they for the arrays. So this does not wait for the
chief's next `publish`.
"""

import logging
import threading
import weakref
from collections.abc import Callable

import ray

from shmacc.errors import DeadlineExceededError, FailedPreconditionError

_LOOK_FOR_NODES = 1.0

_logger = logging.getLogger("shmacc")


def start_feeding(feed: Callable[[], None], name: str, stop: threading.Event) -> None:
    """Call a method every second, until it is stopped, replaced, or its object is gone.

    Args:
        feed: The method.
        name: What is fed, for messages.
        stop: Set at the end.
    """
    what = weakref.WeakMethod(feed)
    threading.Thread(
        target=_run, args=(what, name, stop), daemon=True, name="shmacc feeder"
    ).start()


def _run(what: "weakref.WeakMethod[Callable[[], None]]", name: str, stop: threading.Event) -> None:
    while not stop.wait(_LOOK_FOR_NODES):
        feed = what()
        if feed is None or not ray.is_initialized():
            return
        try:
            feed()
        except FailedPreconditionError as error:  # for good
            _logger.warning("%s: nodes that join get nothing of this process", error)
            return
        except Exception as error:
            said = "Nodes that have joined did not get %r: %s", name, error
            _logger.log(logging.ERROR, *said, exc_info=not isinstance(error, DeadlineExceededError))
        del feed
