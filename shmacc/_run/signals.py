"""The signals of the process that calls `run`, while it does so.

Handlers and mask are the caller's. A run in the main thread, in which Python calls handlers, puts
one that only notes in the place of each of them, and calls the caller's own where no exception can
do harm: between two looks at the children. What that raises ends the run, and is raised again.
At the end each handler is put back, if no other has taken its place, and so is the mask. Of what a
library has set (faulthandler.register), and of flags, Python does not know: the C library keeps it.

Signals that end the run are blocked and fetched, which tells who sent them. If a supervisor signals
a whole process tree, a run inside of a run gets the same signal twice, from two senders. Only a
second one of the same sender, as by a second Ctrl-C, asks for more haste. Where another thread does
not block them, they are noted like others, without a sender.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
BY_DEFAULT = ENDING | _PASSED_ON | {signal.SIGTSTP}
"""Noted also without a handler of the caller's. What it ignores, as nohup SIGHUP, stays ignored."""
_ANOTHER = 2.0  # seconds after which a signal of another sender counts as a second one

_SIGACTION = 512  # bytes, in which any platform's struct sigaction has room
_libc = ctypes.CDLL(None)

_held: "CallersSignals | None" = None


class CallersSignals:
    """What came while a run holds the caller's signals.

    Attributes:
        ended_by: The first signal that asked for an end; 0: none.
        in_haste: Whether somebody asked twice.
        error: The exception that a caller's handler has raised.
        mask: The calling thread's signal mask.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self.in_haste = False
        self.error: BaseException | None = None
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._noted: list[int] = []
        self._senders: set[object] = set()
        self._first = 0.0
        self._before: dict[int, Any] = {}
        self._actions: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler) or (handler is signal.SIG_DFL and number in BY_DEFAULT):
                    self._before[number] = handler
                    self._actions[number] = ctypes.create_string_buffer(_SIGACTION)
                    _libc.sigaction(int(number), None, self._actions[number])
        self._fetched = (ENDING & self._before.keys()) - self.mask

    @property
    def holds_any(self) -> bool:
        """Whether this run is in the main thread, and so holds the caller's handlers."""
        return bool(self._before)

    @property
    def over(self) -> bool:
        """Whether the run is to end."""
        return self.ended_by != 0 or self.error is not None

    def hold(self) -> None:
        """From now on, note signals instead of calling the caller's handlers."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._fetched)
        for number in self._before:
            signal.signal(number, self._note)

    def put_back(self) -> None:
        """Put the caller's handlers back, and the mask, whatever they raise meanwhile."""
        try:
            for number in self._before:
                if signal.getsignal(number) == self._note:
                    self._give_back(number)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        except BaseException:
            self.put_back()  # each call has less to do
            raise

    def _give_back(self, number: int) -> None:
        try:
            signal.signal(number, self._before[number])
        finally:
            _libc.sigaction(int(number), self._actions[number], None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted.append(number)

    def act(self, children: Iterable[Any]) -> None:
        """Do what the signals ask for that have come since the last call; raise nothing."""
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
                    self._ask_to_end(number, None)  # which it does by default
            else:
                self._take_effect(number)

    def _ask_to_end(self, number: int, sender: object) -> None:
        now = time.monotonic()
        if not self.ended_by:
            self.ended_by, self._first = number, now
        elif sender is None or sender in self._senders or now > self._first + _ANOTHER:
            self.in_haste = True
        self._senders.add(sender)

    def _stop(self, children: Iterable[Any]) -> None:
        """Stop the children's groups, which Ctrl-Z does not reach, and then this process."""
        for child in children:
            child.send(signal.SIGTSTP)
        self._take_effect(signal.SIGTSTP)  # comes back when the shell continues this process
        for child in children:
            child.send(signal.SIGCONT)

    def _take_effect(self, number: int) -> None:
        """Let a signal have the effect that it would have without a run."""
        try:
            if callable(self._before[number]):
                with masked(signal.SIG_SETMASK, self.mask):  # it may start processes
                    self._before[number](number, None)
            else:
                self._give_back(number)
                signal.raise_signal(number)
                signal.signal(number, self._note)
        except BaseException as error:  # noqa: BLE001  raised again when the run has ended
            self.error = self.error or error

    def late(self) -> list[int]:
        """Return the signals that came after the last call of `act`."""
        return list(dict.fromkeys(self._noted))

    def release_in_child(self) -> None:
        """Put the handlers back in a forked child; it sets its own mask."""
        for number in self._before:
            with suppress(ValueError):  # it does not run Python's main thread
                self._give_back(number)


@contextmanager
def callers_signals() -> Iterator[CallersSignals]:
    """Hold the caller's signals in the block; then let those that ended the run take effect."""
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
            if signals.ended_by:  # also if the run has ended by an error meanwhile
                signal.raise_signal(signals.ended_by)
            for number in signals.late():
                signal.raise_signal(number)
            if signals.error is not None:
                raise signals.error


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
