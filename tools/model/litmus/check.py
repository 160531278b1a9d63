#!/usr/bin/env python3
"""Runs herd7 over the litmus tests of the protocol's memory order.

``check.py`` checks every test and each of its broken variants against the memory models of C++,
AArch64 and x86-64, and prints in which models the forbidden outcome is possible. A broken variant
names the models in which it must be possible; in a sound test it must be impossible. The exit
status is 1 if any result differs. ``--record`` notes in README.md which version of the tests was
checked. ``check.py --show commit_twice/BROKEN_NO_STORE_BARRIER`` prints herd7's input and output.
This needs only herd7, of herdtools7.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from reading import HERE, Litmus, Thread, Variant, digest, read_all
from writing import X86, AArch64, as_assembly, as_c

HERD = "herd7"


@dataclass(frozen=True, slots=True)
class Model:
    """A memory model."""

    name: str  # in tests and results
    file: str  # the file from which herd7 reads it
    write: Callable[[Litmus, list[Thread]], str]  # translates a program into the model's language


MODELS = (
    Model("C11", "rc11.cat", as_c),
    Model("AArch64", "aarch64.cat", lambda test, threads: as_assembly(test, threads, AArch64)),
    Model("x86", "x86tso-mixed.cat", lambda test, threads: as_assembly(test, threads, X86)),
    Model("streaming", str(HERE / "x86-streaming.cat"),
        lambda test, threads: as_assembly(test, threads, X86)),
)  # fmt: skip


def models_of(litmus: Litmus) -> list[Model]:
    """Return the models that know all instructions of a test."""
    return [model for model in MODELS if (model.name == "streaming") == litmus.streams]


def ask_herd(model: Model, program: str) -> str:
    """Return herd7's output for a program."""
    with tempfile.NamedTemporaryFile("w", suffix=".litmus") as file:
        file.write(program)
        file.flush()
        command = [HERD, "-model", model.file, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not re.search(r"^Observation ", done.stdout, re.MULTILINE):
        raise RuntimeError(f"{' '.join(command)} of\n{program}said\n{done.stdout}{done.stderr}")
    return done.stdout


def is_possible(litmus: Litmus, variant: Variant, model: Model) -> bool:
    """Whether the outcome is possible, without a kill or with a kill at any `// death`."""
    said = [
        ask_herd(model, model.write(litmus, threads)) for threads in litmus.programs(variant.name)
    ]
    return not all(re.search(r"^Observation \w+ Never ", one, re.MULTILINE) for one in said)


def check_all() -> int:
    """Check all tests in all models; return how many results were not as expected."""
    unexpected = 0
    for litmus in read_all():
        for model in models_of(litmus):
            possible = [one for one in litmus.variants if is_possible(litmus, one, model)]
            unexpected += possible != [one for one in litmus.variants if model.name in one.models]
            found = " ".join(one.name or "AS_IT_IS" for one in possible) or "never"
            print(f"{litmus.name:14} {model.name:9} {found}")
    return unexpected


def record() -> None:
    """Note in README.md herd7's version and the hash of the tests that it has checked."""
    version = subprocess.run([HERD, "-version"], capture_output=True, text=True, check=True)
    herd = version.stdout.partition(",")[0].strip()
    page = HERE / "README.md"
    noted = f"Checked with herd7 {herd}: `{digest()}`"
    page.write_text(re.sub(r"Checked with herd7 .*: `\w+`", noted, page.read_text()))


def show(wanted: str) -> None:
    """Print herd7's input and output for a test or a variant of it."""
    name, _, variant = wanted.partition("/")
    (litmus,) = [litmus for litmus in read_all() if litmus.name == name]
    for model in models_of(litmus):
        for threads in litmus.programs(variant):
            program = model.write(litmus, threads)
            print(f"---- {model.name}\n{program}\n{ask_herd(model, program)}")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", metavar="TEST[/BROKEN_...]", help="one test, in full")
    parser.add_argument("--record", action="store_true", help="note in README.md what was checked")
    arguments = parser.parse_args()
    if shutil.which(HERD) is None:
        print("check.py: herd7 is not installed (herdtools7)", file=sys.stderr)
        return 2
    if arguments.show:
        show(arguments.show)
        return 0
    unexpected = check_all()
    if arguments.record and not unexpected:
        record()
    print(f"{unexpected} NOT as expected" if unexpected else "all as expected")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
