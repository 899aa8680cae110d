"""Conversations to shards: whole or absent, made once, and telling what they are made of."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lm.data.chat.kit import make_tokenizer

from homing.errors import DataError
from homing.lm.data.chat import prepare as module
from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource, copies_of, open_renderer
from homing.lm.data.chat.prepare import prepare_chat
from homing.lm.data.shards.pack_chats import PackedConversations, mixture_of, open_conversations
from homing.lm.data.shards.read_shards import read_manifest


def chat(number: int, num_turns: int = 2) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * num_turns
    return [{"role": role, "content": f"hello {number} {place}"} for place, role in enumerate(roles)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "tokenizer")
    write("a.jsonl", [chat(n) for n in range(60)])
    write("b.jsonl", [{"messages": chat(1000 + n, 1)} for n in range(20)])
    return tmp_path


def write(name: str, records: list[Any]) -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def order_of(*sources: ChatSource, **changes: Any) -> ChatOrder:
    given: dict[str, Any] = {"dir": Path("out"), "chat": list(sources), "tokenizer": Path("tokenizer"), "context": 256}
    return ChatOrder(**{**given, **changes})


def files() -> dict[str, str]:
    paths = [path for path in Path("out").rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.name != "report.json"}


def texts(split: str) -> list[str]:
    conversations = open_conversations(Path("out"), read_manifest(Path("out")), split, checks_hashes=True)
    renderer = open_renderer(Path("tokenizer"))
    found = []
    for number in range(conversations.tokens.num_documents):
        ids, mask = conversations.read(number)
        assert mask[-1] == 1
        assert mask[0] == 0
        found.append("".join(renderer.tokens.show(int(i)) for i in ids))
    return found


def test_every_conversation_is_there_once_as_the_template_writes_it(here: Path) -> None:
    seen: list[tuple[int, int]] = []
    order = order_of(ChatSource("a.jsonl"), ChatSource("b.jsonl"), val_fraction=0.1)
    done = prepare_chat(order, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == Path("a.jsonl").stat().st_size + Path("b.jsonl").stat().st_size
    train, val = texts("train"), texts("val")
    assert len(val) == 8
    assert len(train) == 72
    assert len(set(train + val)) == 80
    first = (
        "<|endoftext|><|im_start|>user\nhello 0 0<|im_end|>\n<|im_start|>assistant\nhello 0 1<|im_end|>\n"
        "<|im_start|>user\nhello 0 2<|im_end|>\n<|im_start|>assistant\nhello 0 3<|im_end|>"
    )
    assert first in train + val
    manifest = done.manifest
    assert manifest.tokenizer_sha256 == hashlib.sha256(Path("tokenizer/tokenizer.json").read_bytes()).hexdigest()
    assert manifest.template_sha256 == open_renderer(Path("tokenizer")).template.sha256
    assert [source.path for source in manifest.source] == ["a.jsonl", "b.jsonl"]
    assert manifest.settings["rows_per_epoch"] > 0
    assert manifest.settings["targets"]["train"] > 0
    assert [file["form"] for file in done.report["files"]] == ["list", "messages"]


def test_the_trainer_reads_what_was_written(here: Path) -> None:
    done = prepare_chat(order_of(ChatSource("a.jsonl"), ChatSource("b.jsonl", repeat=3)))
    manifest = read_manifest(Path("out"))
    split = open_conversations(Path("out"), manifest, "train")
    packed = PackedConversations(split, mixture_of(manifest, "train"), context=256, seed=1)
    assert packed.num_rows() == done.manifest.settings["rows_per_epoch"]
    ids, targets, segments = (np.empty((packed.num_rows(), 256), dtype=np.int32) for _ in range(3))
    num_targets = packed.read_into(0, ids, targets, segments)
    a, b = (source["num"]["train"] for source in manifest.settings["sources"])
    assert int(segments.max(axis=1).sum() + len(segments)) == a + 3 * b
    assert num_targets > manifest.settings["targets"]["train"]
    held_out = PackedConversations(
        open_conversations(Path("out"), manifest, "val"), mixture_of(manifest, "val"), context=256, seed=1
    )
    assert held_out.num_rows() >= 1


def test_nothing_is_made_again_unless_something_changed(here: Path) -> None:
    order = order_of(ChatSource("a.jsonl"))
    assert not prepare_chat(order).is_reused
    before = files()
    assert prepare_chat(order).is_reused
    os.utime("a.jsonl")  # touched: the content decides
    assert prepare_chat(order).is_reused
    assert files() == before
    changed = [
        order_of(ChatSource("a.jsonl", repeat=2)),
        order_of(ChatSource("a.jsonl"), context=128),
        order_of(ChatSource("a.jsonl"), val_fraction=0.2),
    ]
    for other in changed:
        assert not prepare_chat(other).is_reused
    prepare_chat(order)
    config = json.loads(Path("tokenizer/tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("Tools, one", "Your tools, one")
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    assert not prepare_chat(order).is_reused
    write("a.jsonl", [chat(n) for n in range(61)])
    assert not prepare_chat(order).is_reused
    Path("out/train-00000.mask").write_bytes(b"")
    assert not prepare_chat(order).is_reused
    assert not prepare_chat(order_of(ChatSource("a.jsonl"), is_forced=True)).is_reused


def test_the_same_files_give_the_same_bytes(here: Path) -> None:
    order = order_of(ChatSource("a.jsonl"), ChatSource("b.jsonl"), shard_tokens=500)
    prepare_chat(order)
    before = files()
    assert sum(name.endswith(".mask") for name in before) > 2
    prepare_chat(order_of(ChatSource("a.jsonl"), ChatSource("b.jsonl"), shard_tokens=500, is_forced=True))
    assert files() == before


def test_a_prep_killed_while_it_publishes_leaves_nothing_that_looks_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(ChatSource("a.jsonl"))
    prepare_chat(order)
    before = files()
    real, count = os.replace, 0

    def stop(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(module.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_chat(order_of(ChatSource("a.jsonl"), is_forced=True))
    monkeypatch.setattr(module.os, "replace", real)
    with pytest.raises(DataError, match="No prepared data"):
        read_manifest(Path("out"))
    assert not prepare_chat(order).is_reused
    assert files() == before


def test_validation_files_are_kept_out_of_training(here: Path) -> None:
    write("val.jsonl", [chat(n) for n in (3, 4)])
    done = prepare_chat(order_of(ChatSource("a.jsonl"), validation=["val.jsonl"]))
    assert done.manifest.splits["val"].num_documents == 2
    assert done.manifest.splits["train"].num_documents == 58
    assert done.report["counts"] == {"leak": 2}
    assert not set(texts("train")) & set(texts("val"))


def test_the_same_file_on_both_sides_or_in_two_sources_is_refused(here: Path) -> None:
    with pytest.raises(DataError, match="for both training and validation"):
        prepare_chat(order_of(ChatSource("a.jsonl"), validation=["a.jsonl"]))
    with pytest.raises(DataError, match="two sources"):
        prepare_chat(order_of(ChatSource("a.jsonl"), ChatSource("*.jsonl")))
    assert not Path("out").exists()


def test_bad_lines_are_left_out_and_counted_and_a_file_of_them_is_refused(here: Path) -> None:
    write("c.jsonl", [*[chat(n) for n in range(10)], {"x": 1}, chat(11)])
    done = prepare_chat(order_of(ChatSource("c.jsonl")))
    assert done.report["counts"] == {"no-form": 1}
    assert done.report["findings"][0]["line"] == 11
    write("c.jsonl", [chat(0), *[{"x": n} for n in range(10)]])
    with pytest.raises(DataError, match="10 of 11 lines are invalid"):
        prepare_chat(order_of(ChatSource("c.jsonl"), is_forced=True))
    with pytest.raises(DataError, match="No conversations left"):
        prepare_chat(order_of(ChatSource("a.jsonl"), context=4))


@pytest.mark.acceptance(32)
def test_weights_and_repeats_say_how_often_each_source_comes() -> None:
    a, b = ChatSource("a"), ChatSource("b", repeat=3)
    assert copies_of([a, b], [10, 5]) == [1.0, 3.0]
    one, two = ChatSource("a", weight=1), ChatSource("b", weight=2)
    assert copies_of([one, two], [10, 10]) == [1.0, 2.0]
    assert copies_of([one, two], [10, 100]) == [5.0, 1.0]
    assert copies_of([one, two, a], [10, 100, 7]) == [5.0, 1.0, 1.0]
    assert copies_of([ChatSource("a", weight=1, repeat=2), two], [10, 10]) == [2.0, 4.0]
    assert copies_of([one, two], [0, 10]) == [1.0, 1.0]


def test_a_tokenizer_without_a_template_is_refused_before_anything_is_written(here: Path) -> None:
    Path("tokenizer/tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="No chat template"):
        prepare_chat(order_of(ChatSource("a.jsonl")))
    assert not Path("out").exists()
