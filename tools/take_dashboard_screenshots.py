"""Makes the pictures of the dashboard in docs/images from a home that is filled with made-up runs.

    python tools/take_dashboard_screenshots.py              all four pictures, optimized
    python tools/take_dashboard_screenshots.py --out DIR    more views, for a look while changing the page

It needs Chromium. The browser of the tests takes the pictures, so each page also passes their checks: no error on its
console, and no request to another server.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from PIL import Image  # noqa: E402
from tests.web.browser import Page, running_browser  # noqa: E402
from tests.web.dashboard_rig import TOKEN, served  # noqa: E402
from tests.web.dashboard_runs import DIVERGED, DONE, LIVE, RESUMED, RL, QuietBoard, fill_home  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
DESK, PHONE = (1280, 800), (390, 844)
COMPARED = ",".join((LIVE, RESUMED, DONE, DIVERGED))
TABLE, CHARTS = (
    "document.querySelectorAll('tr[data-row]').length === 9",
    "document.querySelector('.chart:not([hidden]) canvas')",
)
# name -> (address, what it shows when it is ready, size, is_dark, is_kept)
VIEWS = {
    "dashboard-light": ("", TABLE, DESK, False, True),
    "dashboard-dark": (f"run={RESUMED}", CHARTS, DESK, True, True),
    "dashboard-phone": ("", TABLE, PHONE, False, True),
    "dashboard-compare": (f"compare={COMPARED}&smooth=0.6", CHARTS, DESK, False, True),
    "table-dark": ("", TABLE, DESK, True, False),
    "compare-dark": (f"compare={COMPARED}&x=usd&log=1", CHARTS, (1280, 2600), True, False),
    "run-light": (f"run={LIVE}", CHARTS, (1280, 1900), False, False),
    "run-rl": (f"run={RL}", CHARTS, (1280, 1900), False, False),
    "run-failed": (f"run={DIVERGED}", CHARTS, DESK, False, False),
    "run-samples": (f"run={RESUMED}&tab=samples", "document.querySelector('.sample')", DESK, False, False),
    "run-settings": (f"run={RESUMED}&tab=settings", "document.querySelector('#settings table')", DESK, False, False),
    "run-events": (f"run={RESUMED}&tab=events", "document.querySelector('#events li')", DESK, False, False),
    "run-files": (f"run={RESUMED}&tab=files", "document.querySelector('#kept table')", DESK, False, False),
    "run-phone": (f"run={LIVE}", CHARTS, PHONE, False, False),
    "compare-phone": (f"compare={COMPARED}", CHARTS, PHONE, True, False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every view to this folder, and leave docs/images alone")
    out = parser.parse_args().out
    (out or IMAGES).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="homing-pictures-") as folder, ExitStack() as stack:
        fill_home(Path(folder) / "home", time.time())
        board = QuietBoard(Path(folder) / "home")
        client = stack.enter_context(served(board, board.end))
        board.begin()
        browser = stack.enter_context(running_browser(Path(folder) / "browser"))
        for name, (address, is_ready, (width, height), is_dark, is_kept) in VIEWS.items():
            if not out and not is_kept:
                continue
            is_phone = (width, height) == PHONE
            url = f"{client.base_url}/#token={TOKEN}"
            with browser.page(url, width=width, height=height, is_phone=is_phone, is_dark=is_dark) as page:
                page.js(f"location.hash = {address!r}")
                page.until(is_ready)
                settle(page)
                print(f"{name}: {page.overflow_px()} px too wide")
                save(page.playwright.screenshot(), (out or IMAGES) / f"{name}.png")
    return 0


def settle(page: Page) -> None:
    """Wait until every part that arrives once is there and drawn."""
    page.until("$('link').textContent === 'live'")
    page.js("new Promise((done) => setTimeout(done, 1500))")


def save(png: bytes, path: Path) -> None:
    """Write the picture with a palette of 256 colors, which halves its size without a visible difference."""
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES or path.parent != IMAGES, f"{path} has {path.stat().st_size:,} bytes"


if __name__ == "__main__":
    raise SystemExit(main())
