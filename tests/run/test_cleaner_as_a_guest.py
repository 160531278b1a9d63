"""A run's cleaner is a guest, too: of other users' files, other processes' signals, outer runs.

It removes and kills what is the run's, and nothing else; and nothing but the run's end ends it.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from helpers.guest import AS_PID_1, Guests, every_start_method, needs_pid_1
from helpers.support import LONG, SHM_DIRECTORY, until

import shmacc
from shmacc import testing
from shmacc._base import names
from shmacc._run import child, cleaner, namespaces
from shmacc._segment import run_records

FIND_CLEANER: Final = """
        def cleaner_of(parent):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    status = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
                    command = open(f"/proc/{pid}/cmdline", "rb").read()
                    if b"cleaner.py" in command and int(status[1]) == parent:
                        return int(pid)
"""

_WITH_OUTER_PROC: Final = """
import os, subprocess, sys
with open("other", "w+") as other:
    for number in range(3, 100):
        if number != other.fileno():
            os.dup2(other.fileno(), number)
    sys.exit(subprocess.call(["unshare", "--pid", "--fork", "--kill-child", *sys.argv[1:]]))
"""


def with_outer_proc(command: list[str]) -> list[str]:
    """Start a program as pid 1 of a namespace, with the /proc of another one, which is also new.

    There another process is pid 1, and its descriptors lead to the file "other".
    """
    return AS_PID_1([sys.executable, "-c", _WITH_OUTER_PROC, *command])


def _folder_in(namespace: str) -> Path:
    """Make a folder in shared memory with the name of a segment, as any user can."""
    folder = Path(SHM_DIRECTORY, f"shmacc.{namespace}:folder")
    folder.mkdir()
    return folder


@pytest.mark.parametrize("end", ["returns", "is killed"])
def test_a_folder_among_a_runs_names_does_not_keep_the_others(end: str, guest: Guests) -> None:
    program = guest(
        """
        def lead():
            with shmacc.ConditionalAccumulator("f4", (), "kept"): pass
            mark("namespace", os.environ["SHMACC_NAMESPACE"])
            marked("over")
            return "a week of work"
        """,
        "tell(result=shmacc.run(lead, context=WAY))",
    )
    folder = _folder_in(program.marked("namespace"))
    try:
        if end == "is killed":
            program.process.kill()
        program.mark("over")
        until(lambda: program.names() == [folder.name])
        program.process.wait(LONG)
    finally:
        folder.rmdir()
    ended = program.ends(None)
    assert ended.all("result") == (["a week of work"] if end == "returns" else [])


def test_a_folder_in_a_namespace_does_not_keep_the_other_names(namespace: str) -> None:
    folder, record = _folder_in(namespace), Path(names.of_run(namespace).path)
    record.write_bytes(b"no record")
    try:
        run_records.remove_namespace(namespace)
        assert not record.exists()
    finally:
        folder.rmdir()


def test_a_runs_record_is_the_last_name_to_go(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the record is there, no other run of this name begins, and finds names that go."""
    with pytest.raises(ValueError, match="kept"):
        shmacc.run(_keep, context="fork", name="digits")
    unlinked, unlink = [], os.unlink

    def noted(path: str) -> None:
        unlinked.append(path)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", noted)
        job = cleaner.Job("", SHM_DIRECTORY, f"{namespace}.digits", named=True)
        cleaner.remove_names(job, [])
    assert len(unlinked) == 6
    assert unlinked[-1] == names.of_run(f"{namespace}.digits").path
    assert [cleaner.RECORD in path for path in unlinked] == 4 * [False] + 2 * [True]


def _keep() -> None:
    for name in ("a", "z"):
        shmacc.ConditionalAccumulator("f4", (), name).close()
    raise ValueError("kept")


@needs_pid_1
@pytest.mark.parametrize("pidfds", ["with pidfds", "without pidfds"])
def test_who_has_a_dead_cleaners_pid_is_neither_killed_nor_waited_for(
    pidfds: str, guest: Guests
) -> None:
    program = guest(
        FIND_CLEANER
        + """
        def lead():
            cleaner = cleaner_of(os.getppid())
            os.kill(cleaner, signal.SIGKILL)
            until(lambda: not os.path.exists(f"/proc/{cleaner}"))  # the kernel has reaped it
            mark("free", cleaner)
            marked("taken")

        def take():
            pid = int(marked("free"))
            other = None
            while other is None or other.pid != pid:  # another start may come between
                if other is not None:
                    other.kill()
                    other.wait()
                open("/proc/sys/kernel/ns_last_pid", "w").write(str(pid - 1))
                other = subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
            others.append(other)
            mark("taken")
        """,
        f"""
        if {pidfds!r} == "without pidfds":
            os.pidfd_open = lambda *_: os.open("/nowhere", os.O_RDONLY)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        others = []
        threading.Thread(target=take).start()
        shmacc.run(lead, context=WAY)
        tell(lives=not gone(others[0].pid))
        """,
        launcher=AS_PID_1,
    )
    assert program.ends()["lives"]


@pytest.mark.parametrize("cleaner", ["executed", "forked"])
def test_a_signal_to_all_processes_of_a_job_does_not_end_the_cleaner(
    cleaner: str, guest: Guests
) -> None:
    program = guest(
        """
        def lead():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            mark("ready", os.getpid())
            signal.pause()
        """,
        f"""
        if {cleaner!r} == "forked":
            sys.executable = ""
        shmacc.run(lead, context=WAY)
        """,
    )
    chief = int(program.marked("ready"))
    for pid in program.processes() - {chief, program.process.pid}:
        if Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
    program.process.kill()
    program.ends(-signal.SIGKILL)


@every_start_method
def test_the_end_of_an_outer_run_leaves_the_inner_cleaner_its_work(way: str, guest: Guests) -> None:
    """Nobody can go on with an unnamed run, so its names go, though the outer run's names stay."""
    program = guest(
        """
        def inner():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            os.kill(int(marked("lead")), signal.SIGKILL)
            signal.pause()

        def lead():
            mark("lead", os.getpid())
            shmacc.run(inner, context=WAY)
        """,
        """
        with suppress(shmacc.errors.WorkerDiedError):
            shmacc.run(lead, context=WAY, name="outer", restarts=0)
        """,
        way=way,
    )
    program.ends(names_stay=True)
    assert not [name for name in program.names() if ".run-" in name]


@pytest.mark.parametrize("then", ["goes on", "stays stopped"])
def test_a_stopped_cleaner_holds_up_no_run_however_much_it_is_told(
    then: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instructed = namespaces.Cleaner(namespace, named=False)
    os.kill(instructed._pid, signal.SIGSTOP)
    for number in range(2**22, 2**22 + 5000):  # larger than a pid can be
        instructed.note_started(number)
        instructed.note_ended(number)
    Path(SHM_DIRECTORY, f"shmacc.{namespace}:kept").touch()
    if then == "goes on":
        os.kill(instructed._pid, signal.SIGCONT)
        monkeypatch.delattr(cleaner, "end")  # this process need not do it
    else:
        monkeypatch.setattr(namespaces, "_ANSWER", 0.2)
    instructed.finish(remove=True)
    assert testing.leaked_names(namespace) == ()
    with pytest.raises(ProcessLookupError):
        os.kill(instructed._pid, 0)


def test_a_run_ends_when_its_process_executes_another_program(guest: Guests) -> None:
    program = guest(
        """
        def work(rank):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            shmacc.ConditionalAccumulator("f4", (), "kept")
            mark("ready")
            signal.pause()
        def lead():
            signal.pause()
        """,
        """
        signal.signal(signal.SIGALRM, lambda *_: os.execv("/bin/sleep", ["sleep", "600"]))
        shmacc.run(lead, work, workers=1, context=WAY)
        """,
    )
    program.marked("ready")
    program.process.send_signal(signal.SIGALRM)
    until(lambda: program.processes() == {program.process.pid} and not program.names())
    assert program.process.poll() is None
    program.process.kill()
    program.ends(-signal.SIGKILL)


@needs_pid_1
@every_start_method
def test_with_an_outer_proc_a_chief_that_closes_its_files_still_answers(
    way: str, guest: Guests
) -> None:
    program = guest(
        """
        def lead():
            os.closerange(3, 4096)
            return "an answer"
        """,
        "print(shmacc.run(lead, context=WAY))",
        launcher=with_outer_proc,
        way=way,
    )
    assert program.ends().out == "an answer\n"
    assert (guest.folder / "other").read_bytes() == b""


def test_an_answer_is_never_written_into_another_file(tmp_path: Path) -> None:
    answer, other = child.Answer(os.memfd_create("answer")), tmp_path / "other"
    os.close(answer._descriptor)
    other.write_bytes(b"another process's")
    answer._parents = str(other)
    with pytest.raises(OSError, match="closed"):
        answer.write("returned", "an answer")
    assert other.read_bytes() == b"another process's"


@needs_pid_1
def test_with_an_outer_proc_the_cleaner_takes_no_process_for_another(guest: Guests) -> None:
    program = guest(
        "from shmacc._run import cleaner",
        "tell(found=list(cleaner._processes(lambda pid: True)))",
        launcher=with_outer_proc,
    )
    assert program.ends()["found"] == []


_DEEP: Final = "/".join(f"{number:016x}" for number in range(40))


@pytest.mark.parametrize("given", ["my run", "x" * 1000, _DEEP], ids=["space", "long", "deep"])
def test_strays_are_found_whatever_the_variable_of_outer_runs_has(
    given: str, guest: Guests
) -> None:
    program = guest(
        """
        def lead():
            if os.fork() == 0:
                os.setsid()
                mark("stray", os.getpid())
                signal.pause()
            marked("stray")
            return os.environ["SHMACC_RUN"]
        """,
        """
        mark_of_run = shmacc.run(lead, context=WAY)
        tell(ended=gone(marked("stray")), mark=mark_of_run)
        """,
        env={cleaner.VARIABLE: given},
    )
    ended = program.ends()
    assert ended["ended"]
    *outer, _ = ended["mark"].split("/")
    assert outer == (_DEEP.split("/")[-12:] if given == _DEEP else [])


@every_start_method
def test_a_program_that_embeds_python_has_a_cleaner(way: str, guest: Guests) -> None:
    program = guest(
        """
        def lead():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            mark("ready")
            signal.pause()
        """,
        """
        import multiprocessing
        multiprocessing.set_executable(sys.executable)
        sys.executable = "/bin/false"
        shmacc.run(lead, context=WAY)
        """,
        way=way,
    )
    program.marked("ready")
    program.process.kill()
    program.ends(-signal.SIGKILL)


def test_a_cleaner_whose_python_a_script_starts_removes_nothing_of_a_living_run(
    guest: Guests,
) -> None:
    script = guest.folder / "python"
    script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\ntouch ended\n')
    script.chmod(0o700)
    program = guest(
        """
        def lead():
            with shmacc.ConditionalAccumulator("f4", (), "kept") as kept:
                marked("ended")
                return len(shmacc.testing.leaked_names(os.environ["SHMACC_NAMESPACE"]))
        """,
        f"""
        import multiprocessing, shmacc.testing
        multiprocessing.set_executable({str(script)!r})
        tell(names=shmacc.run(lead, context=WAY))
        """,
    )
    assert program.ends()["names"] == 4
