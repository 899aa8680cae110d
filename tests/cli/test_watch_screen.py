"""The live view of `homing watch`: what it shows, that it fits, and that the terminal is restored."""

from __future__ import annotations

import os
import re
import signal
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.live import Live
from tests.cli.live_run import finish, rented, training_here
from tests.cli.pseudo_terminal import Emulator
from tests.cloud.many_records import FakeCloudServer

from homing.cli import watch_screen
from homing.cli.loss_sparkline import Curve
from homing.cli.watch_screen import WatchScreen
from homing.cloud.home import Home
from homing.cloud.watch.follow import Report, watch
from homing.world import World

WATCH = ["-m", "homing.cli", "watch", "moss"]
TO_MAIN_SCREEN, TO_OTHER_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?1049h", b"\x1b[?25h"
BEAT = {"phase": "pretrain", "step": 1200, "num_steps": 20000, "loss": 3.214, "tokens_per_s": 412_000.0, "mfu": 0.41,
        "use": {"gpu": 0.97, "gpu_memory": 0.62}, "has_dead_man": True, "state": "training"}  # fmt: skip
LINE: dict[str, Any] = {
    "run": "moss-1", "name": "moss", "state": "running", "provider": "runpod", "offer": "1x H100", "attempt": 2,
    "phases": [{"phase": "pretrain", "num_steps": 20000}, {"phase": "sft", "num_steps": 300}],
    "heartbeat": BEAT, "figures": {}, "spend_usd": "1.83", "spend_limit_usd": "12.00", "rate_usd_per_hour": "2.49",
    "ahead": {"eta_s": 7800.0, "is_whole": True, "end_usd": Decimal("7.25")}, "began_at": 0.0,
}  # fmt: skip


def drawn(*reports: Report, width: int = 80, height: int = 24, **how: bool) -> str:
    screen = WatchScreen("moss", "moss", now=lambda: 60.0)
    for report in reports:
        screen.take(report)
    lines = screen.lines(width, height, **how)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def line(**changed: Any) -> Report:
    return Report("line", "step 1,200/20,000", {**LINE, **changed})


def test_it_shows_state_phases_figures_money_and_how_to_stop() -> None:
    shown = drawn(line())
    for words in (
        "moss  ● running  runpod 1x H100, attempt 2",
        "step 1,200 of 20,000, 6%", "sft       next, 300 steps", "loss 3.214",
        "tok/s 412k", "MFU 41%", "GPU 97%", "GPU memory 62%", "spent $1.83 of $12.00", "15%", "ETA 2h10m, at ",
        "rate $2.49/h", "at the end about $7.25", "agent and dead-man process", "homing stop moss", "Ctrl-C leaves",
    ):  # fmt: skip
        assert words in shown, shown


def test_a_predicted_cost_over_the_limit_is_named() -> None:
    shown = drawn(line(ahead={"eta_s": 7800.0, "is_whole": True, "end_usd": Decimal("14")}))
    assert "about $14.00, over the limit" in shown


def test_alerts_and_the_current_problem_come_first_and_a_solved_problem_disappears() -> None:
    alert, problem = Report("alert", "No heartbeat for 5m."), Report("problem", "The store did not answer. Retrying.")
    rows = drawn(line(), alert, problem).splitlines()
    assert rows[2].endswith("No heartbeat for 5m.")
    assert rows[2].startswith("! ")
    assert rows[3] == "Warning: The store did not answer. Retrying."
    assert "did not answer" not in drawn(line(), alert, problem, line())


def test_a_provider_that_still_does_not_answer_stays_on_the_screen() -> None:
    problem = Report("problem", "runpod did not answer. Retrying.")
    assert "Warning: runpod did not answer." in drawn(line(), problem, line(problems=["runpod did not answer."]))
    assert "did not answer" not in drawn(line(problems=["runpod did not answer."]), line(problems=[]))


def test_every_alert_is_in_the_summary_although_the_screen_shows_only_the_newest() -> None:
    screen = WatchScreen("moss", "moss")
    for number in range(5):
        screen.take(Report("alert", f"Alert {number}."))
    shown = "\n".join(each.plain for each in screen.lines(80, 24))
    assert "Alert 1." not in shown
    assert "Alert 4." in shown
    assert [said[-8:] for said in screen.summary() if said.startswith("!")] == [f"Alert {n}." for n in range(5)]


def test_a_time_that_is_on_no_calendar_ends_neither_the_view_nor_the_watch() -> None:
    shown = drawn(
        line(ahead={"eta_s": 1e300, "is_whole": True, "end_usd": None}),
        Report("alert", "The agent could not end billing.", {"t": 1e300}),
        Report("event", "Saved a checkpoint.", {"t": -1e300}),
    )
    assert "! ? The agent could not end billing." in shown
    assert "?        Saved a checkpoint." in shown


def test_it_says_if_the_guards_on_the_instance_cannot_end_its_billing() -> None:
    guards = "agent and dead-man save and push within the limit, but cannot end billing. Only a local guard can."
    shown = " ".join(drawn(line(guards=guards)).split())
    assert f"guards here: this window; on the instance: {guards}" in shown


def test_before_the_first_metrics_it_says_what_it_waits_for_and_how_long() -> None:
    beat = {"state": "booting", "started_at": 0.0}
    assert "Waiting for the instance to boot, 1m00s so far." in drawn(line(heartbeat=beat, ahead=None))
    assert "Waiting for the first report." in drawn()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("height", [6, 10, 20, 24, 50])
def test_it_fits_any_window(width: int, height: int) -> None:
    long = "A very long text that continues. " * 20
    points = [("pretrain", step, 5.0 / step, 1.0 if step % 20 == 0 else None, None) for step in range(1, 90)]
    reports = [
        Report("curve", "", {"points": points}),
        line(),
        Report("sample", f"{long}\n漢字かな交じり文" * 9, {"name": "pretrain-00001200.txt"}),
        *(Report(kind, long, {"t": 1.0}) for kind in ("alert", "problem", "event", "event")),
    ]
    shown = drawn(*reports, width=width, height=height).splitlines()
    assert len(shown) == height
    if height >= 10:
        assert "homing stop moss" in " ".join(shown[-2:]), "how to stop is always there"


def test_text_of_the_run_cannot_move_the_cursor_or_be_markup() -> None:
    shown = drawn(
        line(offer="\x1b[2J[red]x"),
        Report("sample", "\x1b]0;title\x07[bold]x[/bold]", {"name": "\x1b[H"}),
        Report("event", "\x1b[31mred", {"t": 1.0}),
        height=40,
    )
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]x[/bold]" in shown


def test_a_terminal_without_unicode_gets_ascii_bars() -> None:
    points = [("pretrain", step, 5.0 / step, None, None) for step in range(1, 90)]
    shown = drawn(Report("curve", "", {"points": points}), line(), height=40, is_ascii=True)
    assert not re.search("[█▁━▸◆]", shown)
    assert "#" in shown


def test_the_curve_marks_validations_and_falls_to_the_right() -> None:
    curve = Curve()
    curve.add([("pretrain", step, 10.0 - step / 10, None, None) for step in range(1, 81)])
    curve.add([("pretrain", 81, 1.9, 2.5, 1.1)])
    title, *rows = [each.plain for each in curve.lines("pretrain", 60, 6)]
    assert "steps 1 to 81" in title
    assert re.match(" *9.9 █▇", rows[0])
    assert re.match(" *1.9 ███", rows[-1])
    assert sum("◆" in row for row in rows) == 1
    assert curve.summary("pretrain").endswith("9.900 to 1.900, validation 2.500 at step 81")


def test_steps_that_are_trained_again_replace_the_earlier_points() -> None:
    curve = Curve()
    curve.add([("pretrain", step, 1.0, 1.0, None) for step in range(1, 11)])
    curve.add([("pretrain", 4, 2.0, None, None)])
    assert "steps 1 to 4" in curve.lines("pretrain", 60, 6)[0].plain
    held_out = curve.held_out("pretrain")
    assert held_out is not None
    assert held_out.step == 3


def test_a_rented_run_is_shown_with_its_curve_and_predicted_cost(
    homing_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCloudServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        row = rented(homing_home, tmp_path, server)
        reports = []
        for report in watch(Home(homing_home, World()), row, is_curve=True):
            reports.append(report)
            if report.kind == "line":
                break
    shown = drawn(*reports, width=100, height=40)
    assert "Loss of pretrain" in shown
    assert "steps 1 to 2,600" in shown
    assert re.search(r"spent \$1\.\d\d of \$12\.00", shown)
    assert re.search(r"at the end about \$[\d.]+", shown)
    assert "validation at step 2,500" in shown


def test_on_a_terminal_it_draws_on_another_screen_and_leaves_a_summary(homing_home: Path, tmp_path: Path) -> None:
    with training_here(homing_home, tmp_path) as folder, Emulator(WATCH, cwd=tmp_path) as terminal:
        shown = terminal.read_until(lambda text: "GPU memory" in text and "Last events" in text)
        assert "step 260 of 400, 65%" in shown
        terminal.resize(60, 18)
        narrow = terminal.read_until(lambda text: f"\n{'─' * 60}\n" in text and "homing stop" in text)
        assert len(narrow.splitlines()) <= 18
        finish(folder)
        assert terminal.read_to_the_end() == 0
    drawn, _, left = terminal.raw.rpartition(TO_MAIN_SCREEN)
    assert TO_OTHER_SCREEN in drawn
    assert drawn.endswith(SHOW_CURSOR)
    said = left.decode()
    assert "done: Every phase is trained." in said
    assert "pretrain █" in said
    assert "Chat with it: homing chat" in said
    assert "\x1b" not in said


def test_warnings_of_the_log_are_drawn_as_events_and_repeated_after_the_view(homing_home: Path, tmp_path: Path) -> None:
    program = (
        "import sys, logging\nimport homing.api.lookup.local_runs as m\nlook = m.look_again\n"
        "def warn(*a):\n    if not said:\n        said.append(1)\n"
        "        logging.getLogger('store').warning('slow disk')\n"
        "    return look(*a)\nsaid = []\nm.look_again = warn\nfrom homing.cli.main import main\nmain()"
    )
    watch = ["-c", program, *WATCH[2:]]
    with training_here(homing_home, tmp_path) as folder, Emulator(watch, cwd=tmp_path, rows=60) as terminal:
        terminal.read_until(lambda text: "store: slow disk" in text and "Last events" in text)
        finish(folder)
        assert terminal.read_to_the_end() == 0
    _, _, left = terminal.raw.rpartition(TO_MAIN_SCREEN)
    assert b"store: slow disk" in left


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_the_terminal_is_restored_after_ctrl_c_and_after_an_error(homing_home: Path, tmp_path: Path, how: str) -> None:
    broken = (
        "import homing.api.lookup.local_runs as m\ndef fail(*a): raise RuntimeError('broken')\nm.progress_of = fail\n"
    )
    program = f"import sys\n{broken if how == 'error' else ''}from homing.cli.main import main\nmain()"
    with training_here(homing_home, tmp_path), Emulator(["-c", program, *WATCH[2:]], cwd=tmp_path) as terminal:
        if how == "interrupt":
            terminal.read_until(lambda text: "Last events" in text)
            terminal.press(b"\x03")
        code = terminal.read_to_the_end()
    drawn, _, left = terminal.raw.rpartition(TO_MAIN_SCREEN)
    assert drawn.endswith(SHOW_CURSOR)
    if how == "interrupt":
        assert code == 130
        assert "keeps running. Stop it: homing stop" in left.decode()
    else:
        assert code == 1
        assert "RuntimeError: broken" in left.decode()


def test_ctrl_c_during_the_first_drawing_restores_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def interrupted(live: Live) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_screen._Terminal, "write", lambda _, text: written.append(text) or len(text))
    monkeypatch.setattr(Live, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt), watch_screen.on_screen(WatchScreen("moss", "moss")):
        pass
    assert TO_OTHER_SCREEN.decode() in "".join(written)
    assert "".join(written).rstrip().endswith(TO_MAIN_SCREEN.decode())


def test_while_it_is_suspended_the_shell_has_the_terminal_back(homing_home: Path, tmp_path: Path) -> None:
    with training_here(homing_home, tmp_path), Emulator(WATCH, cwd=tmp_path) as terminal:
        terminal.read_until(lambda text: "Last events" in text)
        # Without a shell in its session the process is not really suspended, and draws again at once.
        os.kill(terminal.child.pid, signal.SIGTSTP)
        terminal.read_until(lambda text: terminal.raw.count(TO_OTHER_SCREEN) == 2)
        assert terminal.raw.index(SHOW_CURSOR + TO_MAIN_SCREEN) < terminal.raw.rindex(TO_OTHER_SCREEN)
        terminal.press(b"\x03")
        assert terminal.read_to_the_end() == 130


@pytest.mark.parametrize(
    ("words", "env"),
    [(["--plain"], {}), (["--json"], {}), (["-q"], {}), (["-v"], {}), ([], {"TERM": "dumb"})],
    ids=["plain", "json", "quiet", "verbose", "dumb"],
)
def test_without_a_live_view_it_prints_plain_lines(
    homing_home: Path, tmp_path: Path, words: list[str], env: dict[str, str]
) -> None:
    with training_here(homing_home, tmp_path) as folder:
        finish(folder)
        with Emulator([*WATCH, *words], cwd=tmp_path, columns=160, **env) as terminal:
            assert terminal.read_to_the_end() == 0
    assert b"\x1b" not in terminal.raw
    assert b"done: Every phase is trained." in terminal.raw
