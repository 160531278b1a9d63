"""Makes the README's links absolute, and adds the project's urls, for a release.

    python tools/chores/published_links.py https://github.com/OWNER/NAME v1.2.3

A package index shows the README without the repository around it: a relative link or picture leads
nowhere there. The repository does not record its own public address; the release workflow knows it.
The files are changed in place, in a checkout that only serves the build.
"""

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")
_BEFORE_URLS = "[project.scripts]\n"


def absolute(page: str, home: str, ref: str) -> str:
    """Return the page with every relative link leading to `home` as of `ref`."""

    def link(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        return f"{picture}{text}({home}/{'raw' if picture else 'blob'}/{ref}/{path})"

    return _RELATIVE.sub(link, page)


def with_urls(settings: str, home: str, ref: str) -> str:
    """Return pyproject.toml's text with the project's urls."""
    pages = {"Source": "", "Issues": "/issues"}
    pages |= {"Documentation": f"/blob/{ref}/docs/README.md"}
    pages |= {"Changelog": f"/blob/{ref}/CHANGELOG.md"}
    pages |= {"Security": f"/blob/{ref}/SECURITY.md"}
    urls = "".join(f'{name} = "{home}{path}"\n' for name, path in pages.items())
    if settings.count(_BEFORE_URLS) != 1 or "[project.urls]" in settings:
        raise ValueError("pyproject.toml has urls, or no place for them")
    return settings.replace(_BEFORE_URLS, f"[project.urls]\n{urls}\n{_BEFORE_URLS}")


def main() -> None:
    """Change the files in place."""
    home, ref = sys.argv[1:]
    for name, change in ("README.md", absolute), ("pyproject.toml", with_urls):
        path = _ROOT / name
        path.write_text(change(path.read_text(), home, ref))


if __name__ == "__main__":
    main()
