"""The docs site: it builds without a warning, its links work, and it asks no other server for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]


@pytest.mark.slow
def test_the_site_builds_strictly_and_every_link_in_it_works(tmp_path: Path) -> None:
    site = tmp_path / "site"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    for command in ([*BUILD, str(site)], [sys.executable, "tools/check_site.py", str(site)]):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_the_pages_of_the_repository_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text):
            if not re.match(r"https?:", link) and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_that_the_program_names_exists() -> None:
    sources = [path for folder in ("src", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {page for path in sources for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert {page for page in named if not (ROOT / page).exists()} == set()
