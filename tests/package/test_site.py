"""What checks and orders the documentation site; `make docs` builds it."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from pygments.styles import get_style_by_name
from pygments.token import Whitespace

import links
import shmacc
from shmacc import errors

ROOT: Final = Path(__file__).parents[2]
SITE: Final = ROOT / "docs" / "site"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sphinx's settings of the site."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(SITE / "conf.py"))


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("b.html", True),
        ("b.html#there", True),
        ("#here", True),
        ("https://elsewhere.example/", True),
        ("c.html", False),
        ("b.html#here", False),
        ("#there", False),
        ("../outside.html", False),
    ],
)
@pytest.mark.parametrize("kind", ["html", "md"])
def test_a_link_that_leads_nowhere_is_found(
    link: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, found: bool
) -> None:
    link = link.replace("html", kind)
    here, to, there = (
        ('<p id="here">', f'<a href="{link}">a</a>', '<p id="there">')
        if kind == "html"
        else ("# Here\n", f"[a]({link})", "## There")
    )
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / f"outside.{kind}").write_text(to)
    (site / f"a.{kind}").write_text(here + to)
    (site / f"b.{kind}").write_text(there)
    dead = [] if found else [(site / f"a.{kind}", link)]
    assert list(links.dead(site.iterdir(), site)) == dead
    monkeypatch.setattr(sys, "argv", ["links.py", str(site)])
    assert links.main() == (kind == "html" and not found)


def test_a_page_that_no_section_names_is_among_those_that_say_how() -> None:
    navigation = runpy.run_path(str(SITE / "navigation.py"))
    pages = ["docs/tutorial", "docs/guide", "docs/brand-new", "docs/concepts/new", "LICENSE"]
    sections = navigation["toctrees"](pages).split(":caption: ")
    holds = {part.split("\n")[0]: part for part in sections[1:]}
    assert "/docs/brand-new\n" in holds["How to"]
    assert "/docs/concepts/new\n" in holds["Concepts"]
    assert not any("LICENSE" in part or "/docs/jax" in part for part in sections)


def test_evidence_stands_behind_one_door() -> None:
    navigation = runpy.run_path(str(SITE / "navigation.py"))
    pages = ["docs/trust", "docs/performance", "docs/simulation", "docs/guide"]
    assert "docs/performance" not in navigation["toctrees"](pages)
    listed = re.findall("^/(.*)$", navigation["behind"]("docs/trust", pages), re.MULTILINE)
    assert listed == ["docs/performance", "docs/simulation"]
    assert navigation["behind"]("docs/guide", pages) == ""


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"ShmaccError"}))
def test_every_error_says_what_to_do(name: str) -> None:
    """The table of errors has it from there."""
    said = inspect.cleandoc(vars(errors)[name].__doc__)
    assert len(re.findall(r"^What to do: \w", said, re.MULTILINE)) == 1


@pytest.mark.parametrize("package", [shmacc, shmacc.inspection, shmacc.errors])
def test_the_reference_has_every_public_name(package: ModuleType) -> None:
    pages = [page.read_text() for page in (SITE.parent / "reference").glob("*.rst")]
    shown = re.findall(
        r"^\.\. (?:auto\w+|py:data):: (?:shmacc\.)?(\w+)", "\n".join(pages), re.MULTILINE
    )
    names = [name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)]
    assert set(names) <= {*shown, "__version__"}


def test_the_site_shows_its_version_and_icon(settings: dict[str, Any]) -> None:
    assert settings["html_title"] == f"shmacc {shmacc.__version__}"
    assert (SITE / settings["html_favicon"]).read_text().startswith("<svg xmlns=")


def test_programs_have_a_button_that_copies_them_without_the_prompt(
    settings: dict[str, Any],
) -> None:
    assert "sphinx_copybutton" in settings["extensions"]
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    commands = re.findall(r"^```console\n(.*)$", tutorial, re.MULTILINE)
    assert commands
    assert all(command.startswith(settings["copybutton_prompt_text"]) for command in commands)


def test_files_to_install_and_settings_of_the_site_are_no_pages(settings: dict[str, Any]) -> None:
    written = settings["include_patterns"]
    assert "docs/examples/training_loop.py" in written  # one that is a page
    assert not [page for page in written if page.startswith("docs/site")]
    assert not {".yml", ".yaml", ".json", ".sh"} & settings["source_suffix"].keys()


def _luminance(colour: str) -> float:
    """The relative luminance of an "rrggbb", as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_its_definition() -> None:
    assert _contrast("000000", "ffffff") == pytest.approx(21)
    assert _contrast("777777", "ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["pygments_style", "pygments_dark_style"])
def test_programs_and_what_they_print_can_be_read_in_every_colour(
    theme: str, settings: dict[str, Any]
) -> None:
    style = get_style_by_name(settings[theme])
    behind = style.background_color.removeprefix("#")
    weak = {
        str(token): f"{colour} on {ground}"
        for token, drawn in style
        if token is not Whitespace
        and (colour := drawn["color"])
        and _contrast(colour, ground := drawn["bgcolor"] or behind) < 4.5
    }
    assert weak == {}


def _scored(kind: str) -> re.Pattern[str]:
    """A group of pages to which the search's scorer gives a weight of its own."""
    scorer = (SITE / "scorer.js").read_text()
    [pattern] = re.findall(rf"^const {kind} =\s+/(.*)/;$", scorer, re.MULTILINE)
    return re.compile(pattern.replace(r"\/", "/"))


def test_the_search_ranks_pages_by_their_section() -> None:
    navigation = runpy.run_path(str(SITE / "navigation.py"))
    sections = navigation["_SECTIONS"] | navigation["_BEHIND"]
    first, last = _scored("FIRST"), _scored("LAST")
    for section, pages in sections.items():
        for page in pages:
            assert bool(last.match(page)) == (section in {"Evidence", "docs/trust", "Project"}), (
                page
            )
    assert all(first.match(page) for page in sections["Concepts"])
    assert first.match("docs/tutorial")
