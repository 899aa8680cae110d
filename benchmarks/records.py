"""What every look costs in a home with a long past: CPU seconds and peak memory of each verb in a fresh process.

    python benchmarks/records.py            10,000 ledger lines, 50 of them open; a run with a million lines of numbers
    python benchmarks/records.py --quick    1,000 lines, 20 open; 50,000 lines of numbers: no figures kept

The open runs are on a fake cloud that shows and bills them, each with a heartbeat in its store. A verb's CPU time
includes the start of the interpreter; its modules were compiled before, as pip does when it installs them. Of several
runs the least counts, because what else the computer does makes the same work take longer and never shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks")]

from tests.cloud.many_records import HERE, FakeCloudServer, Used, cpu_of, fill_ledger, fill_metrics  # noqa: E402

from _result import write_result  # noqa: E402

MEGABYTE = 10**6
# verb -> at most so much CPU, and memory
BARS: dict[str, tuple[float, float]] = {
    "runs": (1.0, 200),
    "guard": (1.0, 200),
    "ledger": (1.0, 200),
    "status": (2.0, 200),
    "watch": (2.0, 200),
    "report": (2.0, 200),
    "dashboard": (2.0, 200),
}
PAGE_BYTES = 2 * MEGABYTE
VERBS = {
    "runs": ["runs"],
    "guard": ["guard", "--once"],
    "ledger": ["ledger"],
    "status": ["status", HERE],
    "watch": ["watch", HERE],
    "report": ["report", HERE, "--out", "report.html"],
}
_TOKEN = "a-token-for-this-benchmark-only"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small home; nothing is kept")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each verb, of which the least counts")
    arguments = parser.parse_args()
    num_lines, num_open, num_metrics = (1_000, 20, 50_000) if arguments.quick else (10_000, 50, 1_000_000)
    with tempfile.TemporaryDirectory(prefix="homing-records-") as folder, FakeCloudServer() as server:
        figures = measure(Path(folder), server, num_lines, num_open, num_metrics, arguments.repeat)
    failed = [name for name, bar in BARS.items() if not is_within(figures["verbs"][name], bar)]
    if figures["report_page_bytes"] > PAGE_BYTES:
        failed.append("report page")
    figures["bars"] = {name: {"cpu_s": cpu_s, "peak_mb": peak} for name, (cpu_s, peak) in BARS.items()}
    if not arguments.quick:
        write_result("records", figures, passed=not failed)
    for name, each in figures["verbs"].items():
        word = "FAIL" if name in failed else "ok"
        print(f"{name:<10} {each['cpu_s']:6.2f} s of {BARS[name][0]:g}   {each['peak_mb']:5.0f} MB   {word}")
    print(f"report page {figures['report_page_bytes']:,} bytes of {PAGE_BYTES:,}")
    print(
        f"{'FAIL ' + ', '.join(failed) if failed else 'PASS'} {num_lines:,} ledger lines, {num_metrics:,} metric lines"
    )
    return 1 if failed else 0


def is_within(found: dict[str, Any], bar: tuple[float, float]) -> bool:
    return found["code"] == 0 and found["cpu_s"] <= bar[0] and found["peak_mb"] <= bar[1]


def measure(
    folder: Path, server: FakeCloudServer, num_lines: int, num_open: int, num_metrics: int, repeat: int
) -> dict[str, Any]:
    home = folder / "home"
    home.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {**server.env, "HOMING_HOME": str(home), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    env |= {"PYTHONPATH": str(ROOT / "src"), "HOMING_DASHBOARD_TOKEN": _TOKEN}
    fill_ledger(home, num_lines, num_open, server, folder / "store")
    fill_metrics(home, num_metrics)
    os.chdir(folder)
    verbs: dict[str, Any] = {}
    for name, argv in VERBS.items():
        looks = [cpu_of(["-m", "homing.cli", *argv], env) for _ in range(repeat + 1)]
        verbs[name] = messages(looks[1:])  # the first one compiles, and brings the ledger up to date
    verbs["dashboard"] = messages([dashboard(env) for _ in range(repeat + 1)][1:])
    size = (folder / "report.html").stat().st_size if (folder / "report.html").exists() else sys.maxsize
    shape = {"ledger_lines": num_lines, "open_runs": num_open, "metric_lines": num_metrics}
    return {**shape, "verbs": verbs, "report_page_bytes": size}


def messages(looks: list[Used]) -> dict[str, Any]:
    for look in looks:
        if look.code:
            sys.stderr.write(look.err)
    return {
        "cpu_s": round(min(look.cpu_s for look in looks), 3),
        "peak_mb": round(max(look.peak_bytes for look in looks) / MEGABYTE, 1),
        "code": max(look.code for look in looks),
    }


def dashboard(env: Mapping[str, str]) -> Used:
    """The server from its start until the page of the run has its curves, status and report."""
    argv = [sys.executable, "-m", "homing.cli", "dashboard", "--port", "0", "--json"]
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE, stderr=err, text=True)
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            is_shown = _wait_for(f"{url}/api/runs/{HERE}")
        finally:
            process.terminate()  # a job in the background starts with SIGINT ignored, and would wait forever
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            process.stdout.close()
        err.seek(0)
        code = 0 if is_shown else 1
        return Used(code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, "", err.read())


def _wait_for(url: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {_TOKEN}"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(request, timeout=60) as reply:
                shown = json.load(reply)
            if {"points", "rows", "report"} <= set(shown) and shown["points"]:
                return True
        time.sleep(0.2)
    return False


if __name__ == "__main__":
    sys.exit(main())
