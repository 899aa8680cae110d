"""Writes docs/images/report.png: the HTML report of a run on the fake cloud of the tests, in Chromium.

python docs/make_report_image.py [FILE.html]     with a file, also keep the page
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from playwright.sync_api import sync_playwright  # noqa: E402
from tests.report.kept_run import sample_report  # noqa: E402

from homing.report import render_html  # noqa: E402

WIDTH, HEIGHT = 1120, 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "report.html"
        page.write_text(render_html(sample_report(Path(folder))), encoding="utf-8")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            window = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            window.goto(page.resolve().as_uri())
            window.screenshot(path=ROOT / "docs/images/report.png")
            browser.close()


if __name__ == "__main__":
    main()
