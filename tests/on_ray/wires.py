"""Networks with delay and loss: a network namespace for each node, and a process between them.

Besides its loopback each namespace has a TUN device. A process of this module reads the devices'
packets, and delays, drops or passes them on. Not every kernel has ``tc netem``, which can do this.
The packets are those of real TCP connections.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_NETWORK = "10.93.7"
_MTU = 9000
_DESTINATION = slice(16, 20)  # of an IPv4 packet

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Return why there can be no such network here; None: there can."""
    probe = [*as_root(), "unshare", "--net", "true"]
    try:
        subprocess.run(probe, check=True, capture_output=True)
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        subprocess.run(["ip", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces with TUN devices: {error}"
    return None


def as_root() -> list[str]:
    """Return a prefix for a command, which lets the command make namespaces."""
    return [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]


class Wires:
    """Network namespaces and the process between them; the calling thread enters namespace 0.

    `delay` is the mean time of a packet and its standard deviation, in seconds; `loss` is the share
    of packets that is lost.
    """

    def __init__(self, number: int, delay: tuple[float, float], loss: float) -> None:
        self.number = number
        self._namespaces: list[int] = []
        devices = []
        for i in range(number):
            _check(_libc.unshare(_CLONE_NEWNET))
            self._namespaces.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
            devices.append(_device())
            for command in (
                "link set dev lo up",
                f"address add {self.address(i)}/24 dev wire",
                f"link set dev wire mtu {_MTU} up",
            ):
                subprocess.run(["ip", *command.split()], check=True)
        self._enter(0)
        fork = multiprocessing.get_context("fork")
        self._control, theirs = fork.Pipe()
        carrier = _Carrier(devices, theirs, delay, loss)
        self._process = fork.Process(target=carrier.run, daemon=True)
        self._process.start()
        for device in devices:
            os.close(device)

    @staticmethod
    def address(number: int) -> str:
        return f"{_NETWORK}.{number + 2}"

    def wire(self, node: int) -> int:
        """Return a node's namespace; nodes that are added later share the last namespace."""
        return min(node, self.number - 1)

    def _enter(self, number: int) -> None:
        _check(_libc.setns(self._namespaces[number], _CLONE_NEWNET))

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Let this thread start processes in a namespace."""
        self._enter(number)
        try:
            yield
        finally:
            self._enter(0)

    def cut(self, *ends: int) -> None:
        """Cut a namespace off from all others, or two from each other."""
        self._control.send(("cut", frozenset(ends)))

    def mend(self, *ends: int) -> None:
        self._control.send(("mend", frozenset(ends)))

    def figures(self) -> tuple[int, int]:
        """Return how many packets were carried, and how many were lost."""
        self._control.send(("figures", frozenset()))
        carried, lost = self._control.recv()
        return carried, lost


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    return device


class _Carrier:
    """Carries packets until its control pipe is closed."""

    def __init__(
        self, devices: list[int], control: Any, delay: tuple[float, float], loss: float
    ) -> None:
        self._devices, self._control, self._delay, self._loss = devices, control, delay, loss
        self._numbers = {
            bytes(map(int, Wires.address(number).split("."))): number
            for number in range(len(devices))
        }
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._cut: set[frozenset[int]] = set()
        self._carried = self._lost = 0

    def run(self) -> None:
        waiting = [*self._devices, self._control]
        with contextlib.suppress(EOFError):
            while True:
                ready, _, _ = select.select(waiting, [], [], self._deliver())
                for source in ready:
                    if source is self._control:
                        self._obey(*self._control.recv())
                    else:
                        self._take_from(source)

    def _deliver(self) -> float:
        """Deliver what is due; return the seconds until the next packet."""
        queue = self._on_the_way
        while queue and (left := queue[0][0] - time.monotonic()) <= 0:
            _, _, to, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):  # the device's queue is full: the packet is lost
                os.write(self._devices[to], packet)
        return left if queue else 1.0

    def _obey(self, what: str, ends: frozenset[int]) -> None:
        if what == "figures":
            self._control.send((self._carried, self._lost))
        else:
            (self._cut.add if what == "cut" else self._cut.discard)(ends)

    def _take_from(self, source: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(source, _MTU + 100)
            except BlockingIOError:
                return
            to = self._numbers.get(packet[_DESTINATION])
            if to is None or packet[0] >> 4 != 4:
                continue
            self._carried += 1
            ends = {to, self._devices.index(source)}
            if any(cut <= ends for cut in self._cut) or random.random() < self._loss:
                self._lost += 1
                continue
            due = time.monotonic() + max(0.0, random.gauss(*self._delay))
            heapq.heappush(self._on_the_way, (due, next(self._order), to, packet))
