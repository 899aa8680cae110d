"""A follower sends every line once, survives any error, and delays no run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.conftest import end, metric, write

from homing.errors import MissingExtra, UsageError
from homing.pip_command import pip_install
from homing.trackers.follower import Follower, Following, StoreSource, is_following, start
from homing.trackers.sinks import What, check_tracker, check_uri, mode_of, values_of
from homing.wire.event_lines import Metric
from homing.world import World

Make = Callable[[str], Follower]


class Notebook:
    """A sink that records what it gets; it can be made to fail."""

    def __init__(self, what: What) -> None:
        self.messages: list[Any] = []

    def log(self, metric: Metric) -> None:
        self.messages.append(metric.step)

    def rewind(self, metric: Metric) -> None:
        self.messages.append(f"back to {metric.step}")

    def flush(self) -> None:
        pass

    def close(self, state: str) -> None:
        self.messages.append(state)


def with_notebook(follower: Follower) -> tuple[Follower, Notebook]:
    book = Notebook(follower.what)
    follower.open_ = lambda name, what: book
    return follower, book


def test_each_line_is_sent_once_even_after_a_restart(follower: Make, run_dir: Path) -> None:
    first, book = with_notebook(follower("tensorboard"))
    assert first.catch_up()
    assert book.messages == []
    write(run_dir, metric(1), metric(2), torn='{"t": 3')
    assert first.catch_up()
    assert first.catch_up()
    assert book.messages == [1, 2]
    second, other = with_notebook(follower("tensorboard"))
    write(run_dir, metric(1), metric(2), metric(3))
    assert second.catch_up()
    assert other.messages == [3]


def test_after_a_fall_back_the_sink_is_rewound_to_where_the_lines_differ(follower: Make, run_dir: Path) -> None:
    each, book = with_notebook(follower("tensorboard"))
    write(run_dir, metric(1), metric(2), metric(3), metric(4))
    each.catch_up()
    write(run_dir, metric(1), metric(2), metric(3, loss=9.0))
    each.catch_up()
    assert book.messages == [1, 2, 3, 4, "back to 3", 3]
    write(run_dir, metric(1), metric(2))  # cut, and nothing new yet
    each.catch_up()
    write(run_dir, metric(1), metric(2), metric(3, loss=7.0))
    each.catch_up()
    assert book.messages[-1] == 3


def test_a_line_that_cannot_be_read_is_passed_over(follower: Make, run_dir: Path) -> None:
    each, book = with_notebook(follower("tensorboard"))
    write(run_dir, metric(1), torn="{half\n")
    assert each.catch_up()
    assert each.catch_up()
    assert book.messages == [1]


def test_lines_refused_by_a_tracker_are_sent_again(follower: Make, run_dir: Path) -> None:
    each = follower("tensorboard")
    tries: list[int] = []

    def open_(name: str, what: What) -> Notebook:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("down")
        return book

    book = Notebook(each.what)
    each.open_ = open_
    write(run_dir, metric(1), metric(2))
    assert [each.catch_up() for _ in range(4)] == [False, False, False, True]
    assert book.messages == [1, 2]
    assert each.num_failed == 0


def test_the_follower_ends_when_the_run_ended_and_everything_is_sent(follower: Make, run_dir: Path) -> None:
    each, book = with_notebook(follower("tensorboard"))
    write(run_dir, metric(1))
    end(run_dir, "stopped")
    assert each.follow(every_s=0.01) == "stopped"
    assert book.messages == [1, "stopped"]


def test_a_run_that_falls_silent_is_left_after_a_day(follower: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homing.trackers.follower.SILENT_S", 0.05)
    assert follower("tensorboard").follow(every_s=0.01) == ""


def test_metrics_in_a_store_are_followed_too(follower: Make, tmp_path: Path) -> None:
    each, book = with_notebook(follower("tensorboard"))
    (tmp_path / "store").mkdir()
    each.source = StoreSource(f"file:{tmp_path}/store", "moss-1", World())
    assert each.catch_up()
    write(tmp_path / "store/runs/moss-1", metric(1))
    assert each.catch_up()
    assert book.messages == [1]


def test_a_store_that_is_gone_is_tried_again(follower: Make, tmp_path: Path) -> None:
    each, book = with_notebook(follower("tensorboard"))
    each.source = StoreSource(f"file:{tmp_path}/none", "moss-1", World())
    assert not each.catch_up()
    write(tmp_path / "none/runs/moss-1", metric(1))
    assert each.catch_up()
    assert book.messages == [1]


def test_values_are_sent_by_name_and_missing_ones_are_left_out() -> None:
    assert values_of(metric(2, loss=2.5, mfu=0.41)) == {
        "num_steps": 20.0,
        "num_tokens": 128.0,
        "loss": 2.5,
        "mfu": 0.41,
    }
    assert values_of(metric(2, more={"reward": 0.75}))["reward"] == 0.75


def test_an_unknown_or_absent_tracker_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="Unknown tracker: 'comet'"):
        check_tracker("comet", verb="launch")
    monkeypatch.setattr("homing.trackers.sinks.find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        check_tracker("wandb", verb="launch")
    assert pip_install("trackers") in caught.value.fix


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "http://localhost", "file:///tmp/x", "sqlite:///x.db", ""])
def test_mlflow_on_loopback_or_in_a_folder_is_spoken_to(uri: str) -> None:
    check_uri(uri)


@pytest.mark.acceptance(116)
def test_mlflow_in_the_open_is_refused_with_the_tunnel_to_open() -> None:
    with pytest.raises(UsageError, match="only through a tunnel") as caught:
        check_uri("http://203.0.113.42:5000")
    assert "ssh -N -L 5000:127.0.0.1:5000 203.0.113.42" in caught.value.fix


@pytest.mark.acceptance("X4")
def test_wandb_is_offline_without_a_key() -> None:
    assert mode_of({}) == "offline"
    assert mode_of({"WANDB_API_KEY": "k"}) == "online"
    assert mode_of({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}) == "disabled"


def test_one_follower_per_run_and_tracker_and_no_secret_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-7Q")
    following = Following("tensorboard", "moss-1", "moss", str(tmp_path / "t"), str(tmp_path), run_dir=str(tmp_path))
    spawned: list[Any] = []

    class Quiet(World):
        def spawn(self, argv: Any, env: Any, cwd: Any, log: Any) -> int:
            spawned.append(list(argv))
            return 1

    assert start(following, Quiet())
    assert spawned[0][1:3] == ["-m", "homing.trackers"]
    assert "canary" not in (tmp_path / "t/tensorboard.order").read_text()
    assert json.loads((tmp_path / "t/tensorboard.order").read_text())["run_id"] == "moss-1"
    holder = World()
    assert holder.lock(following.path("lock"))
    assert is_following(following, Quiet())
    assert not start(following, Quiet())
