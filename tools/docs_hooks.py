"""For MkDocs: links to files outside docs/ become the name of the file, because the site does not hold them.

    [sweep.json](../../benchmarks/results/sweep.json)  ->  sweep.json (`benchmarks/results/sweep.json`)

In the repository such a link works as it is. A file that does not exist is a warning, which `--strict` makes an error.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
log = logging.getLogger("mkdocs.hooks.repository_links")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = Path(page.file.abs_src_path).parent

    def plain(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found[2]))
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        if not target.exists():
            log.warning("%s: %s does not exist", page.file.src_uri, found[2])
        path = target.relative_to(ROOT).as_posix()
        return f"`{path}`" if path.endswith(found[1].strip("`")) else f"{found[1]} (`{path}`)"

    parts = BLOCK.split(markdown)
    return "".join(part if number % 2 else LINK.sub(plain, part) for number, part in enumerate(parts))
