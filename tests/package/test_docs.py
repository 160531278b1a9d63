"""The README and the pages: programs run as a reader would paste them, what they name exists."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from helpers import pages
from helpers.pages import PAGES, ROOT
from helpers.pages import page_id as _id
from helpers.support import LONG
from helpers.thrice import Thrice

import links
import published_links
import shmacc

README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


PROGRAMS: Final = pages.programs(with_others=False)
# What they print, where they say so.
PRINTED: Final = {
    "README.md-0": "100% of the table is learnt",
    "docs/guide.md-0": "step 2: rows [0, 1, 2, 3, 7], row 7 has mean [2.0, 2.0]",
}


# Of the tutorial, those that run without others and without arguments.
ALONE: Final = {
    f"tutorial-{pages.name_of(block)}": block
    for kind, block in pages.tutorial()
    if kind == "python" and pages.name_of(block) in {"first.py", "survive.py"}
}


@pytest.mark.parametrize("name", PROGRAMS | ALONE)
def test_a_program_runs_whatever_was_before(name: str, tmp_path: Path, namespace: str) -> None:
    typos = (1, 2) if name in {"README.md-0", "docs/guide.md-0"} else (2,)
    runs = Thrice.of_text((PROGRAMS | ALONE)[name], tmp_path, namespace, typos=typos)
    assert PRINTED.get(name, "") in runs.run()


def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    pages.run_tutorial(tmp_path, Path(sys.prefix))


def test_the_recipes_service_goes_on_when_its_chief_was_killed(tmp_path: Path) -> None:
    recipes = _text(ROOT / "docs" / "recipes.md")
    [program] = re.findall(r"```python\n(# service\.py\n.*?)```", recipes, re.DOTALL)
    (tmp_path / "service.py").write_text(program)

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(tmp_path / "service.py"), role]
        return stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    with ExitStack() as stack:
        chief, *workers = [start(role) for role in ("chief", "0", "1")]
        with shmacc.AccumulatorGroup.attach("service", timeout=LONG) as group:
            assert group.wait_step(5, timeout=LONG) > 5
            chief.kill()
            assert chief.wait(LONG) == -signal.SIGKILL
            killed_at = group.global_step
        again = start("chief")
        assert again.communicate(timeout=LONG)[0] == "step 2000 [3.0, -1.0, 0.5]\n"
        assert killed_at < 2000
        assert [worker.wait(LONG) for worker in workers] == [0, 0]
        # Killed at the very end, and started again: for them the run is over, they begin no other.
        assert start("chief").communicate(timeout=LONG)[0] == "step 2000 [3.0, -1.0, 0.5]\n"
        assert start("0").wait(LONG) == 0
    with shmacc.AccumulatorGroup.attach("service") as group:
        assert (group.global_step, group.running) == (2000, False)
        group.unlink()
    with shmacc.Parameters.attach("service.params") as params:
        params.unlink()


def test_there_are_programs() -> None:
    assert PRINTED.keys() < PROGRAMS.keys()


def _targets() -> set[str]:
    """Of the Makefile, those that `make help` lists."""
    return set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_link_leads_somewhere() -> None:
    assert list(links.dead(PAGES, ROOT)) == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_file_and_target_that_is_named_exists(page: Path) -> None:
    words = re.findall(r"`([^`\n]+)`", links.prose(_text(page)))
    tops = ("shmacc/", "tests/", "tools/", "docs/", "constraints/", ".ci/", ".github/")
    for path in (word for word in words if re.fullmatch(r"[\w./-]+", word)):
        if path.startswith(tops):
            assert (ROOT / path).exists(), path
    for command in (word for word in words if word.startswith("make ")):
        assert set(command.split()[1:]) <= _targets(), command


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links.links(index)}
    assert not set(PAGES) - linked - {index, ROOT / "README.md"}


def test_every_target_of_make_is_described() -> None:
    table = re.findall(r"^\| `make ([a-z0-9-]+)` \|", _text(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert set(table) == _targets() - {"help"}


def _made_by(file: str) -> set[str]:
    """The targets that a workflow or script makes."""
    made = r"^ *(?:- run: |part .*)make ([a-z-]+)"
    return set(re.findall(made, _text(ROOT / file), re.MULTILINE))


def test_workflows_make_targets_that_exist_and_all_that_ci_makes() -> None:
    here, on_github = _made_by(".ci/run"), _made_by(".github/workflows/tests.yml")
    assert here | on_github <= _targets()
    assert here - {"smoke"} | {"dist"} <= on_github  # a matrix of Pythons instead of smokes
    assert {"test", "smoke"} <= here


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", _text(ROOT / "Makefile"), re.MULTILINE)
    assert recipe is not None
    linted = re.findall(r"^\t\$\(BIN\)/([\w-]+(?: (?:check|format))?)", recipe[1], re.MULTILINE)
    hooks = re.findall(r"entry: \.venv/bin/(.*)", _text(ROOT / ".pre-commit-config.yaml"))
    assert len(hooks) == len(linted) > 0
    assert all(any(hook.startswith(command) for hook in hooks) for command in linted)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_readme_of_a_release_has_no_link_that_needs_the_repository_around_it(
    tmp_path: Path,
) -> None:
    home, ref = "https://forge.example/owner/shmacc", "v1.2.3"
    (tmp_path / "README.md").write_text(published_links.absolute(README, home, ref))
    assert all(link.startswith("https:") for link in links.links(tmp_path / "README.md"))
    page = "[a](docs/a.md#b) ![c](d.svg) [e\nf](https://e.example)"
    assert published_links.absolute(page, home, ref).split(" ") == [
        f"[a]({home}/blob/{ref}/docs/a.md#b)",
        f"![c]({home}/raw/{ref}/d.svg)",
        "[e\nf](https://e.example)",
    ]


def test_a_release_has_urls() -> None:
    # Without those that a published source distribution has already.
    settings = re.sub(r"\[project\.urls\]\n.*?\n\n", "", SETTINGS, flags=re.DOTALL)
    published = tomllib.loads(published_links.with_urls(settings, "https://forge.example/a", "v1"))
    assert published["project"]["urls"]["Issues"] == "https://forge.example/a/issues"
    assert published["project"]["scripts"] == tomllib.loads(SETTINGS)["project"]["scripts"]
