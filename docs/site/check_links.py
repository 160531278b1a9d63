"""Follows every link within a built site, anchors included: python check_links.py build/docs."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The places of a page that can be linked to, and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places = {"", "top"}
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, _: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note them."""
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif name in {"href", "src"} and value:
                self.links.add(value)


def main() -> int:
    """Print links that lead nowhere; return whether there are any."""
    root = Path(sys.argv[1]).resolve()
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in root.rglob("*.html")}
    dead = 0
    for file, page in pages.items():
        for link in sorted(page.links):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            found = target.is_file() and target.is_relative_to(root)
            if found and target in pages:
                found = unquote(url.fragment) in pages[target].places
            if not found:
                print(f"{file.relative_to(root)}: {link} leads nowhere", file=sys.stderr)
                dead += 1
    return min(dead, 1)


if __name__ == "__main__":
    sys.exit(main())
