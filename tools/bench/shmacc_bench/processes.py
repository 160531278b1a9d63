"""A process that holds one object and calls its methods when it is asked to."""

import contextlib
import multiprocessing
import operator
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

CONTEXT: Final = multiprocessing.get_context("spawn")
_ANSWER: Final = 120.0  # seconds: TensorFlow may be imported, on a busy machine
_END: Final = 10.0


class FailedError(Exception):
    """The call raised an exception, or its process has ended; the message says which."""


class Apart:
    """An object in a process of its own, which sleeps between calls."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Have a new process call `make`, and keep what it returns."""
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, make, arguments))
        self._process.start()
        theirs.close()
        self.answer()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method and return what it returns."""
        self.order(method, *arguments)
        return self.answer()

    def order(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` waits for its end."""
        with contextlib.suppress(BrokenPipeError):  # `answer` reports it
            self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Return the result of the ordered call; `FailedError` if it failed."""
        try:
            if not self._pipe.poll(_ANSWER):
                raise FailedError(f"no answer in {_ANSWER:.0f} s")
            failed, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise FailedError(f"its process ended: {self._process.exitcode}") from None
        if failed:
            raise FailedError(answer)
        return answer

    def end(self) -> None:
        """Close the object and end its process."""
        self._pipe.close()
        self._process.join(_END)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Follow orders until the pipe is closed."""
    failed, made = _tried(make, *arguments)
    pipe.send((failed, made if failed else None))
    if failed:
        return
    with contextlib.suppress(EOFError):
        while True:
            method, given = pipe.recv()
            pipe.send(_tried(operator.methodcaller(method, *given), made))
    made.close()


def _tried(call: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Return whether the call failed, and its result or error."""
    try:
        return False, call(*arguments)
    except Exception as error:  # noqa: BLE001  the other side reports it
        return True, f"{type(error).__name__}: {error}"
