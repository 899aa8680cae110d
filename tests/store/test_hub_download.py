"""Open weights from the Hub to a machine: whole and right, or absent, and never with a token."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.doubles import hub as hub_double
from tests.doubles.hub import Commit, File, Hub
from tests.doubles.s3_servers import free_port

from homing.store.hub_download import PATIENCE_S, HubFailed, take_from_hub
from homing.wire.boot_json import Input
from homing.world import HttpResponse, NetworkError, PathLike, World

WEIGHTS = random.Random(0).randbytes(3_000_000)
COMMIT = "c" * 40


class Quick(World):
    """Its pauses cost no time, and are counted."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return super().monotonic() + sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_double.running() as running:
        files = {"model.safetensors": File(WEIGHTS, is_lfs=True)}
        running.add("them/model", is_private=False).commits.append(Commit(COMMIT, "weights", files))
        yield running


@pytest.fixture
def item(hub: Hub) -> Input:
    url = f"{hub.endpoint}/them/model/resolve/{COMMIT}/model.safetensors"
    return Input("", "data/base/model.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest(), url=url)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def take(item: Input, path: Path, world: World | None = None) -> list[str]:
    messages: list[str] = []
    take_from_hub(item, str(path), world or Quick(), lambda kind, text: messages.append(f"{kind} {text}"))
    return messages


def bodies(hub: Hub) -> list[str]:
    """The ranges that were asked of the place where the bytes lie."""
    return [wanted for method, where, _, wanted in hub.seen if method == "GET" and where.startswith("/cdn/")]


def test_it_comes_whole_and_no_token_is_shown_to_anybody(
    hub: Hub, item: Input, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub_double.WRITE)  # of a store on the Hub; these weights need none
    take(item, path)
    assert path.read_bytes() == WEIGHTS
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert [token for _, _, token, _ in hub.seen] == ["", ""]


def test_a_line_that_breaks_is_taken_up_where_it_broke(hub: Hub, item: Input, path: Path) -> None:
    hub.cuts = [("/cdn/", 1_000_000), ("/cdn/", 500_000)]
    messages = take(item, path)
    assert path.read_bytes() == WEIGHTS
    assert bodies(hub) == ["", "bytes=1000000-", "bytes=1500000-"]
    assert "the connection dropped after 1,000,000 of 3,000,000 bytes" in messages[0]


def test_another_process_resumes_a_partial_download(hub: Hub, item: Input, path: Path) -> None:
    path.with_name(f"{path.name}.part").write_bytes(WEIGHTS[:2_000_000])
    take(item, path)
    assert path.read_bytes() == WEIGHTS
    assert bodies(hub) == ["bytes=2000000-"]


def test_a_beginning_that_was_wrong_is_thrown_away_and_all_of_it_asked_for(hub: Hub, item: Input, path: Path) -> None:
    path.with_name(f"{path.name}.part").write_bytes(b"x" * 2_000_000)
    messages = take(item, path)
    assert path.read_bytes() == WEIGHTS
    assert bodies(hub) == ["bytes=2000000-", ""]
    assert "sha256" in messages[0]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_is_asked_again_later_and_later(hub: Hub, item: Input, path: Path, status: int) -> None:
    world = Quick()
    hub.failures = [("/resolve/", status)] * 3
    messages = take(item, path, world)
    assert path.read_bytes() == WEIGHTS
    assert world.pauses == [1.0, 2.0, 4.0]
    assert messages[0] == f"input_retried {item.path}: HTTP {status}; retrying.", "which is no progress"


def test_the_retry_after_header_of_the_hub_is_respected(
    hub: Hub, item: Input, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, real = Quick(), hub.route

    def too_many(*args: object) -> tuple[int, dict[str, str], bytes]:
        monkeypatch.setattr(hub, "route", real)
        return 429, {"Retry-After": "37"}, b""

    monkeypatch.setattr(hub, "route", too_many)
    take(item, path, world)
    assert world.pauses == [37.0]


@pytest.mark.parametrize("status", [429, 503])
def test_one_that_stays_in_trouble_is_given_up_inside_the_patience(
    hub: Hub, item: Input, path: Path, status: int
) -> None:
    world = Quick()
    hub.failures = [("/resolve/", status)] * 1000
    with pytest.raises(HubFailed) as caught:
        take(item, path, world)
    assert item.path in caught.value.what
    assert f"HTTP {status}" in caught.value.why
    assert sum(world.pauses) == pytest.approx(PATIENCE_S, abs=1)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_cannot_get_better_ends_at_once(hub: Hub, item: Input, path: Path, status: int) -> None:
    world = Quick()
    hub.failures = [("/resolve/", status)]
    with pytest.raises(HubFailed, match=r"model\.safetensors could not be downloaded from the Hub") as caught:
        take(item, path, world)
    assert f"{item.url}: HTTP {status}" in caught.value.why
    assert world.pauses == []


def test_wrong_bytes_are_never_left_behind(hub: Hub, item: Input, path: Path) -> None:
    hub.spoiled = ["/cdn/"]
    with pytest.raises(HubFailed) as caught:
        take(item, path)
    assert item.sha256 in caught.value.why
    assert list(path.parent.iterdir()) == []
    assert bodies(hub) == ["", ""], "once more, for it may have been the way"


def test_a_mirror_that_always_breaks_off_and_always_begins_anew_is_given_up(item: Input, path: Path) -> None:
    """Each try brings bytes, none brings it further: without an end it would download until the limit is spent."""

    class Mirror(Quick):
        tries = 0

        def download(
            self, url: str, path: PathLike, max_bytes: int, take: Callable[[bytes], None], timeout_s: float = 60.0
        ) -> HttpResponse:
            self.tries += 1
            assert self.tries < 10_000, "for ever"
            self.sleep(30.0)
            if self.exists(path):
                return HttpResponse(200, {}, b"")
            self.write(path, WEIGHTS[:2_000_000])
            take(WEIGHTS[:2_000_000])
            raise NetworkError("the connection dropped")

    world = Mirror()
    with pytest.raises(HubFailed) as caught:
        take(item, path, world)
    assert "no new bytes" in caught.value.why
    assert sum(world.pauses) < 2 * PATIENCE_S


def test_more_than_was_listed_is_not_taken(hub: Hub, item: Input, path: Path) -> None:
    hub.add("them/model").commits[-1].files["model.safetensors"].data += b"more"
    with pytest.raises(HubFailed, match="could not be downloaded") as caught:
        take(item, path)
    assert "more than the 3,000,000 bytes" in caught.value.why
    assert list(path.parent.iterdir()) == []


def test_a_hub_that_is_not_there_is_a_failure_that_says_so(item: Input, path: Path) -> None:
    closed = Input("", item.path, item.num_bytes, item.sha256, url=f"http://127.0.0.1:{free_port()}/x")
    with pytest.raises(HubFailed) as caught:
        take(closed, path)
    assert "refused" in caught.value.why


def test_a_slow_line_says_now_and_then_how_far_it_is(hub: Hub, item: Input, path: Path) -> None:
    class Slow(Quick):
        def monotonic(self) -> float:
            self.pauses.append(20.0)
            return super().monotonic()

    messages = take(item, path, Slow())
    assert messages
    assert all(line.startswith("input_fetching ") and line.endswith("downloaded.") for line in messages)
