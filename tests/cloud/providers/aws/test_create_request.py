"""The shell part of an EC2 instance's first script, run for real: the system's timer, and the persistent disk."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.instance.agent.test_watchdog import make_boot

import homing.wire.guard_timing
from homing.cloud.providers.aws.create_request import client_token, ends_in_s, prepare_text, user_data
from homing.errors import CreateFailed
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot
from homing.wire.control_files import Request, boot_clock_s
from homing.world import World

_PRELUDE = """
now() { local up; read -r up _ </proc/uptime && NOW=${up%%.*}; }
say() { echo "$*"; }
stuck() { echo "stuck: $*"; exit 3; }
ROOT=@ROOT@ WORK=@ROOT@/work
"""


class Box:
    """A folder with the disks and programs that the script finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "by-id", "root/cache", "root/work/run"):
            (folder / name).mkdir(parents=True)
        self._program("shutdown", f'echo "$*" >>{folder}/shutdowns\n')
        self._program("mount", f'echo "$*" >>{folder}/mounts\n')

    def run(self, boot: Boot, *, has_volume: bool, skew_s: float = 0.0) -> tuple[int, str]:
        text = _PRELUDE + prepare_text(boot, has_volume=has_volume, skew_s=skew_s)
        text = text.replace("@ROOT@", str(self.folder / "root"))
        text = text.replace("/dev/disk/by-id/", f"{self.folder}/by-id/").replace("FOLLOW_S=60", "FOLLOW_S=0.2")
        text = text.replace("VOLUME_WAIT_S=300", "VOLUME_WAIT_S=2").replace("/dev/xvdf", f"{self.folder}/none")
        env = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        with (self.folder / "said").open("wb") as out:
            self.process = subprocess.Popen(["bash", "-c", text], env=env, stdout=out, start_new_session=True)
        return self.process.wait(timeout=60), (self.folder / "said").read_text()

    def close(self) -> None:
        """What it left in the background, as a machine that goes would."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def disk(self, name: str = "nvme-Amazon_Elastic_Block_Store_vol0123") -> Path:
        path = self.folder / "disk.img"
        with path.open("wb") as file:
            file.truncate(32 << 20)
        (self.folder / "by-id" / name).symlink_to(path)
        return path

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)


@pytest.fixture
def box(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Box(tmp_path / "box")
    yield made
    made.close()


def boot_of(**changes: object) -> Boot:
    messages = {"started_at": time.time(), "rate_usd_per_hour": "1.00", "spend_limit_usd": "2.00", "time_limit_s": 0.0}
    return make_boot(**{**messages, **changes})


@pytest.mark.acceptance(122)
def test_the_system_shuts_down_inside_the_limit(box: Box) -> None:
    boot = boot_of()
    assert box.run(boot, has_volume=False)[0] == 0
    (words,) = box.lines("shutdowns")
    minutes = int(words.split()[1].lstrip("+"))
    assert ends_in_s(boot) / 60 - 2 <= minutes <= ends_in_s(boot) / 60 < 120


def test_a_clock_that_is_behind_gives_it_no_more_time_and_one_that_is_ahead_a_minute(box: Box) -> None:
    boot = boot_of(started_at=time.time() + 86400)
    box.run(boot, has_volume=False)
    assert box.lines("shutdowns")[0].split()[1] == f"+{int(ends_in_s(boot) // 60)}"
    box.close()
    box.run(boot_of(started_at=time.time() - 86400), has_volume=False)
    assert box.lines("shutdowns")[-1].split()[1] == "+1"


def bring_agent(box: Box, boot: Boot, age_s: float) -> Path:
    """The work folder, as an agent has left it that knows how long the machine has billed."""
    work = box.folder / "root/work"
    package = Path(homing.wire.guard_timing.__file__).parents[2]
    (work / "agent.zip").symlink_to(package)  # a folder is imported from as the zip is
    (work / file_names.BOOT).write_text(codec.dumps(boot))
    (work / file_names.CLOCK).write_text(f"{age_s} {boot_clock_s()} {boot.started_at} {World().boot_id()}")
    return work


def minutes_until(box: Box, num_armed: int) -> list[int]:
    """What the timer was set to, each time, when it has been set so often."""
    deadline = time.monotonic() + 30
    while len(box.lines("shutdowns")) < num_armed and time.monotonic() < deadline:
        time.sleep(0.1)
    return [int(words.split()[1].lstrip("+")) for words in box.lines("shutdowns")]


@pytest.mark.slow
@pytest.mark.parametrize("skew_s", [0.0, -1000.0, 1000.0])
def test_the_timer_follows_a_limit_that_was_raised_also_where_home_has_another_clock(box: Box, skew_s: float) -> None:
    boot = boot_of(started_at=time.time() - skew_s)
    work = bring_agent(box, boot, age_s=0.0)
    box.run(boot, has_volume=False, skew_s=skew_s)
    time.sleep(1.0)
    assert len(box.lines("shutdowns")) == 1, "nothing was changed yet"
    messages = Request(1, False, "", "4.00", 0.0)
    (work / "run" / file_names.LIMITS).write_text(codec.dumps(messages))
    first, second = minutes_until(box, 2)
    assert ends_in_s(boot) / 60 - 2 <= first <= ends_in_s(boot) / 60
    raised = ends_in_s(dataclasses.replace(boot, spend_limit_usd="4.00"))
    assert raised / 60 - 2 <= second <= raised / 60


@pytest.mark.slow
@pytest.mark.parametrize("set_s", [18000.0, -18000.0])
def test_the_timer_goes_by_the_boot_clock_once_the_agent_knows_how_long_it_has_billed(box: Box, set_s: float) -> None:
    """A clock of the machine that was hours off at its start, and ten minutes of boot before the first script."""
    boot = boot_of(started_at=time.time() - set_s)
    bring_agent(box, boot, age_s=600.0)
    box.run(boot, has_volume=False)
    last = minutes_until(box, 2)[-1]
    assert ends_in_s(boot) / 60 - 12 <= last <= ends_in_s(boot) / 60 - 10
    time.sleep(1.0)
    assert len(box.lines("shutdowns")) == 2


@pytest.mark.slow
def test_a_timer_that_moved_with_the_time_of_day_is_set_again(box: Box) -> None:
    """`shutdown -h +N` waits for a time of day."""
    boot = boot_of()
    bring_agent(box, boot, age_s=0.0)
    (box.folder / "set_s").write_text("0")
    box._program("date", f'echo $(($(/bin/date "$@") - $(cat {box.folder}/set_s)))\n')
    box.run(boot, has_volume=False)
    time.sleep(1.0)
    assert len(box.lines("shutdowns")) == 1
    (box.folder / "set_s").write_text("3600")
    first, second = minutes_until(box, 2)
    assert first - 1 <= second <= first
    time.sleep(1.0)
    assert len(box.lines("shutdowns")) == 2, "once"


@pytest.mark.slow
def test_in_its_last_minute_it_is_not_put_off(box: Box) -> None:
    boot = boot_of(started_at=time.time() - 86400)
    bring_agent(box, boot, age_s=ends_in_s(boot) - 20.0)
    box.run(boot, has_volume=False)
    time.sleep(2.0)
    assert minutes_until(box, 1) == [1]


def test_a_clock_difference_below_the_precision_of_a_date_header_is_ignored() -> None:
    assert prepare_text(boot_of(started_at=9e8), has_volume=False, skew_s=-1.4) == prepare_text(
        boot_of(started_at=9e8), has_volume=False
    )


def test_without_a_limit_there_is_no_timer(box: Box) -> None:
    box.run(boot_of(spend_limit_usd=None), has_volume=False)
    assert box.lines("shutdowns") == []


def test_a_new_disk_is_formatted_once_and_one_of_ours_never_again(box: Box) -> None:
    disk = box.disk()
    code, said = box.run(boot_of(), has_volume=True)
    assert (code, "formatting the new volume" in said) == (0, True)
    assert box.lines("mounts") == [f"{disk} {box.folder}/root/cache"]
    box.close()
    code, said = box.run(boot_of(), has_volume=True)
    assert (code, "formatting" in said) == (0, False)
    assert len(box.lines("mounts")) == 2


def test_a_disk_with_anything_else_on_it_is_left_alone(box: Box) -> None:
    disk = box.disk()
    disk.write_bytes(b"notes of the user\n" * 1000)
    code, said = box.run(boot_of(), has_volume=True)
    assert (code, "holds something that is no file system of ours" in said) == (3, True)
    assert disk.read_bytes().startswith(b"notes of the user")
    assert box.lines("mounts") == []


@pytest.mark.slow
def test_the_disk_that_the_system_runs_from_is_never_taken(box: Box) -> None:
    box.disk()
    (box.folder / "by-id/nvme-Amazon_Elastic_Block_Store_vol0123-part1").touch()
    code, said = box.run(boot_of(), has_volume=True)
    assert (code, "did not appear" in said) == (3, True)


def test_user_data_that_is_too_long_is_packed_and_what_is_longer_still_is_refused() -> None:
    assert user_data("short") == b"short"
    assert user_data("long" * 10_000)[:2] == b"\x1f\x8b"
    with pytest.raises(CreateFailed, match="too long"):
        user_data(os.urandom(40_000).hex())


def test_a_token_is_the_same_for_the_same_try_and_fits_into_sixty_four_characters() -> None:
    assert client_token("m", "us-east-1a") == client_token("m", "us-east-1a") != client_token("m", "us-east-1b")
    assert len(client_token("m", "us-east-1a")) == 64


def test_the_nearer_limit_counts() -> None:
    boot = boot_of(time_limit_s=3600.0)
    assert ends_in_s(boot) < 3600
    assert ends_in_s(dataclasses.replace(boot, time_limit_s=0.0)) > 3600
