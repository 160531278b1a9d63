"""The signals of the process that calls `run`, during the run.

Handlers and mask belong to the caller. Python calls handlers in the main thread. So a run in the
main thread replaces each handler by its own, which only notes the signal. The run calls the
caller's handler between two looks at the children. There an exception does no harm; it ends the run
and is raised again. At the end, the run restores the mask, and handlers that nobody else replaced;
by sigaction, since Python does not see flags, or handlers of C libraries (faulthandler.register).

Signals that end the run are blocked and fetched, which tells their sender. If a supervisor signals
a whole process tree, a run inside a run gets the same signal twice, from two senders. Only a second
signal of the same sender, as by a second Ctrl-C, asks for more haste. If another thread does not
block these signals, they are noted like other signals, without a sender.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
BY_DEFAULT = ENDING | _PASSED_ON | {signal.SIGTSTP}
"""Signals that are noted even if the caller has no handler, but not if the caller ignores them."""
_ANOTHER = 2.0  # seconds after which a signal of another sender counts as a second signal

_SIGACTION = 512  # bytes, enough for any platform's struct sigaction
_libc = ctypes.CDLL(None)

_held: "CallersSignals | None" = None


class CallersSignals:
    """The signals that come while a run holds the caller's handlers.

    Attributes:
        ended_by: The first signal that asked for an end; 0: none.
        in_haste: Whether a second signal has asked for the end.
        error: The exception that a caller's handler has raised.
        mask: The calling thread's signal mask.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self.in_haste = False
        self.error: BaseException | None = None
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._asked: list[int] = []
        self._noted: list[int] = []
        self._senders: set[object] = set()
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._actions: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler) or (handler is signal.SIG_DFL and number in BY_DEFAULT):
                    self._keep(number, handler)
        self._fetched = (ENDING & self._before.keys()) - self.mask

    @property
    def holds_any(self) -> bool:
        """Whether this run is in the main thread, and so holds the caller's handlers."""
        return bool(self._before)

    @property
    def over(self) -> bool:
        """Whether the run must end."""
        return self.ended_by != 0 or self.error is not None

    def hold(self) -> None:
        """From now on, note signals instead of calling the caller's handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._fetched)
        for number in self._before:
            signal.signal(number, self._note)

    def _keep(self, number: int, handler: Any) -> None:
        self._before[number] = handler
        self._actions[number] = ctypes.create_string_buffer(_SIGACTION)
        _libc.sigaction(int(number), None, self._actions[number])

    def put_back(self) -> None:
        """Restore the caller's handlers and mask, even if a handler raises meanwhile."""
        try:
            for number in self._before:
                if signal.getsignal(number) == self._note:
                    self._give_back(number)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        except BaseException:
            self.put_back()  # ends, since each call has fewer handlers to restore
            raise

    def _give_back(self, number: int) -> None:
        try:
            signal.signal(number, self._before[number])
        finally:
            _libc.sigaction(int(number), self._actions[number], None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted.append(number)

    def act(self, children: Iterable[Any]) -> None:
        """Act on the signals that have come since the last call; raise nothing."""
        while self._fetched and (found := signal.sigtimedwait(self._fetched, 0)):
            self._ask_to_end(found.si_signo, (found.si_code, found.si_pid))
        noted, self._noted = self._noted, []
        for number in dict.fromkeys(noted):
            if number in ENDING:
                self._ask_to_end(number, None)
            elif number == signal.SIGTSTP:
                self._stop(children)
            elif number in _PASSED_ON:
                heard = [child.send_if_handled(number) for child in children]
                if ctypes.c_void_p.from_buffer(self._actions[number]).value:  # it has a handler
                    self._take_effect(number)
                elif not any(heard):
                    self._ask_to_end(number, None)  # the default action
            else:
                self._take_effect(number)

    def _ask_to_end(self, number: int, sender: object) -> None:
        now = time.monotonic()
        if not self.ended_by:
            self.ended_by, self._first = number, now
        elif sender is None or sender in self._senders or now > self._first + _ANOTHER:
            self.in_haste = True
        self._senders.add(sender)
        if number not in self._asked:
            self._asked.append(number)

    def _stop(self, children: Iterable[Any]) -> None:
        """Stop the children's groups, which Ctrl-Z does not reach, then this process."""
        for child in children:
            child.send(signal.SIGTSTP)
        self._take_effect(signal.SIGTSTP)  # comes back when the shell continues this process
        for child in children:
            child.send(signal.SIGCONT)

    def _take_effect(self, number: int) -> None:
        """Let a signal have the effect that it would have without a run."""
        try:
            if callable(self._before[number]):
                with masked(signal.SIG_SETMASK, self.mask):  # the handler may start processes
                    self._before[number](number, sys._getframe())  # noqa: SLF001  handlers use it
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:  # it has set itself again
                    self._keep(number, handler)
                    signal.signal(number, self._note)
            else:
                self._give_back(number)
                signal.raise_signal(number)
                signal.signal(number, self._note)
        except BaseException as error:  # noqa: BLE001  raised again when the run has ended
            self.error = self.error or error

    def owed(self) -> list[int]:
        """Return the signals that asked for an end, then those that came after the last `act`."""
        return self._asked + list(dict.fromkeys(self._noted))

    def release_in_child(self) -> None:
        """Restore the handlers in a forked child; the child sets its own mask."""
        for number in self._before:
            with suppress(ValueError):  # not Python's main thread
                self._give_back(number)


@contextmanager
def callers_signals() -> Iterator[CallersSignals]:
    """Hold the caller's signals in the block; then raise signals that ended it or came too late."""
    global _held  # noqa: PLW0603  handlers belong to the process
    signals, outer = CallersSignals(), _held
    try:
        if signals.holds_any:
            _held = signals
            signals.hold()
        yield signals
    finally:
        try:
            signals.put_back()
        finally:
            if _held is signals:
                _held = outer
            # Even if an error has ended the run meanwhile, or the handler of one signal raises.
            _raise_each(signals.owed())
            if signals.error is not None:
                raise signals.error


def _raise_each(numbers: list[int]) -> None:
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_each(numbers[1:])


@contextmanager
def masked(how: int, numbers: Iterable[int]) -> Iterator[None]:
    """Change the calling thread's mask in the block, as `signal.pthread_sigmask` does."""
    mask = signal.pthread_sigmask(how, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _release() -> None:
    global _held  # noqa: PLW0603
    if _held is not None:
        _held.release_in_child()
        _held = None


os.register_at_fork(after_in_child=_release)
