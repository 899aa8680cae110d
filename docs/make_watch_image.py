"""Writes docs/images/watch.svg: the live view of `homing watch`, of a run on the fake cloud of the tests.

    python docs/make_watch_image.py

The reports come from the code that follows a rented run, and the screen draws them, as on a terminal.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from tests.cli.live_run import rented  # noqa: E402
from tests.cloud.many_records import FakeCloudServer  # noqa: E402

from homing.cli.watch_screen import WatchScreen  # noqa: E402
from homing.cloud.home import Home  # noqa: E402
from homing.cloud.watch.follow import watch  # noqa: E402
from homing.world import World  # noqa: E402

COLUMNS, ROWS = 100, 36


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, FakeCloudServer() as server:
        os.environ |= server.env
        path = Path(folder)
        home = Home(path / "home", World())
        row = rented(path / "home", path, server)
        screen = WatchScreen(row.name, row.name)
        # The first line report ends the first look at the run; all other reports come before it.
        for report in itertools.islice(watch(home, row, is_curve=True), 40):
            screen.take(report)
            if report.kind == "line":
                break
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, height=ROWS, force_terminal=True)
    for line in screen.lines(COLUMNS, ROWS):
        console.print(line)
    target = ROOT / "docs/images/watch.svg"
    target.write_text(console.export_svg(title="homing watch moss", theme=MONOKAI), encoding="utf-8")


if __name__ == "__main__":
    main()
