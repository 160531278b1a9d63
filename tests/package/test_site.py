"""What checks and orders the documentation site; `make docs` builds it."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import links
import shmacc
from shmacc import errors

ROOT: Final = Path(__file__).parents[2]
SITE: Final = ROOT / "docs" / "site"


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
