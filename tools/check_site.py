"""Checks the built docs site: every link and anchor inside it leads somewhere, and no page loads from another server.

python tools/check_site.py [site]      exits 1 and lists what is wrong
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
NOT_LOADED = {"canonical", "next", "prev", "edit", "alternate"}  # of <link rel=...>


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        for name in ("href", "src"):
            url = attributes.get(name, "")
            if (tag, name) in LOADED and attributes.get("rel") not in NOT_LOADED and urlsplit(url).netloc:
                self.outside.append(url)
            elif url and not urlsplit(url).scheme and not urlsplit(url).netloc:
                self.links.append(url)


def problems(site: Path) -> list[str]:
    pages: dict[Path, Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name} loads {url}" for url in page.outside]
        for url in page.links if name.name != "404.html" else []:  # its links are absolute
            split = urlsplit(url)
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name} links to {url}, which does not exist")
            elif split.fragment and target in pages and unquote(split.fragment) not in pages[target].ids:
                found.append(f"{name} links to {url}, which has no such heading")
    return found


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    found = problems(site)
    print("\n".join(found) or f"PASS {len(list(site.rglob('*.html')))} pages, all links inside the site work")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
