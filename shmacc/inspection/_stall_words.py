"""The words with which rules tell a standstill."""

from collections import Counter
from collections.abc import Iterable

from shmacc.inspection._process_records import AttachedProcess
from shmacc.inspection._stall_facts import Facts, Lost


def waits(facts: Facts) -> str:
    """Say what is waited for."""
    if facts.lacks_gradients:
        count = facts.seen.state["count"]
        return f"{heads_wait(facts)}; {count} {'is' if count == 1 else 'are'} there"
    waiting = facts.waiting
    if not waiting:
        return f"{heads_wait(facts)}, and a round is open"
    for_what = Counter(each.activity.removeprefix("waits ") for each in waiting)
    if len(waiting) == 1:
        return f"pid {waiting[0].pid_label} waits {next(iter(for_what))}"
    if len(for_what) == 1:
        return f"{len(waiting)} processes wait {next(iter(for_what))}"
    each = ", ".join(f"{number} {what}" for what, number in for_what.items())
    return f"{len(waiting)} processes wait ({each})"


def heads_wait(facts: Facts) -> str:
    """Say what the head of the queue waits for."""
    assert facts.head is not None  # noqa: S101
    gradients = "gradient" if facts.head.num_required == 1 else "gradients"
    return f"pid {facts.head.pid_label} waits for {facts.head.num_required} {gradients}"


def labels(processes: Iterable[AttachedProcess]) -> list[str]:
    """Return the processes' pids as they are shown."""
    return [each.pid_label for each in processes]


def are(several: list[AttachedProcess] | list[Lost]) -> str:
    """Return the verb for so many."""
    return "is" if len(several) == 1 else "are"
