"""`homing doctor`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.control_rig import Homing, lay_out, typing

from homing.world import Retries


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Homing:
    lay_out(tmp_path, monkeypatch, steps=1, step_s=0.0)
    # The real one loads torch, which takes seconds; that path is walked once, below.
    quick = '{"version": "2.13.0", "cuda": null, "cards": 0}'
    monkeypatch.setattr("homing.doctor.computer._TORCH", f"print({quick!r})  # torch")
    for name in ("HF_TOKEN", "RUNPOD_API_KEY", "SHADEFORM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return typing(capsys, monkeypatch)


def test_a_healthy_home_says_so_in_two_lines_and_creates_nothing(cli: Homing, homing_home: Path) -> None:
    said = cli("doctor")
    assert said.code == 0, said.out
    assert said.out == ""
    assert "0 faults" in said.err
    assert not homing_home.exists()


def test_doctor_on_a_terminal_prints_each_finding_as_it_comes(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[str]()
    real = sys.stderr

    class Terminal:
        def write(self, text: str) -> int:
            seen.append(capsys.readouterr().out + text)  # with what stdout had until then
            return len(text)

        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "isatty" else getattr(real, name)

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("homing.doctor.computer._LEAST_DISK_BYTES", 1 << 80)
    cli("doctor", "--provider", "shadeform", "--provider", "local")
    output = "".join(seen)
    wanted = ("Checking torch", "Checking the disk", "fault    disk.free", "Checking shadeform, local (at most 45 s)")
    assert [output.index(each) for each in wanted] == sorted(output.index(each) for each in wanted)
    before_the_finding = output.partition("fault    disk.free")[0].rpartition("Checking the disk")[2]
    assert "\x1b[2K" in before_the_finding, "the bar is erased before the finding"
    assert re.search(r"Checking (shadeform|local) \(at most", output), "who has answered is waited for no more"
    assert output.endswith("run again: homing doctor --provider shadeform --provider local\n")


def test_off_a_terminal_nothing_is_said_of_what_is_asked(cli: Homing) -> None:
    assert "Checking" not in cli("doctor").err


@pytest.mark.acceptance(11)
def test_all_shows_what_is_well_and_json_has_every_check(cli: Homing) -> None:
    said = cli("doctor", "--all")
    assert "python.version" in said.out
    assert "ssh.client" in said.out
    document = cli("doctor", "--json").json
    assert document["schema"] == "homing.doctor/1"
    assert len(document["checks"]) >= 20
    assert document["num_faults"] == 0


@pytest.mark.acceptance(113)
def test_a_fault_exits_1_with_its_fix_and_its_page(cli: Homing) -> None:
    said = cli("doctor", "--provider", "shadeform")
    assert said.code == 1
    assert "fault    shadeform.key" in said.out
    assert "export SHADEFORM_API_KEY=" in said.out
    assert "https://platform.shadeform.ai" in said.out


def test_a_run_is_looked_at_as_it_is_written_also_when_it_does_not_resolve(cli: Homing) -> None:
    assert cli("doctor", "moss", "--json").json["num_faults"] == 0
    path = Path("runs/moss.yaml")
    path.write_text(path.read_text() + "store: s3://YOUR_BUCKET/moss\n")
    said = cli("doctor", "moss", "--json")
    found = {check["name"]: check for check in said.json["checks"] if check["state"] == "fault"}
    assert "YOUR_BUCKET" in found["run.placeholders"]["text"]
    assert "line 9" in found["run.placeholders"]["text"]


def test_keys_are_never_printed(cli: Homing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", " YOUR_secret_canary ")
    monkeypatch.setenv("RUNPOD_API_URL", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setattr("homing.cloud.providers.rest.RETRIES", Retries(tries=4, first_s=0.01, longest_s=60.0))
    said = cli("doctor", "--all")
    assert "RUNPOD_API_KEY" in said.out
    assert "secret_canary" not in said.out + said.err
    assert "secret_canary" not in json.dumps(cli("doctor", "--json").json)


@pytest.mark.slow
def test_the_real_questions_are_answered_by_the_real_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checks = typing(capsys, monkeypatch)("doctor", "--json").json["checks"]
    texts = {check["name"]: check["text"] for check in checks}
    assert texts["torch.loads"].startswith("torch 2.")
    assert texts["packages.lm"].endswith("all in the supported range.")


def test_its_fixes_name_the_run_as_it_was_named(cli: Homing) -> None:
    Path("fern.yaml").write_text(Path("runs/moss.yaml").read_text())
    said = cli("doctor", "fern.yaml", "--all", "--set", "data.dir=data/none")
    assert "homing prep fern.yaml --set data.dir=data/none" in said.out
    assert "homing plan fern.yaml --set data.dir=data/none" in said.out
    assert "homing plan fern.yaml --set data.dir=data/none" in said.err
