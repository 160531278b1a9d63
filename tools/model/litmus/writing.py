"""Writes litmus tests for herd7: in C, or in the instructions that compilers make of it."""

import re

from reading import Litmus, Thread

_STORE = re.compile(r"atomic_store_explicit\((\w+), (\d+), memory_order_(\w+)\);")
_LOAD = re.compile(r"int r(\d) = atomic_load_explicit\((\w+), memory_order_(\w+)\);")
_EXCHANGE = re.compile(
    r"int r(\d) = atomic_exchange_explicit\((\w+), (\d+), memory_order_acq_rel\);"
)
_FENCE = re.compile(r"atomic_thread_fence\(memory_order_(\w+)\);")


class AArch64:
    """Writes one process's instructions; LDAXR and STLXR order less than an exchange by SWPAL.

    Attributes:
        at_first: Registers before the process begins. Addresses are in X0 and on.
        succeeded: Values that registers have in the runs that count (see `exchange`).
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
        """STR or STLR."""
        store = {"relaxed": "STR", "release": "STLR"}[order]
        return [f"MOV W9,#{value}", f"{store} W9,[{self._address[word]}]"]

    def load(self, register: str, word: str, order: str) -> list[str]:
        """LDR or LDAR."""
        load = {"relaxed": "LDR", "acquire": "LDAR"}[order]
        return [f"{load} W1{register},[{self._address[word]}]"]

    def exchange(self, register: str, word: str, value: str) -> list[str]:
        """LDAXR and STLXR; a failed STLXR would be tried again, so its runs do not count."""
        status = 20 + len(self.succeeded)
        self.succeeded.append(f"X{status}=0")
        address = self._address[word]
        return [
            f"MOV W9,#{value}",
            f"LDAXR W1{register},[{address}]",
            f"STLXR W{status},W9,[{address}]",
        ]

    def fence(self, order: str) -> list[str]:
        """DMB ISH; for acquire DMB ISHLD, which orders only earlier loads."""
        return ["DMB ISHLD" if order == "acquire" else "DMB ISH"]


class X86:
    """Writes plain moves: only a load may overtake an earlier store; see `AArch64`."""

    head = "X86_64"
    _REGISTERS = ("ax", "bx", "cx", "dx")

    def __init__(self, thread: Thread) -> None:
        # The value of a streamed store must be in a register.
        streams = any("memory_order_streamed" in statement for statement in thread.code)
        self.at_first = ["rsi=1"] if streams else []
        self.succeeded: list[str] = []

    @classmethod
    def register(cls, number: str) -> str:
        """Return the register for C's r0, r1, ...: RAX, RBX, ..."""
        return f"r{cls._REGISTERS[int(number)]}"

    def store(self, word: str, value: str, order: str) -> list[str]:
        """MOV, or MOVNTI past the caches, which always stores a 1."""
        return [f"movnti %esi,({word})" if order == "streamed" else f"movl ${value},({word})"]

    def load(self, register: str, word: str, _order: str) -> list[str]:
        """MOV."""
        return [f"movl ({word}),%e{self._REGISTERS[int(register)]}"]

    def exchange(self, register: str, word: str, value: str) -> list[str]:
        """XCHG, which is always locked."""
        into = f"%e{self._REGISTERS[int(register)]}"
        return [f"movl ${value},{into}", f"xchgl {into},({word})"]

    def fence(self, order: str) -> list[str]:
        """MFENCE for seq_cst; weaker fences need no instruction."""
        return ["mfence"] if order == "seq_cst" else []


def as_c(litmus: Litmus, threads: list[Thread]) -> str:
    """Return the C program, without comments and without other variants' lines."""
    lines = [f"C {litmus.name}", "{ " + _values(litmus) + " }"]
    for number, thread in enumerate(threads):
        words = ", ".join(f"atomic_int* {word}" for word in thread.words)
        lines += [f"P{number} ({words}) {{", *thread.code, "}"]
    return "\n".join([*lines, f"exists {litmus.outcome}", ""])


def as_assembly(litmus: Litmus, threads: list[Thread], language: type[AArch64 | X86]) -> str:
    """Return the instructions, a column for each process."""
    initially = [_values(litmus)]
    condition = []
    columns = []
    for number, thread in enumerate(threads):
        writer = language(thread)
        code = [line for statement in thread.code for line in _translate(writer, statement)]
        columns.append([f"P{number}", *code])
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
    return " ".join(f"{word}={value};" for word, value in litmus.initially.items())


def _translate(writer: AArch64 | X86, statement: str) -> list[str]:
    if found := _STORE.fullmatch(statement):
        return writer.store(found[1], found[2], found[3])
    if found := _LOAD.fullmatch(statement):
        return writer.load(found[1], found[2], found[3])
    if found := _EXCHANGE.fullmatch(statement):
        return writer.exchange(found[1], found[2], found[3])
    if found := _FENCE.fullmatch(statement):
        return writer.fence(found[1])
    raise ValueError(f"not a statement that can be translated: {statement}")
