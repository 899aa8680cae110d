from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from homing.cli import main as cli
from homing.units import parse_bytes
from homing.wire.codec import dumps
from homing.wire.shard_manifest import DataManifest, Shard, SourceFile, Split

RUN = """\
name: base
model: {layers: 2, width: 64, heads: 2, context: 32}
phases: [{steps: 100, batch_tokens: 256}]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def homing(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["homing", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def put_data(folder: Path, vocab_size: int = 300) -> Path:
    place = folder / "data" / "base"
    place.mkdir(parents=True)
    tokenizer = json.dumps({"model": {"vocab": {f"t{n}": n for n in range(vocab_size)}}}).encode()
    (place / "tokenizer.json").write_bytes(tokenizer)
    splits = {}
    for split, count in (("train", 5000), ("val", 500)):
        tokens = b"".join((n % vocab_size).to_bytes(2, "little") for n in range(count))
        index = (0).to_bytes(8, "little") + count.to_bytes(8, "little")
        (place / f"{split}-00000.bin").write_bytes(tokens)
        (place / f"{split}-00000.idx").write_bytes(index)
        hashes = (hashlib.sha256(tokens).hexdigest(), hashlib.sha256(index).hexdigest())
        splits[split] = Split(
            count, 1, 4 * count, [Shard(f"{split}-00000.bin", f"{split}-00000.idx", count, 1, len(tokens), *hashes)]
        )
    manifest = DataManifest(
        "uint16",
        vocab_size,
        hashlib.sha256(tokenizer).hexdigest(),
        ["<|endoftext|>"],
        splits,
        [SourceFile("a", 1, "")],
        "",
    )
    (place / "manifest.json").write_text(dumps(manifest))
    return place


@pytest.mark.acceptance("X3")
def test_without_data_it_shows_sizes_memory_and_the_next_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "verify", "--no-run") == 0
    said = capsys.readouterr()
    for words in ("embedding", "feed-forward", "GB and up), 8 rows at a time"):
        assert words in said.out
    assert "RTX4090" not in said.out, "a small model fits everywhere: no table of nothing but yes"
    assert "FLOPs per token" in said.err
    assert "homing prep base" in said.err


@pytest.mark.acceptance("X3")
@pytest.mark.parametrize("argv", [["-v"], ["--set", "model.depth=40", "--set", "model.layers=40"]])
def test_the_cards_are_a_table_where_one_does_not_fit_or_with_v(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    homing(monkeypatch, "verify", "--no-run", *argv)
    said = capsys.readouterr().out
    for words in ("rows at a time", "H100", "RTX4090"):
        assert words in said


def test_state_in_the_hosts_memory_is_counted_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "verify", "--no-run", "--json") == 0
    near = json.loads(capsys.readouterr().out)["memory"]
    assert homing(monkeypatch, "verify", "--no-run", "--json", "--set", "phases.0.offload=optimizer") == 0
    said = capsys.readouterr()
    far = json.loads(said.out)["memory"]
    assert (near["host"], near["host_needed"]) == (0, 0)
    assert (far["optimizer"], far["host"]) == (0, near["optimizer"])
    assert far["host_needed"] > far["host"]
    assert "Host memory:" in said.err


def test_it_needs_no_torch_without_the_step(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['homing', 'verify', '--no-run', '-q']\n"
        "from homing.cli import main as m\n"
        "try: m.main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print('LOADED', [x for x in ('torch', 'numpy', 'tokenizers', 'homing.lm') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert "LOADED []" in done.stdout


def test_what_launch_refuses_is_said_in_its_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_data(folder)
    changes = ["--set", "phases.0.steps=9000", "--set", "tokenizer.vocab_size=300"]
    assert homing(monkeypatch, "verify", "base", "--no-run", *changes) == 0
    said = capsys.readouterr().err
    assert "warning: `homing launch` refuses this run. Phase pretrain would read its text 461 times" in said
    assert "`homing launch` refuses this run; see above." in said
    assert "Next:" not in said
    assert homing(monkeypatch, "verify", "base", "--no-run", "--json", *changes) == 0
    assert [each["kind"] for each in json.loads(capsys.readouterr().out)["refused"]] == ["many-passes"]


@pytest.mark.acceptance(9, 21, 25)
def test_every_missing_and_empty_file_is_listed_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    place = put_data(folder)
    assert homing(monkeypatch, "verify", "--no-run") == 0
    said = capsys.readouterr().err
    assert "300 in runs/base.yaml, 300 in" in said
    assert "homing plan base" in said
    (place / "train-00000.bin").unlink()
    (place / "val-00000.idx").write_bytes(b"")
    (place / "val-00000.bin").write_bytes(b"12")
    assert homing(monkeypatch, "verify", "--no-run") == 2
    said = capsys.readouterr().err
    for words in (
        "train-00000.bin is missing",
        "val-00000.idx is empty",
        "val-00000.bin has 2 bytes",
        "homing prep base",
    ):
        assert words in said


@pytest.mark.acceptance(30)
def test_verify_uses_shards_of_another_folder_and_names_unlisted_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    place = put_data(folder).rename(folder / "brought")
    own = ("verify", "--no-run", "--set", f"data.dir={place}")
    assert homing(monkeypatch, *own) == 0
    said = capsys.readouterr().err
    assert "2 shards: complete." in said
    assert "warning: training ignores" not in said
    for name in ("train-00007.bin", "train-00007.idx", "more.bin", "val-9.bin"):
        (place / name).write_bytes(b"1234")
    (place / "notes.txt").write_text("no shard")
    assert homing(monkeypatch, *own) == 0
    said = capsys.readouterr().err
    assert f"training ignores more.bin, train-00007.bin, train-00007.idx and 1 more in {place}" in said
    assert homing(monkeypatch, *own, "--json") == 0
    listed = ["more.bin", "train-00007.bin", "train-00007.idx", "val-9.bin"]
    assert json.loads(capsys.readouterr().out)["data"]["unlisted"] == listed


@pytest.mark.acceptance(25)
def test_hashes_are_checked_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    place = put_data(folder)
    assert homing(monkeypatch, "verify", "--no-run", "--hash") == 0
    raw = bytearray((place / "train-00000.bin").read_bytes())
    raw[77] ^= 1
    (place / "train-00000.bin").write_bytes(raw)
    assert homing(monkeypatch, "verify", "--no-run") == 0
    assert homing(monkeypatch, "verify", "--no-run", "--hash") == 2
    assert "train-00000.bin has changed" in capsys.readouterr().err


@pytest.mark.acceptance(6)
def test_a_vocabulary_that_does_not_match_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    put_data(folder)
    assert homing(monkeypatch, "verify", "--no-run", "--set", "tokenizer.vocab_size=999") == 2
    said = capsys.readouterr().err
    for words in ("vocab_size mismatch", "999", "300", "runs/base.yaml", "data/base/tokenizer.json"):
        assert words in said


@pytest.mark.acceptance(6)
def test_a_tokenizer_that_was_exchanged_is_found_without_hashing_the_shards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    place = put_data(folder)
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"x{n}": n for n in range(299)}}}))
    assert homing(monkeypatch, "verify", "--no-run") == 2
    said = capsys.readouterr().err
    assert "vocab_size mismatch: 300 in runs/base.yaml, 299 in" in said
    assert "tokenizer.json has changed" in said
    (place / "tokenizer.json").write_text("{}")
    assert homing(monkeypatch, "verify", "--no-run") == 2
    assert "is not a supported tokenizer" in capsys.readouterr().err


def test_what_to_do_next_names_the_file_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "runs" / "base.yaml").write_text(RUN.replace("name: base", "name: a-smoke"))
    assert homing(monkeypatch, "verify", "--no-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["next"] == "homing prep base"


@pytest.mark.acceptance(7)
def test_a_chosen_card_that_is_too_small_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    big = ("--set", "model.depth=40", "--set", "phases.0.tokens=1B", "--set", "phases.0.batch_tokens=2048")
    assert homing(monkeypatch, "verify", "--no-run", "--set", "cloud.gpu=T4", *big) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.acceptance(8)
def test_a_precision_that_the_chosen_card_lacks_is_a_problem_with_one_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "verify", "--no-run", "--set", "cloud.gpu=T4", "--set", "train.precision=bf16") == 2
    said = capsys.readouterr().err
    assert "cloud.gpu is T4, and it cannot train in this precision." in said
    assert "the GPU has no bf16, use auto or fp32" in said
    assert "does not fit in its memory" not in said


@pytest.mark.acceptance(7, 54)
def test_the_2b_preset_on_24_gb_is_refused_with_need_room_and_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "a.txt").write_text("some text\n" * 400)
    assert homing(monkeypatch, "new", "big", "--from", "2b", "--text", "a.txt") == 0
    assert homing(monkeypatch, "verify", "big", "--no-run", "--set", "cloud.gpu=RTX4090") == 2
    pattern = r"RTX4090, and training does not fit in its memory: (.+) needed, (.+) available\. Lower (.+)\."
    said = re.search(pattern, capsys.readouterr().err)
    assert said
    assert parse_bytes(said[1].replace(" ", "")) > 40e9
    assert 20e9 < parse_bytes(said[2].replace(" ", "")) < 24 * 2**30
    assert said[3].startswith("phases.0.recompute to all")
    assert homing(monkeypatch, "verify", "big", "--no-run", "--set", "cloud.gpu=A100") == 0, "80 GB hold it"


def test_json_is_one_document_also_with_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    place = put_data(folder)
    assert homing(monkeypatch, "verify", "--no-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "homing.verify/1"
    assert document["num_params"] == sum(part["num_params"] for part in document["parameters"])
    assert document["phases"][0]["num_epochs"] == pytest.approx(25600 / 5000)
    assert document["problems"] == []
    (place / "train-00000.bin").unlink()
    assert homing(monkeypatch, "verify", "--no-run", "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert len(document["problems"]) == 1


def test_smoke_is_verified_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "verify", "--no-run", "--smoke", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == "base-smoke"
    assert document["next"] == "homing prep base --smoke"


def test_what_was_changed_for_this_verb_is_changed_for_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "verify", "--no-run", "--json", "--set", "data.text=[a b.txt]") == 0
    assert json.loads(capsys.readouterr().out)["next"] == "homing prep base --set 'data.text=[a b.txt]'"


def test_the_real_step_agrees_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert (
        homing(monkeypatch, "verify", "--set", "tokenizer.vocab_size=300", "--set", "train.device=cpu", "--json") == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["step"]["num_params"] == document["num_params"]
    assert document["step"]["loss"] == pytest.approx(document["step"]["expected_loss"], abs=0.75)
