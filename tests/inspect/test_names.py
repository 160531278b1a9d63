"""A name that is shown is a name that works, and what one types means one thing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask, path_of, run
from helpers.support import SHM_DIRECTORY

from shmacc import ConditionalAccumulator, inspection, testing
from shmacc_inspect.main import main
from shmacc_inspect.naming import typed_name

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_NAME: Final = "a" * 200
SHOWING: Final = ("list", "show", "check", "cancel", "clean", "remove", "metrics")


@pytest.fixture
def kept() -> Iterator[list[ConditionalAccumulator]]:
    """Accumulators that are gone after the test."""
    made: list[ConditionalAccumulator] = []
    yield made
    for acc in made:
        acc.unlink()
        acc.close()


def make(name: str, namespace: str | None) -> ConditionalAccumulator:
    before = os.environ["SHMACC_NAMESPACE"]
    os.environ["SHMACC_NAMESPACE"] = namespace or ""
    try:
        return ConditionalAccumulator(np.float32, [2], name)
    finally:
        os.environ["SHMACC_NAMESPACE"] = before


def names_of(answer: dict[str, list[dict[str, str]]]) -> list[str]:
    return [segment["name"] for segment in answer["segments"]]


def test_a_name_that_looks_like_another_segments_file(
    kept: list[ConditionalAccumulator], namespace: str
) -> None:
    """`remove` of the name that `list` shows removes that one, not the one it looks like."""
    looks_alike = f"unit-{os.getpid()}"
    kept += [make(looks_alike, None), make(f"shmacc.{looks_alike}", None)]
    shown = names_of(ask("list", "-A", f"*{looks_alike}"))
    assert sorted(shown) == [f"shmacc.shmacc.{looks_alike}", f"shmacc.{looks_alike}"]
    for name in shown:
        assert [s["system_name"] for s in ask("list", name)["segments"]] == [name]
    assert run("remove", f"shmacc.shmacc.{looks_alike}", "--yes", "--force").returncode == 0
    assert run("show", f"shmacc.{looks_alike}").returncode == 0
    # In a namespace, too; and cleaning goes by the same rule.
    twin = f"twin-{os.getpid()}"
    kept += [make(f"shmacc.{twin}", namespace), make(twin, namespace)]
    assert f"shmacc.{twin}" not in names_of(ask("list"))
    assert run("show", f"shmacc.{twin}").returncode == 3
    kept.pop().close()
    kept.pop().close()
    removed = ask("clean", twin, "--yes")["removed"]
    assert f"shmacc.{namespace}:{twin}" in removed
    assert f"shmacc.{namespace}:shmacc.{twin}" not in removed
    assert ask("clean", f"shmacc.{namespace}:shmacc.{twin}", "--yes")["removed"]


@pytest.mark.parametrize(
    ("name", "namespace_length"),
    [("x", 20), (LONG_NAME, 60), ("sem.x.0123456789abcdef", 20), ("-x", 20)],
)
def test_every_name_that_is_shown_works(
    kept: list[ConditionalAccumulator], name: str, namespace_length: int
) -> None:
    with testing.isolated_namespace():
        own = os.environ["SHMACC_NAMESPACE"] = f"{os.getpid()}-".ljust(namespace_length, "n")
        kept.append(ConditionalAccumulator(np.float32, [2], name))
        for setting in (own, f"{os.getpid()}-other"):
            os.environ["SHMACC_NAMESPACE"] = setting
            [shown] = [
                segment
                for segment in ask("list", "-A")["segments"]
                if segment["system_name"] == kept[0]._segment_name.system_name
            ]
            for verb in SHOWING:
                done = run(verb, shown["name"])
                assert done.returncode in {0, 1}, (verb, shown["name"], done.stderr)
            assert names_of(ask("list", shown["name"])) == [shown["name"]]
        os.environ["SHMACC_NAMESPACE"] = own
        if not name.startswith("-"):  # as its maker calls it
            assert names_of(ask("list", name)) == [name]
        assert len(ask("list", f"*{name[-100:]}")["segments"]) == 1
        with kept.pop() as acc:
            acc.unlink()


def test_a_renamed_file_goes_by_its_files_name(kept: list[ConditionalAccumulator]) -> None:
    kept.append(ConditionalAccumulator(np.float32, [2], "before"))
    path_of("before").rename(path_of("moved"))
    [segment] = ask("list")["segments"]
    assert segment["name"] == "moved"
    assert run("show", "moved").returncode == 0
    path_of("moved").rename(path_of("before"))


def test_a_damaged_segment_with_a_long_name() -> None:
    with testing.isolated_namespace():
        os.environ["SHMACC_NAMESPACE"] = f"{os.getpid()}-".ljust(60, "d")
        path = path_of(LONG_NAME)
        path.write_bytes(b"no segment" * 1000)
        try:
            [segment] = ask("list")["segments"]
            assert segment["name"] == path.name
            assert run("show", segment["name"]).returncode == 1
            assert len(ask("remove", segment["name"], "--yes", "--force")["removed"]) == 1
        finally:
            path.unlink(missing_ok=True)


def test_a_malformed_namespace_is_an_error_of_every_verb() -> None:
    for verb in ("list", "check", "clean", "metrics"):
        for done, blamed in (
            (run(verb, SHMACC_NAMESPACE="a/b"), "SHMACC_NAMESPACE"),
            (run(verb, "-A", SHMACC_NAMESPACE="a/b"), "SHMACC_NAMESPACE"),
            (run(verb, "-n", "a/b"), "--namespace"),
        ):
            assert (done.returncode, done.stdout) == (2, ""), verb
            assert f"{blamed} must be" in done.stderr


def test_a_namespace_is_chosen_by_an_option(
    kept: list[ConditionalAccumulator], namespace: str
) -> None:
    there, other = namespace, f"{namespace}-other"
    kept.append(ConditionalAccumulator(np.float32, [2], "bias"))
    assert names_of(ask("list", "-n", other)) == []
    assert run("show", "bias", "-n", there, SHMACC_NAMESPACE=other).returncode == 0
    assert run("list", "--quiet", f"--namespace={there}", SHMACC_NAMESPACE=other).stdout == "bias\n"
    assert run("check", "-n", there, SHMACC_NAMESPACE=other).stderr.startswith(
        "shmacc-inspect: 1 segment"
    )
    assert run("remove", "bias", "-n", other, "--yes").returncode == 3


def test_every_verb_takes_several_names_and_globs(kept: list[ConditionalAccumulator]) -> None:
    kept += [ConditionalAccumulator(np.float32, [2], name) for name in ("a1", "a2", "b", "c")]
    assert names_of(ask("list", "b", "a*", "a1")) == ["a1", "a2", "b"]
    shown = run("show", "b", "a*").stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("name")] == [
        "b",
        "a1",
        "a2",
    ]
    assert "3 segments checked" in run("check", "a*", "b").stderr
    assert run("cancel", "a*", "b", "--yes").stderr.count("in the queue cancelled") == 3
    watched = run("watch", "b", "a*", "--count", "1", "--interval", "0.05").stdout
    assert [line.split()[1] for line in watched.splitlines()] == ["a1", "a2", "b"]
    assert run("show", "b", "nobody").returncode == 3
    for acc in kept:
        acc.close()
    # One that is not there: nothing is done.
    assert run("remove", "b", "nobody", "--yes").returncode == 3
    removed = run("remove", "b", "a*", "--yes")
    assert removed.returncode == 0
    assert len(removed.stdout.splitlines()) == 6
    assert names_of(ask("list")) == ["c"]
    kept[:-1] = []
    assert run("clean", "--yes", "c").returncode == 0
    kept.clear()


def test_of_several_none_is_removed_if_one_is_in_use(kept: list[ConditionalAccumulator]) -> None:
    kept += [ConditionalAccumulator(np.float32, [2], name) for name in ("idle", "used")]
    kept[0].close()
    refused = run("remove", "idle", "used", "--yes", "--json")
    assert refused.returncode == 1
    assert '"refused": true' in refused.stdout
    assert names_of(ask("list")) == ["idle", "used"]
    assert run("remove", "idle", "used", "--yes", "--force").returncode == 0
    kept.pop().close()
    kept.clear()


def test_a_refused_removal_is_answered_in_json(kept: list[ConditionalAccumulator]) -> None:
    kept.append(ConditionalAccumulator(np.float32, [2], "used"))
    answer = ask("remove", "used", "--yes", status=1)
    assert (answer["refused"], answer["removed"], answer["dry_run"]) == (True, [], True)
    assert [each["pid"] for each in answer["attached"]] == [os.getpid()]
    assert "in use" in answer["obstacle"]


def test_what_is_not_there_is_no_answer_in_json_either() -> None:
    for verb in ("list", "show", "check", "metrics", "remove", "cancel"):
        done = run(verb, "nobody", "--json")
        assert (done.returncode, done.stdout) == (3, ""), verb


def test_the_name_of_a_namespaces_segment_elsewhere(
    kept: list[ConditionalAccumulator], namespace: str
) -> None:
    kept.append(ConditionalAccumulator(np.float32, [2], "bias"))
    name = inspection.list_names("bias", namespace=namespace)[0]
    assert typed_name(name) == "bias"
    os.environ["SHMACC_NAMESPACE"] = f"{namespace}-other"
    assert typed_name(name) == name.system_name
    os.environ["SHMACC_NAMESPACE"] = namespace
    assert f"{SHM_DIRECTORY}/{name.system_name}" == name.path


@pytest.mark.parametrize("looked_at", ["list_names", "summarise"])
@pytest.mark.parametrize(
    "arguments",
    [["show"], ["show", "--values"], ["cancel", "--yes"]],
    ids=" ".join,
)
def test_what_a_glob_found_and_lost_meanwhile_is_skipped(
    arguments: list[str], looked_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside jobs that end all the while; of who was named, it is told."""
    real = getattr(inspection, looked_at)

    def remove_when_found(*given: object, **options: object) -> object:
        found = real(*given, **options)
        if (found if looked_at == "list_names" else [found]) and path_of("c2").exists():
            inspection.remove("c2", force=True)
        return found

    verb, *options = arguments
    with ConditionalAccumulator(np.float32, [2], "c1") as acc:
        ConditionalAccumulator(np.float32, [2], "c2").close()
        monkeypatch.setattr(inspection, looked_at, remove_when_found)
        assert main([verb, "c*", *options]) == 0
        assert not path_of("c2").exists()
        assert main([verb, "c2", *options]) == 3
        acc.unlink()
