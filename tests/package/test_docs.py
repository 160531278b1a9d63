"""The programs of README, pages and examples run as a reader would paste them.

All files, links and commands that pages mention exist.
"""

import re
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from helpers import pages
from helpers.pages import PAGES, ROOT, page_id
from helpers.support import LONG, run_to_end
from helpers.thrice import Thrice

import links
import published_links
import shmacc
from shmacc import errors

# A program's processes wait for processes that are still starting.
pytestmark = pytest.mark.patience(LONG)

README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

PROGRAMS: Final = pages.programs(with_others=False)
EXAMPLES: Final = pages.examples(with_others=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_after_a_killed_run(name: str, tmp_path: Path, namespace: str) -> None:
    Thrice.of_text(PROGRAMS[name], tmp_path, namespace).run()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_works_after_a_killed_run(example: Path, tmp_path: Path, namespace: str) -> None:
    Thrice(example, tmp_path, namespace).run()
    assert "assert" in example.read_text()


def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    pages.run_page(pages.TUTORIAL, tmp_path, Path(sys.prefix))


def test_the_recipes_service_goes_on_after_its_chief_is_killed(tmp_path: Path) -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text()
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
        # Processes that are started again after the end find the run finished and begin no new one.
        assert start("chief").communicate(timeout=LONG)[0] == "step 2000 [3.0, -1.0, 0.5]\n"
        assert start("0").wait(LONG) == 0
    with shmacc.AccumulatorGroup.attach("service") as group:
        assert (group.global_step, group.running) == (2000, False)
        group.unlink()
    with shmacc.Parameters.attach("service.params") as params:
        params.unlink()


def test_the_recipe_of_exactly_once_counts_once_if_workers_are_killed(tmp_path: Path) -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text()
    [program] = re.findall(r"```python\n([^`]*once\.params.*?)```", recipes, re.DOTALL)
    apply = re.search(r"^( +)group\.apply\(.*\n", program, re.MULTILINE)
    assert apply is not None
    dies = f"{apply[1]}number == 20 and __import__('os').kill(__import__('os').getpid(), 9)\n"
    (tmp_path / "once.py").write_text(program.replace(apply[0], apply[0] + dies))
    command = [sys.executable, str(tmp_path / "once.py")]
    ran = run_to_end(command)
    assert ran.stderr.count("was killed by SIGKILL, and is started again") == 2


def test_text_blocks_of_pages_are_no_python_programs() -> None:
    for page in PAGES:
        for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL):
            with pytest.raises(SyntaxError):
                compile(block, page_id(page), "exec")


def _targets() -> set[str]:
    """Return the targets of the Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_files_links_and_commands_of_pages_exist() -> None:
    assert list(links.dead(PAGES, ROOT)) == []
    tops = ("shmacc/", "tests/", "tools/", "docs/", "constraints/", ".ci/", ".github/")
    for page in PAGES:
        for word in re.findall(r"`([^`\n]+)`", links.prose(page.read_text())):
            if word.startswith(tops) and re.fullmatch(r"[\w./-]+", word):
                assert (ROOT / word).exists(), (page, word)
            if word.startswith("make "):
                assert set(word.split()[1:]) <= _targets(), (page, word)


def test_every_page_and_example_is_linked_from_an_index() -> None:
    def linked(page: Path) -> set[Path]:
        return {(page.parent / link.partition("#")[0]).resolve() for link in links.read(page).links}

    index, examples = ROOT / "docs" / "README.md", ROOT / "docs" / "examples" / "README.md"
    assert not set(PAGES) - linked(index) - {index, ROOT / "README.md"}
    assert not set(EXAMPLES) - linked(examples)
    commands = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| `make ([a-z0-9-]+)` \|", commands, re.MULTILINE)
    assert {"test", "lint", "reference"} <= set(table) <= _targets()


def test_the_github_workflow_makes_the_targets_of_the_ci_script() -> None:
    here, on_github = (
        set(re.findall(r"(?:- run: make |part .*make | target: \[?)([a-z-]+)", text))
        for text in map(Path.read_text, (ROOT / ".ci/run", ROOT / ".github/workflows/tests.yml"))
    )
    assert here | on_github <= _targets()
    assert here - {"smoke"} | {"dist"} <= on_github  # GitHub runs more Pythons instead of `smoke`
    assert {"test", "smoke"} <= here


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    linted = re.findall(r"^\t\$\(BIN\)/([\w-]+(?: (?:check|format))?)", recipe[1], re.MULTILINE)
    hooks = re.findall(r"entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(hooks) == len(linted) > 0
    assert all(any(hook.startswith(command) for hook in hooks) for command in linted)


def test_a_releases_readme_has_no_link_into_the_repository(tmp_path: Path) -> None:
    home, ref = "https://forge.example/owner/shmacc", "v1.2.3"
    (tmp_path / "README.md").write_text(published_links.absolute(README, home, ref))
    assert all(link.startswith("https:") for link in links.read(tmp_path / "README.md").links)
    page = "[a](docs/a.md#b) ![c](d.svg) [e\nf](https://e.example)"
    assert published_links.absolute(page, home, ref).split(" ") == [
        f"[a]({home}/blob/{ref}/docs/a.md#b)",
        f"![c]({home}/raw/{ref}/d.svg)",
        "[e\nf](https://e.example)",
    ]


def test_a_releases_pyproject_has_urls() -> None:
    # Remove the URLs that a published source distribution already has.
    settings = re.sub(r"\[project\.urls\]\n.*?\n\n", "", SETTINGS, flags=re.DOTALL)
    published = tomllib.loads(published_links.with_urls(settings, "https://forge.example/a", "v1"))
    assert published["project"]["urls"]["Issues"] == "https://forge.example/a/issues"
    assert published["project"]["scripts"] == tomllib.loads(SETTINGS)["project"]["scripts"]


@pytest.mark.parametrize("kind", ["html", "md"])
def test_a_dead_link_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / f"outside.{kind}").touch()
    (site / f"b.{kind}").write_text("## There" if kind == "md" else '<p id="there">')
    monkeypatch.setattr(sys, "argv", ["links.py", str(site)])
    alive = (f"b.{kind}", f"b.{kind}#there", "#here", "https://elsewhere.example/")
    dead = (f"c.{kind}", f"b.{kind}#here", "#there", f"../outside.{kind}")
    page = site / f"a.{kind}"
    for link in alive + dead:
        html = f'<p id="here"><a href="{link}">a</a>'
        page.write_text(html if kind == "html" else f"# Here\n[a]({link})")
        found = [(page, link)] * (link in dead)
        assert list(links.dead(site.iterdir(), site)) == found
        assert links.main() == (kind == "html" and link in dead)


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "reference").glob("*.rst")
    text = "\n".join(page.read_text() for page in reference)
    shown = re.findall(r"^\.\. (?:auto\w+|py:data):: (?:shmacc\.)?(\w+)", text, re.MULTILINE)
    whole = re.findall(r"^\.\. automodule:: (\S+)\n   :members:\n", text, re.MULTILINE)
    for package in shmacc, shmacc.inspection, errors:
        if package.__name__ in whole:
            continue
        modules = {name for name in package.__all__ if type(getattr(package, name)) is ModuleType}
        assert set(package.__all__) - modules <= {*shown, "__version__"}
