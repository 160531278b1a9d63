"""A run ends with the chief's result, or with one error that says what was wrong."""

from typing import Final

import pytest
from helpers.guest import Guests, fork_and_command

both: Final = pytest.mark.parametrize("way", ["fork", "spawn"])

WAITING: Final = """
    class Stubborn(Exception):
        # This exception pickles, but unpickling it raises.
        def __init__(self, one, two):
            super().__init__(one + two)
    class Mute(Exception):
        def __str__(self): raise RuntimeError("no text")
        __repr__ = __str__
    class Unpicklable(Exception):
        def __reduce__(self): raise RuntimeError("no pickle")
    class Fatal(BaseException):
        pass
    class Reduced(Exception):
        # This exception's pickle is another object.
        def __reduce__(self): return str, ("no exception",)
    class MadeOf:
        # This exception's pickle calls its class with one argument.
        def __init__(self, function, argument): self.of = function, (argument,)
        def __reduce__(self): return self.of
    def raise_it(error): raise error
    def work(rank):
        time.sleep(600)
"""


@both
@pytest.mark.parametrize(
    "value", ["threading.Lock()", "(i for i in [])", "lambda: 1", "MadeOf(raise_it, EOFError())"]
)
def test_the_value_that_a_worker_returns_is_dropped(value: str, way: str, guest: Guests) -> None:
    program = guest(
        f"""
        class MadeOf:
            def __init__(self, function, argument): self.of = function, (argument,)
            def __reduce__(self): return self.of
        def raise_it(error): raise error
        def work(rank):
            return {value}
        def lead():
            return "done"
        """,
        way=way,
        grace=60,
    )
    ended = program.ends()
    assert (ended["result"], ended.err) == ("done", "")


def test_the_result_of_a_chief_that_closes_all_descriptors_arrives(guest: Guests) -> None:
    chief = """
        def lead():
            os.closerange(3, 4096)
            return [os.open(os.devnull, os.O_RDWR) for _ in range(32)] != []
    """
    assert guest(chief, "start(lead)").ends()["result"] is True


# What a child does, and then the name of the error and words in its text.
FAILURES: Final = {
    "os._exit(0)": ("WorkerDiedError", ["status 0", "result"]),
    "os._exit(3)": ("WorkerDiedError", ["status 3"]),
    "sys.exit(4)": ("WorkerDiedError", ["status 4"]),
    "os.kill(os.getpid(), 9)": ("WorkerDiedError", ["killed by SIGKILL; it has ended 1 times"]),
    "os.kill(os.getpid(), 40)": ("WorkerDiedError", ["was killed by signal 40;"]),
    "return lambda: 1": (None, ["result"]), "return threading.Lock()": (None, ["result"]),
    "return (i for i in [])": (None, ["result"]),
    "return MadeOf(raise_it, EOFError())": (None, ["result"]),
    "return MadeOf(raise_it, Fatal('x'))": (None, ["result"]),
    "return MadeOf(raise_it, SystemExit(0))": (None, ["result"]),
    "return MadeOf(raise_it, Stubborn('a', 'b'))": (None, ["result"]),
    "raise Stubborn('a', 'b')": (None, ["Stubborn", "ab"]), "raise Mute()": (None, ["Mute"]),
    "raise Unpicklable('why')": (None, ["Unpicklable", "why"]),
    "raise Reduced('why')": (None, ["Reduced", "why"]), "raise Fatal('why')": ("Fatal", ["why"]),
    "raise type('Local', (Exception,), {})('why')": (None, ["Local", "why"]),
    "raise ExceptionGroup('why', [ValueError('one')])": ("ExceptionGroup", ["why"]),
}  # fmt: skip


WITHOUT_RESULT: Final = ("return", "os._exit(0)")  # a worker needs no result


@pytest.mark.parametrize(("does", "role", "way"), [
    *((does, "chief", "fork") for does in FAILURES),
    *((does, "chief", "spawn") for does in ("os._exit(0)", "return lambda: 1", "raise Mute()")),
    *((does, "worker", "fork") for does in FAILURES if not does.startswith(WITHOUT_RESULT)),
    ("sys.exit(4)", "worker", "spawn"),
])  # fmt: skip
def test_an_error_says_why_a_child_failed(does: str, role: str, way: str, guest: Guests) -> None:
    kind, words = FAILURES[does]
    functions = WAITING + "    def lead():\n        time.sleep(600)\n"
    head, own, rest = functions.partition(f"def {'lead' if role == 'chief' else 'work'}(")
    functions = head + own + rest.replace("time.sleep(600)", does, 1)
    ended = guest(functions, way=way, grace=0, restarts=0).ends(1)
    assert kind in {None, ended["error"]}
    for word in words:
        assert word in ended["said"]
    if does.startswith("raise"):
        (note,) = ended["notes"]
        assert note.startswith(f"In {role} ")
        assert "program.py" in note, "the child's traceback"
    elif kind is not None:
        assert ended["text"].startswith(f"{role} ")


def test_a_result_larger_than_the_file_size_limit_arrives_or_raises(guest: Guests) -> None:
    """Batch systems set a limit on the size of files."""
    program = guest(
        """
        import resource
        def lead():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            return bytes(5_000_000)
        """,
        "try:\n    tell(size=len(shmacc.run(lead, context=WAY)))\n"
        "except Exception as error:\n    tell(error=str(error))",
    )
    ended = program.ends()
    assert ended.all("size") == [5_000_000] or "result" in ended["error"]


@both
def test_a_chief_that_is_killed_while_it_answers_is_started_again(way: str, guest: Guests) -> None:
    program = guest(
        """
        class Killing:
            def __reduce__(self):
                if once("killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return str, ("done",)
        def lead(): return [bytes(1_000_000), Killing()]
        """,
        """
        result = shmacc.run(lead, context=WAY)
        tell(result=result[1])
        """,
        way=way,
    )
    ended = program.ends()
    assert ended["result"] == "done"
    assert "started again (1 of 3)" in ended.err


@pytest.mark.parametrize("role", ["chief", "worker"])
@pytest.mark.parametrize("way", ["fork", "spawn", "command"])
def test_an_exception_of_a_child_is_shown_once(role: str, way: str, guest: Guests) -> None:
    """The uncaught exception has the child's traceback as a note; the child prints none.

    Under `shmacc-run` the child itself prints the exception.
    """
    program = guest(
        f"""
        def fail():
            raise ValueError("why " + "this")
        def work(rank): fail() if {role!r} == "worker" and rank == 0 else time.sleep(600)
        def lead(): fail() if {role!r} == "chief" else time.sleep(600)
        """,
        "shmacc.run(lead, work, workers=2, context=WAY) if WAY != 'command' else start(lead, work)",
        way=way,
    )
    shown = program.ends(1).err
    most = 1 if way == "command" else 2  # the error, and in its note
    assert shown.count('raise ValueError("why " + "this")') == 1, shown
    assert shown.count("ValueError: why this") <= most, shown
    assert shown.count("Traceback (most recent call last)") <= most, shown
    assert len(shown.splitlines()) <= 25, shown
    assert way != "command" or role in shown.splitlines()[-1], shown


@fork_and_command
def test_the_output_of_children_is_not_lost(way: str, guest: Guests) -> None:
    program = guest(
        """
        def work(rank): print("by worker", rank)
        def lead(): print("by the chief")
        """,
        way=way,
        workers=2,
        grace=60,
    )
    out = program.ends().out
    for text in "by worker 0\n", "by worker 1\n", "by the chief\n":
        assert text in out


def test_a_run_prints_nothing(guest: Guests) -> None:
    program = guest(
        """
        def work(rank): pass
        def lead(): return 1
        """
    )
    ended = program.ends()
    assert (ended.out, ended.err) == ("", "")
