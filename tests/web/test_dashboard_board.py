"""What the dashboard looks at, and how: by new ends of files, side by side, without changing or guarding anything."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.web.dashboard_rig import (
    FAILED,
    HERE,
    MARK,
    RENTED,
    add,
    at_work,
    fail,
    make_home,
    rent,
    served,
    step,
    train_here,
    until,
)
from tests.web.dashboard_runs import DIVERGED, DONE, LIVE, RL, fill_home

from homing.api.pages import dashboard_overview as dashboard_board
from homing.api.pages import dashboard_run
from homing.api.pages.dashboard_overview import Board
from homing.api.pages.dashboard_run import Following, commands_in, plan_of, sample_of
from homing.api.pages.dashboard_store import Remembering
from homing.api.pages.mask_secrets import Mask, MaskLines
from homing.cloud.contact.heartbeats import Tail
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.reconcile.run_status import Status
from homing.cloud.watch.progress import Planned
from homing.store import FileStore, NotInStore
from homing.web.dashboard.dashboard_app import NoSuchRun
from homing.wire import codec, file_names
from homing.wire.event_lines import Event, Metric, Outcome
from homing.world import World


@pytest.fixture
def home(homing_home: Path) -> Home:
    return make_home(homing_home)


@pytest.fixture
def board(homing_home: Path) -> Iterator[Board]:
    board = Board(homing_home)
    yield board
    board.end()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Every thread that was begun since, for a test to wait for."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (begun.append(self), start(self))[1])
    return begun


def sections(board: Board) -> dict[str, Any]:
    with board.all_runs() as feed:
        return feed.whole()


def run_in(board: Board, run_id: str) -> dict[str, Any]:
    with board.one_run(run_id) as feed:
        assert feed.is_reported.wait(60)
        return feed.whole()


@pytest.mark.acceptance("X21")
def test_all_runs_are_shown_with_the_figures_of_homing_runs(
    board: Board, home: Home, looks: list[threading.Thread]
) -> None:
    fail(home)
    rent(home)
    with at_work(train_here(home.path)):
        board._tick()
        for thread in looks:
            thread.join()
        board._tick()
    messages = sections(board)
    rows = {row["run"]: row for row in messages["runs"]}
    assert [row["run"] for row in messages["runs"]][2] == FAILED, "what lives comes first"
    assert rows[HERE]["state"] == "training"
    assert (rows[HERE]["step"], rows[HERE]["num_steps"]) == (6, 20)
    assert rows[RENTED]["billing"] == "yes"
    assert rows[RENTED]["spend_limit_usd"] == 12.0
    assert rows[RENTED]["line"].startswith("step 6/20 | loss 3.500 | 6.4k tok/s | $0.4")
    assert 0.3 < rows[RENTED]["spend_usd"] < 0.6
    assert rows[FAILED]["reason"] == "Out of memory at step 12."
    assert (rows[FAILED]["spend_usd"], rows[FAILED]["loss"], rows[FAILED]["tokens_per_s"]) == (0.7, 3.5, 6400.0)
    assert messages["money"]["words"] == ["1 instance may still be billing, $2.50/h. End all: homing destroy --all"]
    assert messages["money"]["is_billing"]


def test_finished_runs_keep_their_figures_and_unknown_ones_are_null(
    board: Board, home: Home, looks: list[threading.Thread]
) -> None:
    fill_home(home.path, home.world.now())
    board._tick()
    for thread in looks:
        thread.join()
    board._tick()
    rows = {row["run"]: row for row in sections(board)["runs"]}
    assert len({tuple(row) for row in rows.values()}) == 1, "every row has the same keys"
    done, rl, local = rows[DONE], rows[RL], next(row for row in rows.values() if row["name"] == "shakespeare")
    assert (done["phase"], done["step"], done["num_steps"], done["phases"]) == ("sft", 300, 300, ["pretrain", "sft"])
    assert 1.5 < done["loss"] < done["val_loss"] < 2.5
    assert done["val_bits_per_byte"] == pytest.approx(done["val_loss"] / 3.05)
    assert (done["num_params"], done["family"], done["preset"], done["project"]) == (
        75_000_000, "stock", "goethe-75m", "goethe",
    )  # fmt: skip
    assert (done["provider"], done["offer"], done["is_billing"], done["rate_usd_per_hour"]) == (
        "aws",
        "g6.xlarge",
        False,
        None,
    )
    assert done["duration_s"] == pytest.approx(done["ended_at"] - done["created_at"], abs=1)
    assert (rl["loss"], rl["val_loss"]) == (None, None), "the loss of rl has no meaning"
    assert 0.6 < rl["reward"] < 1
    assert rows[LIVE]["gpu_share"] == 0.98
    assert (local["spend_usd"], local["provider"], local["state"]) == (None, None, "done")
    assert rows[DIVERGED]["reason"].startswith("Training stopped at step 402")
    numbers = [
        value for row in rows.values() for key, value in row.items() if key.endswith(("_usd", "_s", "loss", "step"))
    ]
    assert all(value is None or isinstance(value, int | float) for value in numbers)


def test_a_failed_run_says_why_and_shows_its_last_lines(board: Board, home: Home) -> None:
    fill_home(home.path, home.world.now())
    failure = run_in(board, DIVERGED)["failure"]
    assert (failure["exit_code"], failure["phase"], failure["step"]) == (1, "pretrain", 402)
    assert failure["log_tail"][-1].startswith("error: Training stopped at step 402")
    assert run_in(board, DONE)["failure"] is None


def test_a_page_shows_the_events_and_samples_of_the_whole_run(board: Board, home: Home) -> None:
    folder = train_here(home.path)
    add(
        folder, file_names.EVENTS, *(Event(1000.0 + n, "trainer", "checkpoint_saved", f"Saved {n}.") for n in range(60))
    )
    for number in range(100):
        (folder / file_names.SAMPLES / f"pretrain-{number:08d}.txt").write_text(f"[a] {number}\n\n")
    messages = run_in(board, HERE)
    assert len(messages["events"]) == 61
    steps = sorted(sample["step"] for sample in messages["samples"])
    assert (len(steps), steps[0], steps[-5:]) == (37, 0, [95, 96, 97, 98, 99])


def test_samples_are_split_at_the_prompts_of_the_run() -> None:
    text = "[Who?] I [say]\n\n[Who?] again\n\n[Why <b>?] Because.\n\n"
    assert sample_of("sft-00000120.txt", text, ["Why <b>?", "Who?"]) == {
        "name": "sft-00000120.txt", "phase": "sft", "step": 120,
        "parts": [{"prompt": "Who?", "text": " I [say]\n\n[Who?] again"}, {"prompt": "Why <b>?", "text": " Because."}],
    }  # fmt: skip
    assert sample_of("odd.txt", "[x] y\n\n", [])["parts"] == [{"prompt": "x", "text": " y"}]
    assert sample_of("odd.txt", "no prompt", [])["step"] is None


def test_a_trainer_that_died_without_an_outcome_shows_the_end_of_its_log(board: Board, home: Home) -> None:
    folder = train_here(home.path)
    messages = run_in(board, HERE)
    assert messages["head"]["state"] == "unfinished"
    assert messages["failure"]["log_tail"] == ["trainer begins", "with *** in its log"]
    (folder / file_names.OUTCOME).write_text(codec.dumps(Outcome("done", "All.", 0, "pretrain", 6, 1010.0)))
    board._tick()
    (row,) = sections(board)["runs"]
    assert (row["state"], row["ended_at"]) == ("done", 1010.0)


def test_an_empty_home_is_shown_as_empty(board: Board) -> None:
    board._tick()
    messages = sections(board)
    assert (messages["runs"], messages["money"]["is_empty"]) == ([], True)
    assert messages["money"]["words"] == ["Asking the providers ..."], "no answer yet, so no claim that nothing bills"
    board._ask()
    board._tick()
    assert sections(board)["money"]["words"] == ["Nothing is billing."]
    assert board._money.asked_at is not None
    board._money.asked_at -= 3600
    board._tick()
    messages = sections(board)["money"]
    assert messages["words"] == ["Nothing is known to be billing."], "an answer from an hour ago is none"
    assert "have not responded since" in messages["problems"][0]


def test_an_unreachable_provider_is_reported_and_its_run_stays_billing(board: Board, home: Home) -> None:
    rent(home)
    board._ask()
    board._tick()
    messages = sections(board)["money"]
    assert any("Could not query" in problem for problem in messages["problems"]), messages
    assert messages["is_billing"]


def test_a_store_that_does_not_answer_holds_back_its_own_line_alone(
    board: Board, home: Home, looks: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    rent(home)
    rent(home, run_id="slow-20260101-120000-aaaa", mark="homing-abc123-slow-1")
    real, is_free = dashboard_board.look, threading.Event()

    def look(home: Home, row: RunRow, lines: list[LedgerLine]) -> Status:
        if row.name == "slow":
            is_free.wait()
        return real(home, row, lines)

    monkeypatch.setattr(dashboard_board, "look", look)
    board._tick()
    next(thread for thread in looks if RENTED in thread.name).join()
    board._tick()
    rows = {row["name"]: row for row in sections(board)["runs"]}
    assert rows["moss"]["line"].startswith("step 6/20")
    assert 0.3 < rows["slow"]["spend_usd"] < 0.6, "dollars are the ledger's, and wait for no store"
    assert rows["slow"]["problem"] == ""
    monkeypatch.setattr(dashboard_board, "ASK_S", -1.0)
    board._tick()
    rows = {row["run"].split("-")[0]: row for row in sections(board)["runs"]}
    assert "has not responded" in rows["slow"]["problem"]
    assert len([thread for thread in looks if "slow" in thread.name]) == 1, "no second request while one is waiting"
    is_free.set()
    for thread in looks:
        thread.join()
    board._tick()
    rows = {row["run"].split("-")[0]: row for row in sections(board)["runs"]}
    assert (rows["slow"]["problem"], rows["slow"]["step"]) == ("", 6)


def test_silent_stores_do_not_use_up_the_looks_at_the_others(
    board: Board, home: Home, looks: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        rent(home, run_id=f"slow{number}-20260101-120000-aaaa", mark=f"homing-abc123-slow{number}-1")
    is_free = threading.Event()
    monkeypatch.setattr(dashboard_board, "_MOST_AT_ONCE", 2)
    real = dashboard_board.look
    monkeypatch.setattr(dashboard_board, "look", lambda *asked: is_free.wait() and real(*asked))
    board._tick()
    board._tick()
    assert len(looks) == 2
    monkeypatch.setattr(dashboard_board, "ASK_S", -1.0)
    board._tick()
    assert len(looks) == 4
    is_free.set()
    for thread in looks:
        thread.join()


def test_an_error_while_reading_a_run_is_shown_on_its_line(
    board: Board, home: Home, looks: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    rent(home)
    monkeypatch.setattr(dashboard_board, "look", lambda *asked: 1 // 0)
    board._tick()
    looks[0].join()
    board._tick()
    (row,) = sections(board)["runs"]
    assert "ZeroDivisionError" in row["problem"]


def test_an_ended_run_that_could_not_be_read_is_read_again_later(
    board: Board, home: Home, looks: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(home)
    real = dashboard_board.look
    monkeypatch.setattr(dashboard_board, "look", lambda *asked: 1 // 0)

    def tick() -> Any:
        board._tick()
        for thread in looks:
            thread.join()
        board._tick()
        return sections(board)["runs"][0]["problem"]

    with board.all_runs():
        assert "ZeroDivisionError" in tick()
        tick()
        assert len(looks) == 1, "not with each tick"
        monkeypatch.setattr(dashboard_board, "look", real)
        monkeypatch.setattr(dashboard_board, "_IDLE_S", 0.0)
        assert tick() == ""
        tick()
        assert len(looks) == 2, "it has ended, and that is known now"


def test_a_run_over_its_limit_is_shown_and_not_ended(board: Board, home: Home) -> None:
    """The dashboard is no guard."""
    rent(home, limit="0.01")
    board._tick()
    (row,) = sections(board)["runs"]
    assert row["spend_usd"] > row["spend_limit_usd"] == 0.01
    run_in(board, RENTED)
    (line,) = home.ledger.lines(RENTED)
    assert (line.destroyed_at, home.ledger.is_destroy_asked(MARK)) == (None, False)
    assert home.ledger.run(RENTED).is_live  # type: ignore[union-attr]


def test_one_run_has_its_curves_samples_events_log_and_commands(board: Board, home: Home) -> None:
    with at_work(train_here(home.path)):
        messages = run_in(board, HERE)
    assert [point[:2] for point in messages["points"]] == [["pretrain", n] for n in (1, 2, 3, 4, 5, 6, 6)]
    points = [dict(zip(messages["point_columns"], point, strict=True)) for point in messages["points"]]
    assert [points[1][name] for name in ("loss", "val_loss", "tokens_per_s", "mfu", "num_tokens")] == [
        3.0, None, 6400.0, 0.41, 128,
    ]  # fmt: skip
    assert (points[-1]["loss"], points[-1]["val_loss"], points[-1]["spend_usd"]) == (None, 1.25, None)
    sample = {"prompt": "", "text": "once <b>upon</b> a time"}
    assert messages["samples"] == [{"name": "pretrain-00000005.txt", "phase": "pretrain", "step": 5, "parts": [sample]}]
    event = messages["events"][0]
    assert "trainer: Phase pretrain begins." in event["text"]
    assert (event["kind"], event["phase"], event["step"]) == ("phase_started", "pretrain", 0)
    assert messages["config"]["model"]["width"] == 64
    assert messages["failure"] is None
    assert messages["log trainer"] == ["trainer begins", "with *** in its log"]
    assert messages["head"]["line"].startswith("step 6/20 | loss 1.000 | 6.4k tok/s | mfu 41% | GPU memory")
    assert [each["command"] for each in messages["next"]][:3] == [
        f"homing watch {HERE}", f"homing logs {HERE} -f", f"homing stop {HERE}",
    ]  # fmt: skip
    assert dict(messages["rows"])["trained"] == "on this computer; not billing"
    assert messages["report"]["kept"] == []
    assert messages["problems"] == []


def test_a_rented_run_has_its_dollars_and_the_command_that_ends_billing(board: Board, home: Home) -> None:
    rent(home, began=600.0)
    messages = run_in(board, RENTED)
    dollars = [point[-1] for point in messages["points"]]
    assert dollars == pytest.approx([2.5 * n / 3600 for n in range(1, 7)], abs=1e-5)
    assert {"why": "End billing now", "command": f"homing destroy {RENTED}"} in messages["next"]
    assert messages["head"]["spend_limit_usd"] == 12.0
    assert "| $0.4" in messages["head"]["line"]
    (attempt,) = messages["report"]["attempts"]
    assert attempt["billing"] in ("yes", "maybe")
    assert attempt["rate_usd_per_hour"] == 2.5


def test_a_store_that_is_away_is_a_problem_and_no_empty_run(board: Board, home: Home) -> None:
    folder = rent(home)
    folder.parent.parent.rename(home.path / "elsewhere")
    messages = run_in(board, RENTED)
    assert messages["problems"], "the failed request is reported"


def test_a_pending_read_is_shown_while_it_waits(board: Board, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    rent(home)
    real, is_free, is_asked = dashboard_run.look, threading.Event(), threading.Event()

    def look(home: Home, row: RunRow) -> Status:
        is_asked.set()
        is_free.wait()
        return real(home, row)

    monkeypatch.setattr(dashboard_run, "look", look)
    with board.one_run(RENTED) as feed:
        assert is_asked.wait(60)
        board._tick()
        assert not feed.is_reported.is_set(), "not before its time"
        monkeypatch.setattr(dashboard_run, "ASK_S", -1.0)
        board._tick()
        assert "No response for more than" in feed.whole()["problems"][0]
        assert len(feed.whole()["points"]) == 6, "what came before is shown"
        monkeypatch.setattr(dashboard_run, "ASK_S", 1e9)
        is_free.set()
        until(lambda: "head" in feed.whole() and "No response" not in str(feed.whole()["problems"]))


def test_a_run_is_found_by_its_whole_id_alone(board: Board, home: Home) -> None:
    train_here(home.path)
    for typed in ("", ".", "..", "first", HERE[:-1], f"../runs/{HERE}", f"{HERE}/", "store", "%2e%2e"):
        with pytest.raises(NoSuchRun):
            board.one_run(typed)


def test_the_page_of_a_run_is_followed_once_for_all_readers_while_any_is_connected(
    board: Board, home: Home, looks: list[threading.Thread]
) -> None:
    train_here(home.path)
    with board.one_run(HERE) as first:
        with board.one_run(HERE) as second:
            assert first is second
        (thread,) = looks
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()
    with board.one_run(HERE) as third:
        assert third is not first


def test_the_points_of_a_long_run_are_thinned_also_if_each_is_a_validation(board: Board) -> None:
    following = Following.__new__(Following)
    following.feed, following._points, following._metrics = board._feed, [], []
    num_renewals = 0
    for first in range(0, 30_000, 1000):
        edition = board._feed._sections["points"].edition if first else 1
        fresh = [Metric(1.0 * n, "sft", n, 99_999, 64 * n, 2.0, val_loss=2.0) for n in range(first, first + 1000)]
        following._add_points(fresh, [])
        num_renewals += board._feed._sections["points"].edition != edition
    points = board._feed.whole()["points"]
    assert len(points) == len(following._metrics) <= 8000
    assert points[0][1] == 0
    assert points[-1][1] > 29_900, "the newest ones are shown"
    assert num_renewals < 10, "readers get all points again only now and then"


def test_all_validations_of_a_long_run_are_kept_if_there_are_few(board: Board) -> None:
    following = Following.__new__(Following)
    following.feed, following._points, following._metrics = board._feed, [], []
    for first in range(0, 30_000, 1000):
        fresh = [
            Metric(1.0 * n, "sft", n, 99_999, 64 * n, 2.0, val_loss=2.0 if n % 100 == 1 else None)
            for n in range(first, first + 1000)
        ]
        following._add_points(fresh, [])
    assert sum(each.val_loss is not None for each in following._metrics) == 300
    assert len(following._points) <= 8000


def test_the_metrics_of_a_run_that_is_trained_here_are_read_again_only_if_they_have_grown(
    board: Board, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train_here(home.path)
    (folder / file_names.RUN).unlink(missing_ok=True)  # it is not written yet
    read: list[str] = []
    newest = dashboard_board.newest_metrics
    monkeypatch.setattr(dashboard_board, "newest_metrics", lambda store, key: read.append(key) or newest(store, key))
    for _ in range(3):
        board._tick()
    assert len(read) == 1
    assert sections(board)["runs"][0]["loss"] is not None


def test_a_trainer_that_goes_back_takes_its_points_with_it(board: Board, home: Home) -> None:
    folder = train_here(home.path)
    following = Following.__new__(Following)
    following.feed, following._points, following._metrics = board._feed, [], []
    tail = Tail(FileStore(str(home.path), home.world), f"runs/{HERE}/{file_names.METRICS}")
    following._add_points(tail.documents(Metric), [])
    later = Metric(2000.0, "sft", 1, 5, 64, 2.0)
    add(folder, file_names.METRICS, later)
    following._add_points(tail.documents(Metric), [])
    lines = (folder / file_names.METRICS).read_text().splitlines(keepends=True)
    (folder / file_names.METRICS).write_text("".join(lines[:3]))
    add(folder, file_names.METRICS, step(4, 0.5))
    following._add_points(tail.documents(Metric), [])
    assert [(point[0], point[1], point[4]) for point in board._feed.whole()["points"]] == [
        ("pretrain", 1, 6.0), ("pretrain", 2, 3.0), ("pretrain", 3, 2.0), ("pretrain", 4, 0.5),
    ]  # fmt: skip


def test_of_a_file_in_a_folder_only_its_new_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = World.read

    def counted(self: World, path: Any, offset: int = 0, max_bytes: int = -1) -> bytes:
        data = real(self, path, offset, max_bytes)
        read.append(len(data))
        return data

    monkeypatch.setattr(World, "read", counted)
    path, world = tmp_path / "runs/a/metrics.jsonl", World()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 100_000 + b"\n")
    store = Remembering(FileStore(str(tmp_path), world), world, "runs/a/")
    assert len(store.read("runs/a/metrics.jsonl")) == 100_001
    with open(path, "ab") as file:
        file.write(b"more\n")
    read.clear()
    assert store.read("runs/a/metrics.jsonl").endswith(b"x\nmore\n")
    assert sum(read) < 1000
    path.write_bytes(b"y" * 200_000)
    assert store.read("runs/a/metrics.jsonl") == b"y" * 200_000, "another file in its place is read whole"
    path.unlink()
    with pytest.raises(NotInStore):
        store.read("runs/a/metrics.jsonl")


def test_of_a_far_store_what_has_not_grown_is_not_read_again(tmp_path: Path) -> None:
    world = World()
    inner = FileStore(str(tmp_path), world)
    inner.put_bytes("runs/a/metrics.jsonl", b"one\n")
    read: list[str] = []

    class Far:
        url = "s3:far"
        list = staticmethod(inner.list)

        @staticmethod
        def read(key: str) -> bytes:
            read.append(key)
            return inner.read(key)

    store = Remembering(Far(), world, "runs/a/")  # type: ignore[arg-type]
    for _ in range(3):
        store.look_again()
        assert store.read("runs/a/metrics.jsonl") == b"one\n"
    assert len(read) == 1
    inner.put_bytes("runs/a/metrics.jsonl", b"one\ntwo\n")
    store.look_again()
    assert store.read("runs/a/metrics.jsonl") == b"one\ntwo\n"
    with pytest.raises(NotInStore):
        store.read("runs/a/events.jsonl")


def looked_at_by_hand(home: Home) -> Following:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: None)
        return Following(home, home.ledger.run(RENTED))  # type: ignore[arg-type]


def test_one_look_at_a_far_store_lists_the_run_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub counts its calls, S3 bills them."""
    folder = rent(home)
    (folder / file_names.SAMPLES).mkdir()
    (folder / file_names.SAMPLES / "pretrain-00000005.txt").write_text("once upon a time")
    (folder / file_names.LOGS).mkdir()
    (folder / file_names.LOGS / "agent.log").write_text("agent begins\n")
    inner, listed = FileStore(str(home.path / "store"), home.world), list[str]()

    class Far:
        url, read = "s3:far", staticmethod(inner.read)

        @staticmethod
        def list(prefix: str) -> Any:
            listed.append(prefix)
            return inner.list(prefix)

    following = looked_at_by_hand(home)
    monkeypatch.setattr(Home, "store_of", lambda self, run: Far())
    for number in (1, 2):
        following._read_on([])
        assert listed == [f"runs/{RENTED}/"] * number
    messages = following.feed.whole()
    assert (len(messages["points"]), len(messages["samples"]), messages["log agent"]) == (6, 1, ["agent begins"])


@pytest.mark.parametrize(("url", "pause_s"), [("file:/a", 2.0), ("s3://a/b", 2.5), ("hf:a/b", 30.0)])
def test_a_store_is_looked_at_no_oftener_than_its_pace_makes_sense(home: Home, url: str, pause_s: float) -> None:
    rent(home)
    following = Following.__new__(Following)
    following._run = dataclasses.replace(home.ledger.run(RENTED), store=url)  # type: ignore[type-var]
    following._is_over = False
    assert following._pause_s() == pause_s
    following._is_over = True
    assert following._pause_s() == 60.0


def test_a_run_that_ended_and_bills_is_followed_and_its_last_words_need_no_newline(home: Home) -> None:
    log = rent(home) / file_names.LOGS / "trainer.log"
    log.parent.mkdir()
    log.write_text("begins\nout of mem")
    home.ledger.set_run(RENTED, state="failed", reason="Out of memory.", exit_code=1)
    following = looked_at_by_hand(home)
    following._read_on([])
    assert following._pause_s() == dashboard_run.POLL_S, "it bills"
    assert following.feed.whole()["log trainer"] == ["begins"]
    home.ledger.close(MARK, at=home.world.now(), spend_usd=Decimal("0.70"), note="destroyed")
    for _ in range(2):
        following._read_on([])
        assert following.feed.whole()["log trainer"] == ["begins", "out of mem"]
    assert following._pause_s() > dashboard_run.POLL_S


def test_a_plan_is_remembered_when_the_launch_has_its_machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    rent(home)
    row = home.ledger.run(RENTED)
    assert row is not None
    first, second = Planned(Decimal(1), []), Planned(Decimal(2), [])
    run_documents: list[Planned | None] = [None, first, second, first]
    monkeypatch.setattr(dashboard_run, "planned", lambda home, run: run_documents.pop(0))
    launching, known = dataclasses.replace(row, state="launching"), dict[str, Planned]()
    assert plan_of(known, home, row, MARK) is None
    assert plan_of(known, home, launching, MARK) is first
    assert [plan_of(known, home, row, MARK) for _ in range(3)] == [second] * 3


def test_secrets_are_hidden_wherever_they_stand() -> None:
    mask = Mask({"HF_TOKEN": "a-value-of-mine", "MY_API_KEY": "short", "HOME": "/home/person"})
    assert mask({"a": ["it is a-value-of-mine.", ("short", 7)], "b": None}) == {
        "a": ["it is ***.", ["short", 7]],
        "b": None,
    }
    assert mask("sk-abcdefghijklmnopqrst and /home/person") == "*** and /home/person"


@pytest.mark.parametrize(
    ("environment", "text", "shown"),
    [
        ({"HOMING_DASHBOARD_TOKEN": "value-of-mine"}, "it is value-of-mine.", "it is ***."),
        ({"MLFLOW_TRACKING_TOKEN": "value-of-mine"}, "it is value-of-mine.", "it is ***."),
        ({"GIT_TOKEN": "value-of-mine"}, "it is value-of-mine.", "it is ***."),
        ({"MY_PRIVATE_KEY": "first line of it\nsecond line of it\nend\n"}, "a second line of it, end", "a ***, end"),
        ({}, "with github_pat_11ABCDEFG0abcdefghij_klmnop in it", "with *** in it"),
        ({}, "ASIAABCDEFGHIJKLMNOP", "***"),
        ({}, "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----\nb", "a\n***\nb"),
        ({}, "cut: -----BEGIN PRIVATE KEY-----\nMIIE\n", "cut: ***"),
        ({"HOME": "/home/person"}, "the pad_token is <pad>", "the pad_token is <pad>"),
    ],
)
def test_secrets_are_known_by_name_and_by_form(environment: dict[str, str], text: str, shown: str) -> None:
    assert Mask(environment)(text) == shown


def test_a_private_key_is_hidden_line_by_line_also_where_two_looks_cut_it() -> None:
    mask = MaskLines(Mask({}))
    assert mask(["before", "-----BEGIN OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXk"]) == ["before", "***", "***"]
    assert mask(["AAAAB3NzaC1", "-----END OPENSSH PRIVATE KEY-----", "after"]) == ["***", "***", "after"]
    assert mask(["-----BEGIN PRIVATE KEY-----"]) == ["***"]
    assert mask(["a line"] * 1000)[-1] == "a line", "one that never ends does not take the whole log with it"


def test_commands_are_those_that_the_verbs_say() -> None:
    words = "See why: homing logs moss   Resume from its last checkpoint: homing launch moss --resume"
    assert commands_in(words) == [
        {"why": "See why", "command": "homing logs moss"},
        {"why": "Resume from its last checkpoint", "command": "homing launch moss --resume"},
    ]
    assert commands_in("") == []


def test_a_failed_read_is_reported_and_retried(
    board: Board, looks: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fixed, was_tried = threading.Event(), threading.Event()

    def tick() -> float:
        if not was_tried.is_set():
            was_tried.set()
            raise OSError  # has no words
        if not is_fixed.is_set():
            raise OSError("no such disk")
        board.end()
        return 0.0

    monkeypatch.setattr(dashboard_board, "_MONEY_S", 0.0)
    thread = threading.Thread(target=board._go_on, args=("board", tick))
    thread.start()
    assert was_tried.wait(30)
    until(lambda: "no such disk" in str(sections(board).get("failure board")))
    is_fixed.set()
    thread.join(30)
    assert sections(board)["failure board"] == ""


@pytest.mark.slow
def test_over_a_socket_the_page_of_a_run_grows_as_it_trains(board: Board, home: Home) -> None:
    from tests.web.test_dashboard_live import parts_of

    folder = train_here(home.path)
    with at_work(folder), served(board, board.end) as client, client.stream("GET", f"/api/runs/{HERE}/live") as live:
        parts = (part for part in parts_of(live) if part["section"] == "points")
        assert len(next(parts)["items"]) == 7
        add(folder, file_names.METRICS, step(7, 0.25))
        part = next(parts)
        assert (part["is_new"], part["items"][0][1], part["items"][0][4]) == (False, 7, 0.25)
