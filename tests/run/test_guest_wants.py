"""A run survives a short lack of descriptors or processes; at a first start, it raises.

The tests set the kernel's limits, so that everything that a start needs is refused.
"""

from typing import Final

import pytest
from helpers.apart import needs_root
from helpers.guest import Guests, Launcher, prefixed

# The kernel counts each user's processes: this user has no others, and may read the checkout.
AS_USER: Final = prefixed(
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=+dac_override", "--ambient-caps=+dac_override"),
)

# A worker lowers its caller's limit, and is killed; the chief raises the limit later.
TAKING_AWAY: Final = """
    import resource
    def set_limit(soft):
        hard = resource.prlimit(int(marked("caller")), LIMIT)[1]
        resource.prlimit(int(marked("caller")), LIMIT, (soft, hard))

    def work(rank):
        if rank == 0:
            if once("begun"):
                marked("1 waits")
                set_limit(FEW)
                os.kill(os.getpid(), signal.SIGKILL)
            mark("again")
        else:
            mark("1 waits")
            marked("again")

    def lead():
        until(lambda: has_marked("begun"))
        time.sleep(1.2)
        assert not has_marked("again"), "the limit is none"
        set_limit(MANY)
        marked("again")
        return "done"
"""


DESCRIPTORS: Final = "\n    LIMIT, FEW, MANY = 7, 3, 1024\n" + TAKING_AWAY
LIMITED: Final = """
    resource.setrlimit(LIMIT, (MANY, 4096))
    mark("caller", os.getpid())
"""


@needs_root
@pytest.mark.parametrize(
    ("want", "way"),
    [("descriptors", "fork"), ("descriptors", "spawn"), ("descriptors", "forkserver"),
     ("processes", "fork")],
)  # fmt: skip
def test_a_run_short_of_a_resource_goes_on_once_it_is_back(
    want: str, way: str, guest: Guests
) -> None:
    """The kernel counts processes by user, so this program's user has no others."""
    guest.folder.chmod(0o777)
    launcher: Launcher = AS_USER if want == "processes" else list
    limit = "6, 1, 1000" if want == "processes" else "7, 3, 1024"
    functions = DESCRIPTORS.replace("7, 3, 1024", limit)
    ended = guest(functions, LIMITED, "start(lead, work)", way=way, launcher=launcher).ends()
    assert ended["result"] == "done"
    assert len(ended.err.splitlines()) <= 3, f"it is said once: {ended.err}"


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@needs_root
def test_a_signal_ends_a_run_that_waits_for_descriptors(number: str, guest: Guests) -> None:
    program = guest(
        DESCRIPTORS.replace(
            "set_limit(MANY)", f"os.kill(os.getppid(), signal.{number}); time.sleep(600)"
        ),
        LIMITED,
        """
        shmacc.run(lead, work, workers=2, context=WAY)
        """,
    )
    assert program.ends(None).status != 0


@needs_root
def test_a_run_that_waits_for_descriptors_ends_with_its_chief(guest: Guests) -> None:
    program = guest(
        DESCRIPTORS.replace("set_limit(MANY)", 'return "done"'),
        LIMITED,
        """
        try:
            result = shmacc.run(lead, work, workers=2, context=WAY, grace=0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (MANY, 4096))
        tell(result=result)
        """,
    )
    assert program.ends()["result"] == "done"


# At the first start

FEWER: Final = """
    import resource
    def work(rank): time.sleep(600)
    def lead():
        shmacc.ConditionalAccumulator("f4", (), "kept")
        return 1
"""


@pytest.mark.parametrize(("want", "free", "way"), [
    ("NOFILE", "range(30)", "fork"), ("NOFILE", "range(0, 60, 8)", "spawn"),
    pytest.param("NPROC", "range(1, 8)", "fork", marks=needs_root),
], ids=["descriptors-fork", "descriptors-spawn", "processes-fork"])  # fmt: skip
def test_a_first_start_without_descriptors_or_processes_raises_and_leaves_nothing(
    want: str, free: str, way: str, guest: Guests
) -> None:
    """The limits leave fewer descriptors or processes free than are needed, and at last enough."""
    guest.folder.chmod(0o777)
    program = guest(
        FEWER,
        f"""
        if WAY == "spawn":  # its server takes a descriptor for good
            shmacc.run(lead, context=WAY)
        run, failed, done = shmacc.run, 0, 0  # it is imported before
        soft, hard = resource.getrlimit(resource.RLIMIT_{want})
        for free in {free}:
            used = os.dup(0)
            os.close(used)
            allowed = used + free if "{want}" == "NOFILE" else free
            with unchanged():
                resource.setrlimit(resource.RLIMIT_{want}, (allowed, hard))
                try:
                    assert run(lead, work, workers=2, context=WAY, grace=0) == 1
                    done += 1
                except (OSError, shmacc.errors.ShmaccError):
                    failed += 1
                finally:
                    resource.setrlimit(resource.RLIMIT_{want}, (soft, hard))
        tell(failed=failed, done=done)
        """,
        way=way,
        launcher=AS_USER if want == "NPROC" else list,
    )
    ended = program.ends()
    assert ended["failed"] > 0
    assert ended["done"] > 0
