"""What the site adds to Sphinx: navigation, drawings, source files as pages."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.domains.python import PyObject
from sphinx.parsers import Parser
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from shmacc import errors

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_logger = logging.getLogger(__name__)


class SourceParser(Parser):
    """Shows a source file as a page of its own, which the navigation does not list."""

    supported: ClassVar = ("cpp", "python", "promela")

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document with a title and the highlighted text."""
        env = document.settings.env
        file = env.doc2path(env.docname, base=False)
        env.metadata[env.docname] = {"orphan": "", "nosearch": ""}
        languages = {".hpp": "cpp", ".py": "python"}
        section = nodes.section(ids=[nodes.make_id(str(file))])
        section += nodes.title(text=str(file))
        code = nodes.literal_block(inputstring, inputstring)
        code["language"] = languages.get(Path(file).suffix, "text")
        section += code
        document += section


class ErrorTable(SphinxDirective):
    """A table of the classes in shmacc.errors, from their docstrings."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: 22 14 24 26 14", ""]
        lines += _row("Class", "Also a", "When", "What to do", "Fields")
        for name in errors.__all__:
            error = getattr(errors, name)
            if error is errors.ShmaccError:
                continue
            summary, _, details = inspect.cleandoc(error.__doc__ or "").partition("\n")
            also = [base.__name__ for base in error.__bases__ if base is not errors.ShmaccError]
            fields = re.findall(r"^ {4}(\w+): ", details, re.MULTILINE)
            [to_do] = re.findall(r"^What to do: (.*(?:\n\S.*)*)", details, re.MULTILINE)
            lines += _row(
                f":py:exc:`~shmacc.errors.{name}`",
                ", ".join(f"``{base}``" for base in also),
                summary,
                " ".join(to_do.split()),
                ", ".join(f"``{field}``" for field in fields),
            )
        return self.parse_text_to_nodes("\n".join(lines))


def _row(*cells: str) -> list[str]:
    first, *others = cells
    return [f"   * - {first}", *(f"     - {cell}" for cell in others)]


def _add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let the sections of docs/README.md, and the pages that they link to, be the navigation."""
    if docname != app.config.root_doc:
        return
    listed = Path(app.srcdir, "docs", "README.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^\*\*(.*?)\*\*", listed, flags=re.MULTILINE)
    left = dict.fromkeys(app.env.found_docs - {docname})
    for caption, section in zip(sections[::2], sections[1::2], strict=True):
        links = re.findall(r"\]\(([^)#]+)\.(?:md|rst)", section)
        pages = [os.path.normpath(f"docs/{link}") for link in links]
        entries = "".join(f"/{page}\n" for page in pages if left.pop(page, page) is None)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}```\n"


def _inline_drawings(app: Sphinx, doctree: nodes.document) -> None:
    """Put drawings into the page itself, where they have its colours and its text's font."""
    for image in list(doctree.findall(nodes.image)):
        file = Path(app.srcdir, image["uri"])
        if file.parent.name == "concepts":
            figure = nodes.container(classes=["drawing"])
            figure += nodes.raw("", file.read_text(encoding="utf-8"), format="html")
            image.replace_self(figure)


def _drop_empty_heads(_: Sphinx, doctree: nodes.document) -> None:
    """Leave out the head of a table whose columns have no titles."""
    for head in list(doctree.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def _shorten(*event: object) -> tuple[str | None, str | None]:
    """Show an array's annotation as that, without the types that NumPy spells out."""
    signature, returned = (
        part and re.sub(r"(~?numpy\.)?ndarray\[tuple\[.*?\], [^]]*\]\]", "ndarray", part)
        for part in event[-2:]
        if part is None or isinstance(part, str)
    )
    return signature, returned


def _check_urls(_: Sphinx, doctree: nodes.document) -> None:
    """External links are checked by their form: the build needs no network."""
    for reference in doctree.findall(nodes.reference):
        url = urlsplit(reference.get("refuri", ""))
        if url.scheme in {"http", "https"} and not re.fullmatch(r"[\w-]+(\.[\w-]+)+", url.netloc):
            _logger.warning("no address: %s", reference["refuri"], location=reference)


def _make_accessible(
    _: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: nodes.document | None
) -> None:
    """Let keys scroll what is wider than the page, and say what lists and captions are.

    The parameters of a long signature are no list of definitions, and a caption has a level.
    """
    for part, found, better in (
        ("body", "<pre>", '<pre tabindex="0">'),
        ("body", '<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
        ("body", '<dl>\n<dd><em class="sig-param">',
            '<dl role="none">\n<dd><em class="sig-param">'),
        ("furo_navigation_tree", 'role="heading"', 'role="heading" aria-level="2"'),
    ):  # fmt: skip
        if part in context:
            context[part] = context[part].replace(found, better)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all this."""
    app.add_source_parser(SourceParser)
    app.add_directive("error-table", ErrorTable)
    app.connect("source-read", _add_navigation)
    app.connect("doctree-read", _inline_drawings)
    app.connect("doctree-read", _drop_empty_heads)
    app.connect("doctree-read", _check_urls)
    app.connect("html-page-context", _make_accessible, priority=900)  # after the theme
    app.connect("autodoc-process-signature", _shorten)
    for field in PyObject.doc_field_types:
        if field.name == "variable":  # what these docstrings list under "Attributes"
            field.label = "Attributes"
    return {"parallel_read_safe": True}
