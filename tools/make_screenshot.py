"""Makes docs/dashboard.png: the dashboard's page about a run that `homing quickstart` made.

    python tools/make_screenshot.py           runs quickstart in a temporary folder first (minutes)
    python tools/make_screenshot.py --home D  shows the newest run of this $HOMING_HOME instead

It needs chromium. The browser of the tests takes the picture, so the page also passes their checks: no error on its
console, and no request to another server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.web.browser import running_browser  # noqa: E402

PICTURE = ROOT / "docs" / "dashboard.png"
WIDTH, HEIGHT = 1180, 848


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="a home with at least one run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = arguments.home or Path(folder) / "home"
        if arguments.home is None:
            run_homing(home, "quickstart", "--yes", "--dir", f"{folder}/quickstart")
        run = json.loads(run_homing(home, "runs", "--json"))["runs"][0]["run"]
        take_picture(home, run, Path(folder))
    print(f"Wrote {PICTURE.relative_to(ROOT)}, a picture of {run}")
    return 0


def take_picture(home: Path, run: str, folder: Path) -> None:
    argv = [sys.executable, "-m", "homing.cli", "dashboard", "--port", "0", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment(home)) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())
            url = f"{address['url']}/#token={address['token']}"
            with running_browser(folder / "browser") as browser, browser.page(url, width=WIDTH, height=HEIGHT) as page:
                page.until("document.querySelector('a[href*=\"run\"]')")
                page.click(f'a[href*="{run}"]')
                page.until("document.querySelector('canvas')")
                page.screenshot(PICTURE)
        finally:
            server.terminate()


def run_homing(home: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "homing.cli", *argv],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(home),
    )
    return done.stdout


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOMING_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}


if __name__ == "__main__":
    raise SystemExit(main())
