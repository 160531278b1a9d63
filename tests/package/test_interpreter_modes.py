"""The library works under interpreters with -O, -OO, -W error, -X dev, and without a GIL.

And beside other extensions.
"""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest
from helpers.support import run_to_end

# Uses a group, shared arrays, raw ops, a spawned worker, refusals and the list of leaked names.
PROGRAM: Final = """
    import multiprocessing
    import os
    import sys

    import numpy as np
    import shmacc
    from shmacc import errors, inspection, raw_ops, testing


    def work(acc, params, rank):
        step = acc.global_step
        grad = params["w"] * rank
        acc.apply({"e": ([rank, 7], np.ones((2, 2))), "w": grad}, step, contributor=rank)
        acc.wait_step(step, timeout=60)


    def main():
        rows = shmacc.IndexedSlicesSpec((None, 2), "f4")
        group = shmacc.AccumulatorGroup({"e": rows, "w": shmacc.TensorSpec((2,), "f8")}, "g")
        with group, shmacc.SharedArrays({"w": np.ones(2)}, "p", unlink_on_close=True) as params:
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=work, args=(group, params, 3))
            process.start()
            with group.round(1, timeout=60) as taken:
                print(taken["w"].value.tolist(), taken["e"].indices.tolist())
            process.join()
            found = inspection.list_names(namespace=os.environ["SHMACC_NAMESPACE"])
            print(process.exitcode, [name.shared_name for name in found])
            for refused in ({"w": [1]}, {"x": 0}):
                try:
                    group.apply(refused, 1)
                except errors.InvalidArgumentError as error:
                    print("'w'" in str(error))
            group.unlink()
        ref = raw_ops.ConditionalAccumulator("f4", (1,))
        raw_ops.AccumulatorApplyGradient(ref, 0, [1.0])
        print(raw_ops.AccumulatorTakeGradient(ref, 1, "f4").tolist())
        ref.accumulator.close()
        print(testing.leaked_names(os.environ["SHMACC_NAMESPACE"]), sys.flags.optimize)


    if __name__ == "__main__":
        main()
"""


def _run(tmp_path: Path, *options: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    return run_to_end(
        [sys.executable, *options, str(script)], status=None, timeout=100, cwd=tmp_path
    )


@pytest.mark.parametrize("options", ["-OO", "-X dev -bb -W error"])
def test_the_library_works_in_each_mode(options: str, tmp_path: Path) -> None:
    ran = _run(tmp_path, *options.split())
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "[3.0, 3.0] [3, 7]",
        "0 ['g', 'p']",
        "True",
        "True",
        "[1.0]",
        f"() {2 if options == '-OO' else 0}",
    ]


def test_help_of_the_command_is_the_same_without_docstrings(tmp_path: Path) -> None:
    words = {}
    for options in ((), ("-OO",)):
        program = "import sys; from shmacc_inspect.start import main; sys.exit(main())"
        ran = run_to_end([sys.executable, "-P", *options, "-c", program, "--help"], cwd=tmp_path)
        words[options] = ran.stdout
    assert words[()] == words["-OO",]


_WITHOUT_GIL: Final = """
    import sys

    sys._is_gil_enabled = lambda: {enabled}  # as a free-threaded interpreter has it
    import shmacc

    shmacc.ConditionalAccumulator("f4", ()).close()
"""


def test_a_free_threaded_interpreter_is_refused_without_its_gil(tmp_path: Path) -> None:
    ran = _run(tmp_path, program=_WITHOUT_GIL.format(enabled=False))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("ImportError: shmacc needs the GIL, ")
    ran = _run(tmp_path, program=_WITHOUT_GIL.format(enabled=True))
    assert (ran.returncode, ran.stderr) == (0, "")


_SUBINTERPRETER: Final = """
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters


    def make(isolated):
        try:
            return interpreters.create("isolated" if isolated else "legacy")
        except TypeError:  # before Python 3.13
            return interpreters.create(isolated=isolated)


    def try_in(number, module):
        # Nothing but what it prints gets out, in all versions.
        call = f"try: import {{module}}\\nexcept ImportError as error: print(error)"
        interpreters.run_string(number, call)


    def use():
        with shmacc.ConditionalAccumulator("f4", ()) as acc, shmacc.Parameters({{"w": [1.0]}}):
            acc.apply_grad(3.0)
            print(acc.take(1).value)


    if {first}:
        import shmacc

        acc = shmacc.ConditionalAccumulator("f4", ())
        use()
    for isolated in (False, True):
        number = make(isolated)
        print("isolated", isolated)
        for module in ("shmacc", "shmacc.inspection", "shmacc._core", "shmacc"):
            try_in(number, module)
        if {first}:
            acc.apply_grad(1.0)
        else:
            import shmacc
        use()
        interpreters.destroy(number)
    number = make(True)
    try_in(number, "shmacc")
    use()
    interpreters.destroy(number)
"""


@pytest.mark.parametrize("first", [True, False], ids=["in use", "not in use"])
def test_a_sub_interpreter_is_refused_and_does_no_harm(*, first: bool, tmp_path: Path) -> None:
    ran = _run(tmp_path, program=_SUBINTERPRETER.format(first=first))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    refusals = [line for line in lines if "interpreter" in line]
    assert len(refusals) == 9
    ours = [line.startswith("shmacc works in a process's main ") for line in refusals]
    assert all(ours[:4])  # Python itself may refuse in isolated interpreters
    said = ["3.0"] * first + ["isolated False", "3.0", "isolated True", "3.0", "3.0"]
    assert [line for line in lines if line not in refusals] == said


_REGISTRIES: Final = """
    import ctypes

    import numpy

    interpreter = ctypes.pythonapi.PyInterpreterState_Get
    of_extensions = ctypes.pythonapi.PyInterpreterState_GetDict
    interpreter.restype = of_extensions.restype = ctypes.c_void_p
    of_extensions.argtypes = [ctypes.c_void_p]


    def registries():
        kept = ctypes.cast(of_extensions(interpreter()), ctypes.py_object).value
        return {key for key in kept if isinstance(key, str) and "nb_internals" in key}


    before = registries()
    import shmacc

    shmacc.ConditionalAccumulator("f4", ()).close()
    print(*(registries() - before))
"""


def test_the_extension_has_a_registry_of_nanobind_to_itself(tmp_path: Path) -> None:
    """Extensions whose registries have one name share it, with its types and error translators."""
    ran = _run(tmp_path, program=_REGISTRIES)
    assert (ran.returncode, ran.stderr) == (0, "")
    [name] = ran.stdout.split()
    assert name.endswith("_shmacc__")
