"""The cleaner finds a process in each instant of its execution.

While the kernel replaces a process's program, it has closed the files, and there is no environment.
"""

import os
import subprocess
import sys
from typing import Final

from shmacc._run import cleaner

_LOOKS: Final = 3000
_AGAIN: Final = 'exec "$0" -c "$1" "$0" "$1"'  # the shell executes itself without end
_MARKED: Final = """
import os, sys
variable, token = sys.argv[1:]
os.memfd_create("shmacc run " + token)
print(flush=True)
os.execve("/bin/sleep", ["sleep", "600"], {variable: token})
"""


def test_a_process_that_executes_itself_without_end_is_found_by_each_look() -> None:
    variables = {cleaner.VARIABLE: "outer/inner"}
    command = ["/bin/sh", "-c", _AGAIN, "/bin/sh", _AGAIN]
    with subprocess.Popen(command, env=variables) as process:
        try:
            for _ in range(_LOOKS):
                assert cleaner._is_marked(str(process.pid), "inner")
            for _ in range(_LOOKS // 30):
                assert process.pid in cleaner.executed_with((f"{cleaner.VARIABLE}=outer/inner",))
        finally:
            process.kill()


def test_a_marked_process_is_found_before_and_after_it_is_executed() -> None:
    for _ in range(50):
        command = [sys.executable, "-I", "-S", "-c", _MARKED, cleaner.VARIABLE, "inner"]
        with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                for _ in range(50):
                    assert cleaner._is_marked(str(process.pid), "inner")
            finally:
                process.kill()
