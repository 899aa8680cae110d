"""`homing data check` and `homing data show`, as a person types them, and the part of prep that makes chat shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.typed import Homing
from tests.lm.data.chat.kit import make_tokenizer

RUN_FILE = """\
data:
  text: [a.txt]
  val_fraction: 0.1
tokenizer:
  vocab_size: 300
model:
  layers: 2
  width: 32
  heads: 2
  context: 128
phases:
  - kind: pretrain
    steps: 4
    batch_tokens: 128
  - kind: sft
    data:
      chat: [{path: chats.jsonl, repeat: 2}]
    epochs: 2
    batch_tokens: 128
"""


def chat(*words: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(words)
    return [{"role": role, "content": text} for role, text in zip(roles, words, strict=False)]


def write(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture
def homing(homing: Homing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Homing:
    monkeypatch.delenv("NO_COLOR", raising=False)
    write(tmp_path / "chats.jsonl", [chat(f"hello {n}", f"well {n}") for n in range(20)])
    return homing


@pytest.fixture
def run(homing: Homing, tmp_path: Path) -> Path:
    lines = [f"Line {n}: the cat sat on the mat, and the {n % 7} hats were flat.\n" for n in range(60)]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(lines), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "joe.yaml").write_text(RUN_FILE, encoding="utf-8")
    return tmp_path


def test_a_sound_file_ends_with_0_and_the_next_verb(homing: Homing) -> None:
    code, out, err = homing("data", "check", "chats.jsonl")
    assert code == 0
    assert "chats.jsonl" in out
    assert "list" in out  # its form
    assert "Next: homing data show chats.jsonl" in err


@pytest.mark.acceptance(20)
def test_a_fault_ends_with_2_and_its_line(homing: Homing, tmp_path: Path) -> None:
    write(tmp_path / "bad.jsonl", [chat("a", "b"), [{"role": "robot", "content": "x"}], chat("a", "b")])
    code, out, err = homing("data", "check", "bad.jsonl")
    assert code == 2
    assert "bad.jsonl:2: skipped" in out
    assert "robot" in out
    assert "bad.jsonl:3: skipped: the same conversation as bad.jsonl:1" in out
    assert "Found 1 invalid line" in err
    code, out, _ = homing("data", "check", "bad.jsonl", "--json")
    (document,) = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert document["schema"] == "homing.data-check/1"
    assert [(f["line"], f["kind"]) for f in document["findings"]] == [(2, "unknown-role"), (3, "duplicate")]
    assert document["error"]["exit_code"] == 2


def test_what_prep_would_do_with_the_faults_is_said_of_these_files(homing: Homing, tmp_path: Path) -> None:
    robot = [{"role": "robot", "content": "x"}]
    write(tmp_path / "some.jsonl", [chat("a", "b"), chat("c", "d"), robot])
    assert "`homing prep` skips and counts them" in homing("data", "check", "some.jsonl")[2]
    write(tmp_path / "most.jsonl", [chat("a", "b"), robot, robot])
    assert (
        "`homing prep` stops at most.jsonl because of too many"
        in homing("data", "check", "some.jsonl", "most.jsonl")[2]
    )
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "`homing prep` stops at empty.jsonl" in homing("data", "check", "some.jsonl", "empty.jsonl")[2]
    (tmp_path / "plain.txt").write_text("once upon a time\n")
    _, _, err = homing("data", "check", "plain.txt")
    assert "plain.txt has an unknown format" in err
    assert '{"messages": [' in err


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("chats.csv", b"question,answer\nHi,Hello\n", "is a table"),
        (
            "chats.jsonl",
            '{"prompt": "Gr\u00fc\u00df", "completion": "a"}\n'.encode("latin1"),
            "iconv -f latin1 -t utf-8",
        ),
        ("chats.jsonl", '{"prompt": "a", "completion": "b"}\n'.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ("chats.jsonl", b'{"prompt": "a", "chosen": "b"}\n', "has an unknown format"),
    ],
)
def test_a_file_in_no_form_is_answered_by_what_it_is(
    homing: Homing, tmp_path: Path, name: str, content: bytes, fix: str
) -> None:
    (tmp_path / name).write_bytes(content)
    code, _, err = homing("data", "check", name)
    assert code == 2
    assert fix in err


def test_a_missing_file_is_fixed_on_this_verb_and_the_need_for_a_tokenizer_is_named(homing: Homing, run: Path) -> None:
    _, _, err = homing("data", "check", "absent.jsonl")
    assert "error: absent.jsonl does not exist." in err
    assert "homing data check PATH" in err
    _, _, err = homing("data", "check", "chats.jsonl")
    assert "Without a tokenizer (--tokenizer data/NAME), lengths and markers are not checked." in err
    make_tokenizer(run / "tok")
    assert "Without a tokenizer" not in homing("data", "check", "chats.jsonl", "--tokenizer", "tok")[2]


def test_several_files_are_looked_at_though_one_is_damaged(homing: Homing, tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    code, out, _ = homing("data", "check", "cut.jsonl.gz", "chats.jsonl", "--json")
    document = json.loads(out)
    assert code == 2
    assert [file["num_kept"] for file in document["files"]] == [0, 20]
    assert document["findings"][0]["action"] == "stops"


def test_leaks_are_found_between_named_files(homing: Homing, tmp_path: Path) -> None:
    write(tmp_path / "val.jsonl", [chat("Hello 3", "well 3")])
    code, out, _ = homing("data", "check", "chats.jsonl", "--validation", "val.jsonl")
    assert code == 2
    assert "chats.jsonl:4: skipped: also held out for validation, in val.jsonl:1" in out


def test_lengths_are_counted_by_the_tokenizer_that_is_named(homing: Homing, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tok")
    write(tmp_path / "long.jsonl", [chat("a", "b", "word " * 50, "c")])
    code, out, _ = homing("data", "check", "long.jsonl", "--tokenizer", "tok", "--context", "64")
    assert code == 0
    assert "long.jsonl:1: cut" in out
    code, _, err = homing("data", "check", "long.jsonl", "--context", "64")
    assert code == 2
    assert "--tokenizer" in err


@pytest.mark.acceptance(21)
@pytest.mark.parametrize("name", ["absent.jsonl", "absent/*.jsonl", "absent"])
def test_what_is_not_there_is_said_without_a_traceback(homing: Homing, name: str) -> None:
    for verb in ("check", "show"):
        code, _, err = homing("data", verb, name)
        assert code == 2
        assert name in err
        assert "Traceback" not in err


def test_show_prints_a_line_a_token_and_colours_on_demand(homing: Homing, tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tok")
    code, out, err = homing("data", "show", "chats.jsonl", "-n", "2", "--tokenizer", "tok")
    assert code == 0
    lines = [line.split(maxsplit=3) for line in out.splitlines()]
    learned = "".join(json.loads(text) for _, _, is_learned, text in lines if is_learned == "learned")
    read = "".join(json.loads(text) for _, _, is_learned, text in lines if is_learned == "-")
    assert learned == "well 1<|im_end|>"
    assert read == "<|endoftext|><|im_start|>user\nhello 1<|im_end|>\n<|im_start|>assistant\n"
    assert "chats.jsonl:2" in err
    _, colored, _ = homing("data", "show", "chats.jsonl", "-n", "2", "--tokenizer", "tok", "--color", "always")
    assert "\x1b[32mw" in colored
    assert "\x1b[2m\x1b[1m<|im_start|>" in colored
    _, out, _ = homing("data", "show", "chats.jsonl", "--tokenizer", "tok", "--json")
    document = json.loads(out)
    assert document["num_learned"] == sum(token["is_learned"] for token in document["tokens"])
    code, _, err = homing("data", "show", "chats.jsonl", "-n", "99", "--tokenizer", "tok")
    assert code == 2
    assert "has 20" in err


def test_prep_makes_text_and_chat_shards_and_check_and_show_accept_the_run(homing: Homing, run: Path) -> None:
    code, out, err = homing("data", "check", "joe")
    assert code == 0
    assert "lengths are not checked" in err
    code, out, _ = homing("prep", "joe", "--json")
    assert code == 0
    document = json.loads(out)
    (phase,) = document["own"]
    assert (phase["phase"], phase["kind"], phase["is_reused"]) == ("sft", "chat", False)
    assert phase["num_documents"] == 19
    assert phase["report"]["sources"][0]["copies"] == 2
    assert (run / "data" / "joe" / "sft" / "manifest.json").is_file()
    sft = next(each for each in document["phases"] if each["phase"] == "sft")
    assert sft["num_steps"] == 2 * phase["report"]["rows_per_epoch"]
    _, _, err = homing("prep", "joe")
    assert "sft: 19 conversations" in err
    assert "unchanged" in err
    assert "chats.jsonl: form" not in err, "notes of an earlier check are repeated with -v only"
    _, _, err = homing("prep", "joe", "-v")
    assert "chats.jsonl: format list, 20 lines, 20 kept" in err
    assert "2 times per epoch" in err
    _, _, err = homing("data", "show", "joe", "--number", "19")
    assert "That was the last conversation. Next: homing verify joe" in err
    code, out, err = homing("data", "show", "joe")
    assert code == 0
    assert "Next: homing data show joe --number 2" in err
    assert '"<|im_end|>"' in out.splitlines()[-1]
    assert "learned" in out.splitlines()[-1]
    code, out, _ = homing("data", "check", "joe", "--json")
    assert code == 0
    code, _, err = homing("data", "show", "joe", "--phase", "mid")
    assert code == 2
    assert "--phase sft" in err


def test_a_run_of_chat_alone_takes_the_tokenizer_of_what_it_begins_with(homing: Homing, run: Path) -> None:
    homing("prep", "joe")
    text = RUN_FILE[RUN_FILE.index("model:") : RUN_FILE.index("  - kind: pretrain")]
    sft = RUN_FILE[RUN_FILE.index("  - kind: sft") :]
    tokenizer = "tokenizer:\n  file: data/joe/tokenizer.json\n"
    (run / "runs" / "ann.yaml").write_text(tokenizer + text + sft, encoding="utf-8")
    code, out, err = homing("prep", "ann", "--json")
    assert code == 0, err
    assert json.loads(out)["own"][0]["phase"] == "sft"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "data" / "ann" / name).read_bytes()
    (run / "runs" / "eve.yaml").write_text(text + sft, encoding="utf-8")
    code, _, err = homing("prep", "eve")
    assert code == 2
    assert "tokenizer" in err


def test_data_check_reports_a_run_without_conversations(homing: Homing, run: Path) -> None:
    only = RUN_FILE[: RUN_FILE.index("  - kind: sft")]
    (run / "runs" / "tim.yaml").write_text(only, encoding="utf-8")
    code, _, err = homing("data", "check", "tim")
    assert code == 2
    assert "No phase of tim has conversations" in err


@pytest.mark.acceptance(21)
def test_conversations_that_are_not_there_stop_prep_with_the_key_that_names_them(homing: Homing, run: Path) -> None:
    (run / "chats.jsonl").rename(run / "talks.jsonl")
    for pattern in ("chats.jsonl", "chats/*.jsonl"):
        (run / "runs" / "joe.yaml").write_text(RUN_FILE.replace("path: chats.jsonl", f"path: '{pattern}'"))
        code, _, err = homing("prep", "joe")
        assert code == 2
        assert pattern in err
        assert "data.chat of the phase in the run file" in err
        assert "--chat" not in err, "no option of prep"


@pytest.mark.acceptance(33)
def test_a_file_in_a_store_is_brought_by_its_hash_and_a_missing_one_stops_it(homing: Homing, run: Path) -> None:
    (run / "store").mkdir()
    (run / "chats.jsonl").rename(run / "store" / "chats.jsonl")
    address = f"file:{run}/store/chats.jsonl"
    (run / "runs" / "joe.yaml").write_text(RUN_FILE.replace("path: chats.jsonl", f"path: '{address}'"))
    code, out, err = homing("prep", "joe", "--json")
    assert code == 0, err
    assert f"Fetched {address}" in err
    assert json.loads(out)["own"][0]["num_documents"] == 19
    code, out, err = homing("prep", "joe", "--json")
    assert "Fetched" not in err
    assert json.loads(out)["own"][0]["is_reused"]
    (run / "store" / "chats.jsonl").unlink()
    code, _, err = homing("prep", "joe")
    assert code == 7
    assert "chats.jsonl is not in" in err


def test_conversations_in_parquet_give_the_shards_of_the_same_lines(homing: Homing, run: Path) -> None:
    records = [
        {"messages": chat(f"hello {n}", f"well {n}", "more?"[: n % 2 * 5] or "yes?", "no"), "id": n} for n in range(20)
    ]
    records[3]["messages"][1]["weight"] = 0
    write(run / "chats.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), run / "chats.parquet", row_group_size=6)
    made = {}
    for name in ("chats.jsonl", "chats.parquet"):
        (run / "runs" / "joe.yaml").write_text(RUN_FILE.replace("chats.jsonl", name), encoding="utf-8")
        code, out, err = homing("prep", "joe", "--json")
        assert code == 0, err
        own = json.loads(out)["own"][0]
        assert (own["num_documents"], own["report"]["files"][0]["num_skipped"]) == (19, 0)
        made[name] = {path.name: path.read_bytes() for path in Path(own["dir"]).glob("*-0*")}
    assert len(made["chats.jsonl"]) >= 4
    assert made["chats.jsonl"] == made["chats.parquet"]


def test_faults_in_parquet_are_reported_by_file_and_row(homing: Homing, tmp_path: Path) -> None:
    records = [{"messages": chat(f"hello {n}", f"well {n}")} for n in range(6)]
    records[2]["messages"][0]["role"] = "absent"
    records[4]["messages"][1]["content"] = None
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "bad.parquet", row_group_size=2)
    code, out, _ = homing("data", "check", "bad.parquet", "--json")
    assert code == 2
    document = json.loads(out)
    assert [(finding["line"], finding["kind"]) for finding in document["findings"]] == [
        (3, "unknown-role"), (5, "no-content"),
    ]  # fmt: skip
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "bad.parquet").read_bytes()[:-9])
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(pa.string()))}), tmp_path / "none.parquet")
    code, out, _ = homing("data", "check", "cut.parquet", "none.parquet", "chats.jsonl", "--json")
    assert code == 2
    document = json.loads(out)
    assert [(Path(f["path"]).name, f["action"]) for f in document["findings"]] == [
        ("cut.parquet", "stops"), ("none.parquet", "stops"),
    ]  # fmt: skip
    assert "cut.parquet is not a complete Parquet file" in document["findings"][0]["text"]
    assert "none.parquet is empty" in document["findings"][1]["text"]
    assert [file["num_kept"] for file in document["files"]] == [0, 0, 20]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [("repeat: 2", "repeat: 3", "this section of the run file"), ("context: 128", "context: 64", "model.context")],
)
def test_chat_shards_that_the_run_file_no_longer_means_are_not_prepared(
    homing: Homing, run: Path, old: str, new: str, what: str
) -> None:
    from homing.config.load import load_run

    homing("prep", "joe")
    assert load_run("joe").is_prepared
    (run / "runs" / "joe.yaml").write_text(RUN_FILE.replace(old, new))
    loaded = load_run("joe")
    assert not loaded.is_prepared
    assert any(what in warning for warning in loaded.warnings)
    homing("prep", "joe")
    assert load_run("joe").is_prepared


@pytest.mark.regression("data-show-tokenizer")
def test_show_of_a_file_takes_the_tokenizer_of_the_run_that_learns_from_it(homing: Homing, run: Path) -> None:
    make_tokenizer(run / "data" / "joe")
    (run / "runs" / "ann.yaml").write_text(RUN_FILE.replace("chats.jsonl", "others.jsonl"), encoding="utf-8")
    make_tokenizer(run / "data" / "ann")  # newer, prepared, and about other conversations
    os.utime(run / "runs" / "ann.yaml", (2**31, 2**31))
    code, _, err = homing("data", "show", "chats.jsonl")
    assert code == 0, err
    assert f"Using the tokenizer and chat template in {run / 'data' / 'joe'}" in err
    (run / "data" / "joe" / "tokenizer.json").unlink()
    code, _, err = homing("data", "show", "chats.jsonl")
    assert code == 2
    assert "homing prep joe" in err
    write(run / "nobodys.jsonl", [chat("hello", "well")])
    code, _, err = homing("data", "show", "nobodys.jsonl")
    assert code == 0, err
    assert f"Using the tokenizer and chat template in {run / 'data' / 'ann'}" in err
    (run / "runs" / "new.yaml").write_text(RUN_FILE.replace("chats.jsonl", "more.jsonl"), encoding="utf-8")
    os.utime(run / "runs" / "new.yaml", (2**31 + 9, 2**31 + 9))
    code, _, err = homing("data", "show", "nobodys.jsonl")
    assert code == 0, "the newest run is not prepared, so it has no tokenizer to name"


def test_a_fault_that_every_line_has_is_shown_a_few_times_and_counted(homing: Homing, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time.\n" * 200)
    code, out, _ = homing("data", "check", "book.txt")
    assert code == 2
    assert out.count("not JSON") == 5
    assert "... and 195 more; --json lists all. Most frequent: 200 bad-json in book.txt" in out


def test_a_conversation_that_does_not_exist_is_answered_with_the_numbers_that_do(run: Path, homing: Homing) -> None:
    assert homing("prep", "joe")[0] == 0
    code, _, err = homing("data", "show", "chats.jsonl", "--number", "99")
    assert code == 2
    assert "Use --number 1 to 20." in err
