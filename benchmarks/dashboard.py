"""How soon the dashboard is usable with 100 runs, one of them with a million lines of metrics, in a real browser.

    python benchmarks/dashboard.py            101 runs; needs Chromium
    python benchmarks/dashboard.py --quick    20 runs and 50,000 lines: no figures kept

Each figure is the time that a person waits, with a fresh browser profile: from opening the address to a table that
shows every run with its figures, from a click on a header to the sorted table, and from a click on the long run to its
first drawn chart. Of several rounds the least counts, because what else the computer does only adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

from tests.cloud.many_records import HERE, fill_metrics  # noqa: E402
from tests.web.browser import Browser, running_browser  # noqa: E402
from tests.web.dashboard_runs import fill_many  # noqa: E402

from _result import write_result  # noqa: E402

# what a person waits for -> maximum number of seconds
BARS = {"table_s": 2.0, "sort_s": 0.5, "run_s": 2.0, "compare_s": 2.0}
_TOKEN = "a-token-for-this-benchmark-only"
_ROWS = "document.querySelectorAll('tr[data-row]').length"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small home; nothing is kept")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which the least counts")
    arguments = parser.parse_args()
    num_runs, num_metrics = (20, 50_000) if arguments.quick else (100, 1_000_000)
    with tempfile.TemporaryDirectory(prefix="homing-dashboard-") as folder:
        figures = measure(Path(folder), num_runs, num_metrics, arguments.repeat)
    failed = [name for name, bar in BARS.items() if figures[name] > bar]
    figures["bars"] = BARS
    if not arguments.quick:
        write_result("dashboard", figures, passed=not failed)
    for name, bar in BARS.items():
        print(f"{name:<10} {figures[name]:6.3f} s of {bar:g}   {'FAIL' if name in failed else 'ok'}")
    print(f"{'FAIL' if failed else 'PASS'} {num_runs + 1} runs, one with {num_metrics:,} metric lines")
    return 1 if failed else 0


def measure(folder: Path, num_runs: int, num_metrics: int, repeat: int) -> dict[str, Any]:
    home = folder / "home"
    ids = fill_many(home, num_runs, time.time())
    fill_metrics(home, num_metrics)
    rounds = []
    with running_browser(folder / "browser") as browser:
        for _ in range(repeat):
            rounds.append(one_round(browser, home, ids))
    best = {name: round(min(each[name] for each in rounds), 3) for name in BARS}
    return {"runs": num_runs + 1, "metric_lines": num_metrics, "rounds": rounds, **best}


def one_round(browser: Browser, home: Path, ids: list[str]) -> dict[str, float]:
    env = {**os.environ, "HOMING_HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "HOMING_DASHBOARD_TOKEN": _TOKEN}
    argv = [sys.executable, "-m", "homing.cli", "dashboard", "--port", "0", "--json"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            began = time.perf_counter()
            with browser.page(f"{url}/#token={_TOKEN}", width=1280, height=800) as page:
                page.until(f"{_ROWS} === {len(ids) + 1} && !$('runs').textContent.includes('unfinished')")
                table_s = time.perf_counter() - began
                began = time.perf_counter()
                page.click("button[data-sort=val_loss]")
                page.until("document.querySelector('th[aria-sort=descending]')")
                sort_s = time.perf_counter() - began
                began = time.perf_counter()
                page.js(f"location.hash = 'run={HERE}'")
                page.until("document.querySelector('#one .chart:not([hidden]) canvas')")
                run_s = time.perf_counter() - began
                began = time.perf_counter()
                page.js(f"location.hash = 'compare={','.join([HERE, *ids[:3]])}'")
                page.until("comparison.board?.charts[0].series?.filter((each) => each.xs.length > 50).length === 4")
                compare_s = time.perf_counter() - began
        finally:
            server.terminate()
    return {"table_s": table_s, "sort_s": sort_s, "run_s": run_s, "compare_s": compare_s}


if __name__ == "__main__":
    raise SystemExit(main())
