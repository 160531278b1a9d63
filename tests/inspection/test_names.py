"""Each name that is shown can be typed as an argument, and has one meaning."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
from helpers.inspect_tool import ask, path_of, run

from shmacc import ConditionalAccumulator, inspection, testing

LONG_NAME: Final = "a" * 200
SHOWING: Final = ("list", "show", "check", "cancel", "clean", "remove", "metrics")


@pytest.fixture
def kept() -> Iterator[list[ConditionalAccumulator]]:
    made: list[ConditionalAccumulator] = []
    yield made
    for acc in made:
        acc.unlink()
        acc.close()


def make(name: str, namespace: str | None = None, **options: Any) -> ConditionalAccumulator:
    with mock.patch.dict(os.environ, {} if namespace is None else {"SHMACC_NAMESPACE": namespace}):
        return ConditionalAccumulator(np.float32, [2], name, **options)


def names_of(answer: Any) -> list[str]:
    return [segment["name"] for segment in answer["segments"]]


def test_a_name_like_another_segments_file_means_the_right_segment(
    kept: list[ConditionalAccumulator], namespace: str
) -> None:
    """`remove` removes the segment that `list` shows under this name, and no other."""
    looks_alike = f"unit-{os.getpid()}"
    kept += [make(looks_alike, ""), make(f"shmacc.{looks_alike}", "")]
    shown = names_of(ask("list", "-A", f"*{looks_alike}"))
    assert sorted(shown) == [f"shmacc.shmacc.{looks_alike}", f"shmacc.{looks_alike}"]
    for name in shown:
        assert [s["system_name"] for s in ask("list", name)["segments"]] == [name]
    assert run("remove", f"shmacc.shmacc.{looks_alike}", "--yes", "--force").returncode == 0
    assert run("show", f"shmacc.{looks_alike}").returncode == 0
    # The same holds in a namespace, and for `clean`.
    twin = f"twin-{os.getpid()}"
    kept += [make(f"shmacc.{twin}"), make(twin)]
    assert f"shmacc.{twin}" not in names_of(ask("list"))
    assert run("show", f"shmacc.{twin}").returncode == 3
    kept.pop().close()
    kept.pop().close()
    removed = ask("clean", twin, "--yes")["removed"]
    assert f"shmacc.{namespace}:{twin}" in removed
    assert f"shmacc.{namespace}:shmacc.{twin}" not in removed
    assert ask("clean", f"shmacc.{namespace}:shmacc.{twin}", "--yes")["removed"]


@pytest.mark.parametrize(("name", "namespace_length"), [
    *((name, 20) for name in ("x", "sem.x.0123456789abcdef", "-x", "w:0/grad_accum", "a b")),
    *((name, 20) for name in ("w[0]", "w*", "a\n\x1b[31mb", "'\"$(x)`", "é", "%41", "~", "--")),
    *((name, 60) for name in (LONG_NAME, "é" * 33, "%" * 66)),
])  # fmt: skip
def test_every_name_that_is_shown_is_accepted(name: str, namespace_length: int) -> None:
    with testing.isolated_namespace():
        own = os.environ["SHMACC_NAMESPACE"] = f"{os.getpid()}-".ljust(namespace_length, "n")
        with make(name) as acc:
            for setting in (own, f"{os.getpid()}-other"):
                os.environ["SHMACC_NAMESPACE"] = setting
                [shown] = [
                    segment["name"]
                    for segment in ask("list", "-A")["segments"]
                    if segment["system_name"] == acc._segment_name.system_name
                ]
                for verb in SHOWING:
                    done = run(verb, shown)
                    assert done.returncode in {0, 1}, (verb, shown, done.stderr)
                assert names_of(ask("list", shown)) == [shown]
            os.environ["SHMACC_NAMESPACE"] = own
            # The command also takes the name as its maker wrote it.
            [segment] = json.loads(run("list", "--json", "--", name).stdout)["segments"]
            assert segment["shared_name"] == name
            assert segment["name"] == (name if name[0] != "-" and "*" not in name else shown)
            end = re.sub(r"[\[*?]", "[\\g<0>]", name[-100:])
            assert len(ask("list", f"*{end}")["segments"]) == 1
            acc.unlink()


def test_odd_names_are_printed_as_one_safe_word(namespace: str) -> None:
    """The word is the name itself or the file's name. It is safe for `xargs` and shells."""
    odd = {"w:0/grad": "", "é": "", "a b": "a%20b", "$(x)": "%24%28x%29", "\x1b[31m": "%1B%5B31m"}
    with contextlib.ExitStack() as kept:
        for name in odd:
            kept.enter_context(make(name, unlink_on_close=True))
        words = [f"shmacc.{namespace}:{file}" if file else name for name, file in odd.items()]
        for done in (
            run("list", "--quiet"),
            run("list"),
            run("watch", "--count", "1", "--interval", "0.05"),
            run("--complete", "2", "list", ""),
        ):
            assert set(words) <= set(done.stdout.split())
            assert done.stdout.replace("\n", "").isprintable()
        assert run("show", "\x1b[31m").stdout.replace("\n", "").isprintable()
        assert "\x1b" not in run("show", "\x1b[32m").stderr + run("check").stdout
        samples = [each for metric in ask("metrics")["metrics"] for each in metric["samples"]]
        labels = {sample["labels"].get("name") for sample in samples}
        assert labels >= {"w%3A0%2Fgrad", "%C3%A9", "a%20b", "%24%28x%29", "%1B%5B31m"}


def test_a_name_with_brackets_is_also_a_glob(kept: list[ConditionalAccumulator]) -> None:
    """`w[0]` is a name if it exists; `w*` is always a glob, so no segment hides others."""
    kept += [make(name) for name in ("w0", "w[0]", "w*", "*", "job:0")]
    for given, found in {
        "w[0]": {"w[0]"},
        "w[[]0]": {"w[0]"},
        "w*": {"w0", "w[0]", "w*"},
        "w[*]": {"w*"},
        "*": {"w0", "w[0]", "w*", "*", "job:0"},
        "job:*": {"job:0"},
        "job:0": {"job:0"},
    }.items():
        assert {each["shared_name"] for each in ask("list", given)["segments"]} == found
        assert f"{len(found)} segment" in run("check", given).stderr
    assert len(ask("list")["segments"]) == 5
    kept.pop(1).close()
    assert run("clean", "w[0]", "--yes").stdout.count("%5B0%5D") == 2
    assert names_of(ask("list", "w[0]")) == ["w0"]


def test_every_argument_after_two_dashes_is_a_name(kept: list[ConditionalAccumulator]) -> None:
    kept += [make(name) for name in ("-rf", "--json", "a", "--yes")]
    for line, found in {
        "-- -rf": ["-rf"],
        "a -- -rf --json": ["a", "-rf", "--json"],
        "-q -- --json": ["--json"],
        "--sort name -- a": ["a"],
    }.items():
        listed = run("list", "-q", *line.split())
        assert listed.returncode == 0, listed.stderr
        assert {word.rpartition(":")[2] for word in listed.stdout.split()} == set(found)
    for verb in ("show", "check", "cancel", "remove", "clean", "watch --count=1", "metrics"):
        assert run(*verb.split(), "--", "-rf").returncode in {0, 1}, verb
        assert run(*verb.split(), "--", "-no").returncode == 3, verb
    assert run("wait", "--for", "count=0", "--", "-rf").returncode == 0
    assert run("remove", "a", "--", "--yes").returncode == 1  # in use, and --yes is a name here
    for line in ("list -n -- a", "show --", "show --json --", "list --sort -- a"):
        assert run(*line.split()).returncode == 2, line


def test_a_damaged_segment_with_a_long_name_can_be_removed() -> None:
    with testing.isolated_namespace():
        os.environ["SHMACC_NAMESPACE"] = f"{os.getpid()}-".ljust(60, "d")
        path = path_of(LONG_NAME)
        path.write_bytes(b"no segment" * 1000)
        try:
            [segment] = ask("list")["segments"]
            assert (segment["name"], segment["state"]) == (path.name, "damaged")
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


def test_a_namespace_is_chosen_by_the_environment_or_an_option(
    kept: list[ConditionalAccumulator], namespace: str
) -> None:
    other = f"{namespace}-other"
    kept.append(make("bias"))
    with mock.patch.dict(os.environ, {"SHMACC_NAMESPACE": other}):
        nothing = run("list")
        assert (nothing.returncode, nothing.stdout) == (0, "")
        assert "no segments" in nothing.stderr
    assert names_of(ask("list", "-n", other)) == []
    assert run("remove", "bias", "-n", other, "--yes").returncode == 3
    own = kept[0]._segment_name.system_name
    for line, shown in ((f"-A {own}", own), (f"-n {namespace}", "bias")):
        listed = run("list", "--quiet", *line.split(), SHMACC_NAMESPACE=other)
        assert listed.stdout == f"{shown}\n"
    assert run("show", own, SHMACC_NAMESPACE=other).returncode == 0
    checked = run("check", "-n", namespace, SHMACC_NAMESPACE=other).stderr
    assert checked.startswith("shmacc-inspect: 1 segment")


def test_every_verb_takes_several_names_and_globs(kept: list[ConditionalAccumulator]) -> None:
    kept += [make(name) for name in ("a1", "a2", "b", "c")]
    assert names_of(ask("list", "b", "a*", "a1")) == ["a1", "a2", "b"]
    shown = run("show", "b", "a*").stdout.splitlines()
    assert [line.split()[1] for line in shown if line.startswith("name")] == ["b", "a1", "a2"]
    assert "3 segments checked" in run("check", "a*", "b").stderr
    assert run("cancel", "a*", "b", "--yes").stderr.count("in the queue cancelled") == 3
    watched = run("watch", "b", "a*", "--count", "1", "--interval", "0.05").stdout
    assert [line.split()[1] for line in watched.splitlines()] == ["a1", "a2", "b"]
    assert run("show", "b", "nobody").returncode == 3
    while kept:
        kept.pop().close()
    # One of the names does not exist: nothing is done.
    assert run("remove", "b", "nobody", "--yes").returncode == 3
    removed = run("remove", "b", "a*", "--yes")
    assert (removed.returncode, len(removed.stdout.splitlines())) == (0, 6)
    assert names_of(ask("list")) == ["c"]
    assert run("clean", "--yes", "c").returncode == 0


@pytest.mark.parametrize("verb", ["list", "remove", "clean", "check"])
def test_a_glob_does_not_match_the_prefix_of_all_names(verb: str, namespace: str) -> None:
    for name in ("bias", "sums", "tower.bias"):
        make(name).close()
    for glob, found in (
        ("s*", {"sums"}), ("*m*", {"sums"}), ("*.bias", {"tower.bias"}),
        ("*:*s", {"bias", "sums", "tower.bias"}), (f"shmacc.{namespace}:b*", {"bias"}),
    ):  # fmt: skip
        said = run(verb, glob, "--json").stdout
        assert {each for each in ("bias", "sums", "tower.bias") if f":{each}" in said} == found
    assert run("clean", "--yes").returncode == 0


def test_clean_removes_a_name_like_a_semaphores_only_in_a_namespace() -> None:
    make("sem.a").close()
    assert run("clean", "sem.a", "--yes", SHMACC_NAMESPACE="").returncode == 3
    assert path_of("sem.a").exists()
    assert run("clean", "sem.a", "--yes").returncode == 0
    assert not path_of("sem.a").exists()


@pytest.mark.parametrize("looked_at", ["list_names", "summarise"])
@pytest.mark.parametrize(
    "arguments", [["show"], ["show", "--values"], ["cancel", "--yes"]], ids=" ".join
)
def test_segments_that_disappear_after_a_glob_found_them_are_skipped(
    arguments: list[str], looked_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing segment that was given by its name is an error."""
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
        assert run(verb, "c*", *options).returncode == 0
        assert not path_of("c2").exists()
        assert run(verb, "c2", *options).returncode == 3
        acc.unlink()
