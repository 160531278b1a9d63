"""Whatever form a program has, its functions reach the children, or an error says what to do."""

import sys
import textwrap
import zipapp
from typing import Final

import pytest
from helpers.guest import TESTS, Guests, every_start_method

ROLES: Final = """
def work(rank):
    with shmacc.ConditionalAccumulator("f4", (), "sums") as acc:
        acc.apply_grad(rank + 1.0)

def lead():
    with shmacc.ConditionalAccumulator("f4", (), "sums", reduction_type="MEAN") as acc:
        return float(acc.take_grad(2, timeout=60))
"""
HEAD: Final = "import os, sys, shmacc\nfrom helpers.guest_program import *\n"
# Functions of a notebook or a prompt: they are in no file.
CELL: Final = HEAD + ROLES + '\nif __name__ == "__main__":\n    start(lead, work)\n\n'

Files = dict[str, tuple[str, ...]]
PACKAGE: Final[Files] = {"package/__init__.py": ("here = 1", "pass")}
FILE: Final[Files] = {"train.py": (ROLES,)}
FOLDER: Final[Files] = {
    "app/__main__.py": ("import beside\n" + ROLES,),
    "app/beside.py": ("", "pass"),
}
# For each form: files, as `Guests.write` takes them; arguments; the standard input.
FORMS: Final[dict[str, tuple[Files, list[str], str]]] = {
    "-m package": (PACKAGE | {"package/__main__.py": (ROLES,)}, ["-m", "package"], ""),
    "-m package, functions beside": (
        PACKAGE
        | {
            "package/roles.py": (ROLES, "pass"),
            "package/__main__.py": ("from .roles import lead, work",),
        },
        ["-m", "package"],
        "",
    ),
    "-m package.module": (
        PACKAGE | {"package/train.py": ("from . import here\n" + ROLES,)},
        ["-m", "package.train"],
        "",
    ),
    "-m module": (FILE, ["-m", "train"], ""),
    "folder": (FOLDER, ["app"], ""),
    "zip file": (FOLDER, ["app.zip"], ""),
    "-m folder": ({"app/__main__.py": (ROLES,)}, ["-m", "app"], ""),
    "standard input": ({}, ["-"], CELL),
    "no argument": ({}, [], CELL),
    "-i": ({}, ["-i", "-q"], CELL),
    "-c": ({}, ["-c", CELL], ""),
    "cProfile": (FILE, ["-m", "cProfile", "-o", "profile", "train.py"], ""),
    "trace": (FILE, ["-m", "trace", "--count", "--coverdir=trace", "train.py"], ""),
    "runpy": (FILE, ["-c", "import runpy; runpy.run_path('train.py', run_name='__main__')"], ""),
    "another folder": (
        {"train.py": (ROLES, "os.chdir('/')", "start(lead, work)")},
        ["train.py"],
        "",
    ),
    "no module's name": ({"my train-1.0": (ROLES,)}, ["my train-1.0"], ""),
    # A program should not have a module's name: `import shelve` finds this file then.
    "a module's name": ({"app/shelve.py": (ROLES,)}, ["app/shelve.py"], ""),
}
# multiprocessing can import the functions of these forms, so the contract allows no refusal.
MUST_WORK: Final = {
    "-m package, functions beside", "-m package.module", "-m module", "another folder",
    "no module's name", "a module's name",
}  # fmt: skip


@pytest.mark.parametrize(("form", "way"), [
    *((form, "spawn") for form in FORMS),
    *((form, "forkserver") for form in ("-m package", "zip file", "standard input", "trace")),
    *((form, "fork") for form in ("-m package", "zip file", "-i", "-c", "trace")),
])  # fmt: skip
def test_each_form_runs_or_the_error_says_what_to_do(form: str, way: str, guest: Guests) -> None:
    files, arguments, stdin = FORMS[form]
    for name, text in files.items():
        guest.write(name, *text)
    if form == "zip file":
        zipapp.create_archive(guest.folder / "app", guest.folder / "app.zip")
    program = guest.command([sys.executable, *arguments], way=way, stdin=stdin.encode())
    ended = program.ends(None)
    if way != "fork" and form not in MUST_WORK and ended.all("error"):
        assert ended["error"] == "InvalidArgumentError", ended.err
        assert "fork" in ended["text"]
        assert "module" in ended["text"]
    else:
        assert ended["result"] == 1.5, ended.err
        assert ended.status == 0


@pytest.mark.parametrize("flag", ["-I", "-O", "-Xdev", "-Werror"])
def test_children_have_the_flags_of_the_programs_interpreter(flag: str, guest: Guests) -> None:
    program = guest.write(
        "train.py", "def lead(): return list(sys.flags)", "tell(own=list(sys.flags))", "start(lead)"
    )
    head = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n"  # -I ignores PYTHONPATH
    program.write_text(head + program.read_text())
    ended = guest.command([sys.executable, flag, "train.py"], way="spawn").ends()
    assert ended["own"] == ended["result"]


# A frozen program: its executable is the program itself, and takes no `-c` and no file.

FROZEN: Final = """
import multiprocessing, os, sys
with open(os.environ["GUEST_FOLDER"] + "/starts", "a") as file:
    file.write(repr(sys.argv[1:]) + "\\n")
with open(os.environ["GUEST_FOLDER"] + "/starts") as file:
    if len(file.readlines()) > 12:
        os._exit(99)  # without end
sys.frozen, sys.executable = True, os.environ["GUEST_FOLDER"] + "/frozen"
from multiprocessing import spawn
spawn.set_executable(sys.executable)
if __name__ == "__main__":
    # PyInstaller's hook does this.
    if len(sys.argv) > 2 and sys.argv[-2] == "-c" and sys.argv[-1].startswith((
        "from multiprocessing.resource_tracker import main",
        "from multiprocessing.forkserver import main",
    )):
        exec(sys.argv[-1])
        sys.exit()
"""


@every_start_method
def test_a_frozen_program_runs_or_the_error_says_what_to_do(way: str, guest: Guests) -> None:
    guest.write("frozen.py", ROLES, "spawn.freeze_support()", "start(lead, work)")
    (guest.folder / "frozen.py").write_text(
        FROZEN + (guest.folder / "frozen.py").read_text(encoding="utf-8")
    )
    executable = guest.folder / "frozen"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" {guest.folder}/frozen.py "$@"\n')
    executable.chmod(0o755)
    ended = guest.command([str(executable)], way=way).ends(None)
    if ended.all("error"):
        assert ended["error"] == "InvalidArgumentError"
        assert "frozen" in ended["text"]
    else:
        assert ended["result"] == 1.5, ended.err


# Callers that are not allowed to have children

POOLED: Final = """
    import multiprocessing
    def call(_):
        try:
            return shmacc.run(lead, work, workers=2, context=WAY)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
"""


@pytest.mark.parametrize("pool", ["fork", "spawn"])
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_run_in_a_pools_worker_works_or_is_refused(pool: str, way: str, guest: Guests) -> None:
    program = guest(
        ROLES + textwrap.dedent(POOLED),
        f"""
        with multiprocessing.get_context({pool!r}).Pool(1) as pool:
            tell(results=pool.map(call, range(2)))
        """,
        way=way,
    )
    for result in program.ends()["results"]:
        if result != 1.5:
            assert result.startswith(("InvalidArgumentError", "FailedPreconditionError"))
            assert "daemon" in result
