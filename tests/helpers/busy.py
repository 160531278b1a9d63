"""Threads keep a segment busy with calls all the time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.support import LONG, until


@contextmanager
def busy(*work: Callable[[], Any]) -> Iterator[list[int]]:
    """Repeat each call in a thread of its own; yield a list of how often each call was made."""
    stop = threading.Event()
    done = [0] * len(work)
    failed: list[BaseException] = []

    def repeat(i: int) -> None:
        try:
            while not stop.is_set():
                work[i]()
                done[i] += 1
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    try:
        until(lambda: all(done) or bool(failed))
        yield done
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    if failed:
        raise failed[0]
