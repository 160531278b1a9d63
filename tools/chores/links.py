"""Follows every link between pages, with its anchor: python tools/chores/links.py build/docs.

Pages are Markdown sources or built HTML.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_CODE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """Return a page of Markdown without its blocks of code."""
    return _CODE.sub("", text)


class _Html(HTMLParser):
    """The anchors of a page, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect anchors and links."""
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in {"href", "src"} and value:
                self.links.add(value)


class _Markdown:
    """Links and anchors of a Markdown page; its headings are anchors, as on GitHub."""

    def __init__(self, text: str) -> None:
        written = prose(text)
        headings = re.findall(r"^#+ (.*)$", written, re.MULTILINE)
        kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
        self.anchors = {"", *(heading.replace(" ", "-") for heading in kept)}
        self.links = set(_LINK.findall(written))


def dead(pages: Iterable[Path], root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each link of these pages that leads to no file below `root`, or to no anchor."""
    known = {page.resolve(): read(page) for page in pages}
    for page, its in known.items():
        for link in sorted(its.links):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            if not target.exists() or not target.is_relative_to(root.resolve()):
                yield page, link
            elif target in known:
                if unquote(url.fragment) not in known[target].anchors:
                    yield page, link
            elif url.fragment:
                yield page, link


def read(page: Path) -> _Html | _Markdown:
    """Return a page's `links`, as written in it, and its `anchors`."""
    text = page.read_text(encoding="utf-8")
    return _Html(text) if page.suffix == ".html" else _Markdown(text)


def main() -> int:
    """Print links of a built site that lead nowhere; return whether there are any."""
    root = Path(sys.argv[1])
    found = list(dead(root.rglob("*.html"), root))
    for page, link in found:
        print(f"{page.relative_to(root.resolve())}: {link} leads nowhere", file=sys.stderr)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
