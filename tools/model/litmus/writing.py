"""Writes litmus tests for herd7: in C, or in the instructions that compilers emit for the C."""

import re

from reading import Litmus, Thread


class C:
    """Writes one process's statements in C."""

    @staticmethod
    def store(word: str, value: str, order: str) -> list[str]:
        """Return a store."""
        return [f"atomic_store_explicit({word}, {value}, memory_order_{order});"]

    @staticmethod
    def load(register: str, word: str, order: str) -> list[str]:
        """Return a load."""
        return [f"int r{register} = atomic_load_explicit({word}, memory_order_{order});"]

    @staticmethod
    def exchange(register: str, word: str, value: str) -> list[str]:
        """Return an atomic exchange with acquire and release order."""
        exchanged = f"atomic_exchange_explicit({word}, {value}, memory_order_acq_rel)"
        return [f"int r{register} = {exchanged};"]

    @staticmethod
    def fence(order: str) -> list[str]:
        """Return a fence."""
        return [f"atomic_thread_fence(memory_order_{order});"]


class AArch64:
    """Writes one process's instructions for AArch64.

    Attributes:
        at_first: Initial values of registers. X0, X1, ... have the addresses of the words.
        succeeded: Values of registers in the runs that count (see `exchange`).
    """

    head = "AArch64"

    def __init__(self, thread: Thread) -> None:
        self._address = {word: f"X{at}" for at, word in enumerate(thread.words)}
        self.at_first = [f"{x}={word}" for word, x in self._address.items()]
        self.succeeded: list[str] = []

    @staticmethod
    def register(number: str) -> str:
        """Return the register for C's r0, r1, ...: X10, X11, ..."""
        return f"X1{number}"

    def store(self, word: str, value: str, order: str) -> list[str]:
        """Return a store: STR or STLR."""
        store = {"relaxed": "STR", "release": "STLR"}[order]
        return [f"MOV W9,#{value}", f"{store} W9,[{self._address[word]}]"]

    def load(self, register: str, word: str, order: str) -> list[str]:
        """Return a load: LDR or LDAR."""
        load = {"relaxed": "LDR", "acquire": "LDAR"}[order]
        return [f"{load} W1{register},[{self._address[word]}]"]

    def exchange(self, register: str, word: str, value: str) -> list[str]:
        """Return LDAXR and STLXR, which order less than SWPAL; ignore runs whose STLXR fails."""
        status = 20 + len(self.succeeded)
        self.succeeded.append(f"X{status}=0")
        address = self._address[word]
        return [
            f"MOV W9,#{value}",
            f"LDAXR W1{register},[{address}]",
            f"STLXR W{status},W9,[{address}]",
        ]

    def fence(self, order: str) -> list[str]:
        """Return DMB ISH, or for acquire DMB ISHLD, which orders only earlier loads."""
        return ["DMB ISHLD" if order == "acquire" else "DMB ISH"]


class X86:
    """Writes x86-64: plain moves, since only loads overtake earlier stores. See `AArch64`."""

    head = "X86_64"
    _REGISTERS = ("ax", "bx", "cx", "dx")

    def __init__(self, thread: Thread) -> None:
        # A streamed (non-temporal) store needs its value in a register.
        streams = any(statement.endswith(" streamed") for statement in thread.code)
        self.at_first = ["rsi=1"] if streams else []
        self.succeeded: list[str] = []

    @classmethod
    def register(cls, number: str) -> str:
        """Return the register for C's r0, r1, ...: RAX, RBX, ..."""
        return f"r{cls._REGISTERS[int(number)]}"

    def store(self, word: str, value: str, order: str) -> list[str]:
        """Return MOV, or for a streamed store MOVNTI, which here always stores a 1."""
        return [f"movnti %esi,({word})" if order == "streamed" else f"movl ${value},({word})"]

    def load(self, register: str, word: str, _order: str) -> list[str]:
        """Return a load: MOV."""
        return [f"movl ({word}),%e{self._REGISTERS[int(register)]}"]

    def exchange(self, register: str, word: str, value: str) -> list[str]:
        """Return XCHG, which is always an atomic (locked) operation."""
        into = f"%e{self._REGISTERS[int(register)]}"
        return [f"movl ${value},{into}", f"xchgl {into},({word})"]

    def fence(self, order: str) -> list[str]:
        """Return MFENCE for seq_cst; weaker fences need no instruction."""
        return ["mfence"] if order == "seq_cst" else []


def as_c(litmus: Litmus, threads: list[Thread]) -> str:
    """Return the program in the C that herd7 reads."""
    lines = [f"C {litmus.name}", "{ " + _values(litmus) + " }"]
    for number, thread in enumerate(threads):
        words = ", ".join(f"atomic_int* {word}" for word in thread.words)
        lines += [f"P{number} ({words}) {{", *_translated(C(), thread), "}"]
    return "\n".join([*lines, f"exists {litmus.outcome}", ""])


def as_assembly(litmus: Litmus, threads: list[Thread], language: type[AArch64 | X86]) -> str:
    """Return the program in assembly as herd7 reads it, with a column for each process."""
    initially = [_values(litmus)]
    condition = []
    columns = []
    for number, thread in enumerate(threads):
        writer = language(thread)
        columns.append([f"P{number}", *_translated(writer, thread)])
        initially += [f"{number}:{value};" for value in writer.at_first]
        condition += [f"{number}:{value}" for value in writer.succeeded]
    longest = max(map(len, columns))
    rows = zip(*(column + [""] * (longest - len(column)) for column in columns), strict=True)
    condition.append(
        re.sub(r"(\d):r(\d)", lambda at: f"{at[1]}:{language.register(at[2])}", litmus.outcome)
    )
    return "\n".join(
        [
            f"{language.head} {litmus.name}",
            "{ " + " ".join(initially) + " }",
            *(" | ".join(row) + " ;" for row in rows),
            "exists (" + " /\\ ".join(condition) + ")",
            "",
        ]
    )


def _values(litmus: Litmus) -> str:
    return " ".join(f"{value};" for value in litmus.initially)


def _translated(writer: C | AArch64 | X86, thread: Thread) -> list[str]:
    lines = []
    for statement in thread.code:
        match statement.split():
            case ["store", word, value, order]:
                lines += writer.store(word, value, order)
            case [register, "=", "load", word, order]:
                lines += writer.load(register[1:], word, order)
            case [register, "=", "exchange", word, value]:
                lines += writer.exchange(register[1:], word, value)
            case ["fence", order]:
                lines += writer.fence(order)
            case _:
                raise ValueError(f"not a statement that can be translated: {statement}")
    return lines
