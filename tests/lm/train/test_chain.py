"""Phases one after the other: each on its own data, from the weights of the one before, and exact after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from killed_trainer import kill_trainer_after
from safetensors.torch import load_file, save_file
from tiny import (
    SPECIALS,
    make_data,
    make_documents,
    make_run,
    make_run_dir,
    write_byte_tokenizer,
    write_manifest,
    write_shards,
)
from torch import Tensor

from homing.errors import DataError, IntegrityError, RunFailed, UsageError
from homing.lm.data.chat.chat_settings import ChatOrder, ChatSource
from homing.lm.data.chat.prepare import prepare_chat
from homing.lm.evals.bits_per_byte import Evaluation
from homing.lm.model.decoder import Decoder
from homing.lm.phases.chat import Chat
from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE
from homing.lm.train.loop import train
from homing.lm.try_first_step import verify
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Base, Lora, Optimizer, PhaseData, Run, RunInput, Schedule
from homing.wire.shard_manifest import DataManifest

NAME = "My name is Moss."
ADAM = Optimizer("adamw", 0.01, 0.01, 0.01, 0.01, 0.0)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    config = json.loads((folder / file_names.TOKENIZER_CONFIG).read_text())
    (folder / file_names.TOKENIZER_CONFIG).write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    return folder


def own_data(folder: Path, kind: str) -> PhaseData:
    manifest = (folder / file_names.MANIFEST).read_bytes()
    return PhaseData(kind, str(folder), hashlib.sha256(manifest).hexdigest())


@pytest.fixture(scope="module")
def chat(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PhaseData:
    folder = tmp_path_factory.mktemp("chat")
    lines = [
        {"messages": [{"role": "user", "content": f"Who {n}?"}, {"role": "assistant", "content": NAME}]}
        for n in range(40)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ChatSource(str(folder / "chat.jsonl"))
    prepare_chat(ChatOrder(folder / "out", [source], tokenizer=data_dir, context=128, val_fraction=0.1))
    return own_data(folder / "out", "chat")


@pytest.fixture(scope="module")
def more_text(tmp_path_factory: pytest.TempPathFactory) -> PhaseData:
    folder = tmp_path_factory.mktemp("more")
    write_byte_tokenizer(folder)
    documents = {"train": make_documents(60, seed=8), "val": make_documents(6, seed=9)}
    write_manifest(folder, {name: write_shards(folder, name, listed) for name, listed in documents.items()})
    return own_data(folder, "text")


def make_chain(data_dir: Path, chat: PhaseData, more_text: PhaseData, **sft: Any) -> Run:
    run = make_run(data_dir, num_steps=4, batch_tokens=512, micro_batch=2, save_every=2)
    pretrain = run.phases[0]
    later = {"num_steps": 4, "schedule": Schedule("wsd", 1, 2, 0.0)}
    mid = dataclasses.replace(pretrain, kind="mid", data=more_text, **later)
    taught = dataclasses.replace(pretrain, kind="sft", data=chat, optimizer=ADAM, **(later | sft))
    model = dataclasses.replace(run.model, context=128)
    return dataclasses.replace(run, model=model, phases=[pretrain, mid, taught])


def go(run_dir: Path, run: Run) -> list[str]:
    said: list[str] = []
    train(make_run_dir(run_dir, run), say=said.append)
    return said


def metrics(run_dir: Path, phase: str) -> list[Metric]:
    lines = [codec.loads(Metric, line) for line in (run_dir / file_names.METRICS).read_text().splitlines()]
    return [line for line in lines if line.phase == phase]


def manifest(run_dir: Path, phase: str, step: int) -> CheckpointManifest:
    path = run_dir / file_names.CHECKPOINTS / phase / file_names.step_dir(step) / file_names.MANIFEST
    return codec.loads(CheckpointManifest, path.read_bytes())


@pytest.mark.acceptance(88, 89, 101)
@pytest.mark.slow
def test_each_phase_learns_from_its_own_and_starts_from_the_one_before(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text, num_steps=60)
    said = go(tmp_path, run)
    assert any("Starting from the weights of" in line and "pretrain" in line for line in said)
    before, after = metrics(tmp_path, "sft")[0].loss, metrics(tmp_path, "sft")[-1].val_loss
    assert before is not None
    assert after is not None
    assert after < 0.3 < before, "one answer to everything is soon known by heart"
    samples = (tmp_path / file_names.SAMPLES / f"sft-{60:08d}.txt").read_text()
    assert not any("plain text" in line for line in said), "its tokenizer has the marks of turns"
    assert "My name" in samples, "asked in turns, it answers as it was taught, as far as eight tokens go"
    lineage = manifest(tmp_path, "sft", 60).lineage
    assert [stage.phase for stage in lineage] == ["pretrain", "mid", "sft"]
    assert lineage[2].data_sha256 == chat.manifest_sha256
    assert lineage[1].data_sha256 == more_text.manifest_sha256


@pytest.mark.acceptance(92)
@pytest.mark.slow
def test_a_phase_that_fails_stops_the_chain_and_is_the_one_that_is_gone_on_with(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_chain(data_dir, chat, more_text)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_bad_steps=2))
    go(tmp_path / "whole", run)
    plain, is_lost, broken = Decoder.loss, False, tmp_path / "broken"

    def loss(model: Decoder, *batch: Any, **how: Any) -> torch.Tensor:
        return plain(model, *batch, **how) * (float("nan") if is_lost else 1.0)

    def say(line: str) -> None:
        nonlocal is_lost
        is_lost = is_lost or line.startswith("Phase sft")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "loss", loss)
        with pytest.raises(RunFailed, match="2 steps in a row"):
            train(make_run_dir(broken, run), say=say)
    ended = codec.loads(Outcome, (broken / file_names.OUTCOME).read_bytes())
    assert (ended.state, ended.phase) == ("failed", "sft")
    assert [manifest(broken, phase, 4).is_final for phase in ("pretrain", "mid")] == [True, True], "what was done stays"

    said = go(broken, run)
    assert not any("Phase pretrain:" in line or "Phase mid:" in line for line in said), "neither is trained again"
    for phase in ("pretrain", "mid", "sft"):
        losses = [[line.loss for line in metrics(tmp_path / way, phase)] for way in ("whole", "broken")]
        assert losses[0] == losses[1], phase


@pytest.mark.acceptance(92)
@pytest.mark.slow
def test_a_chain_killed_in_any_phase_ends_with_the_same_bits(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text)
    go(tmp_path / "whole", run)
    make_run_dir(tmp_path / "killed", run)
    argv = [sys.executable, "-m", "homing.lm.train", str(tmp_path / "killed")]
    for phase, step in (("pretrain", 2), ("mid", 2), ("sft", 2)):
        kill_trainer_after(tmp_path / "killed", phase, step)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for phase in ("pretrain", "mid", "sft"):
        ends = [tmp_path / way / file_names.CHECKPOINTS / phase / file_names.step_dir(4) for way in ("whole", "killed")]
        first, second = (load_file(end / file_names.WEIGHTS) for end in ends)
        assert all(torch.equal(first[name], second[name]) for name in first), phase
        losses = [[line.loss for line in metrics(tmp_path / way, phase)] for way in ("whole", "killed")]
        assert losses[0] == losses[1], phase


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_learn_on_frozen_weights_and_the_next_phase_builds_on_both(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData, method: str
) -> None:
    run = make_chain(data_dir, chat, more_text, method=method, lora=Lora(rank=4), num_steps=20)
    go(tmp_path, run)
    folder = tmp_path / file_names.CHECKPOINTS / "sft" / file_names.step_dir(20)
    assert not (folder / file_names.WEIGHTS).exists()
    adapter = load_file(folder / file_names.ADAPTER)
    assert all(name.startswith("base_model.model.model.layers.") for name in adapter)
    messages = json.loads((folder / file_names.ADAPTER_CONFIG).read_text())
    assert (messages["peft_type"], messages["r"]) == ("LORA", 4)
    losses = [line.val_loss for line in metrics(tmp_path, "sft") if line.val_loss is not None]
    assert losses[-1] < losses[0]

    longer = dataclasses.replace(run.phases[0], kind="mid", data=chat, optimizer=ADAM, num_steps=1, eval_every=1)
    chain = dataclasses.replace(run, phases=[run.phases[0], run.phases[2], longer])
    go(tmp_path / "next", chain)
    after = metrics(tmp_path / "next", "mid")[0].loss
    last = metrics(tmp_path / "next", "sft")[-1].loss
    assert after is not None
    assert last is not None
    assert abs(after - last) < 0.5, "it continues from what the adapters had learned"


@pytest.mark.slow
def test_an_adapter_is_refused_on_other_base_weights(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text, method="lora", lora=Lora(rank=2), num_steps=4)
    go(tmp_path, run)
    start = tmp_path / file_names.CHECKPOINTS / "mid" / file_names.step_dir(4)
    other = tmp_path / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(4)
    alone = dataclasses.replace(run.phases[2], init_from=str(start))
    go(tmp_path / "sft", dataclasses.replace(run, phases=[alone]))
    moved = dataclasses.replace(alone, init_from=str(other), num_steps=4, save_every=1)
    path = tmp_path / "sft" / file_names.CHECKPOINTS / "sft"
    for folder in sorted(path.glob("step-*"))[1:]:
        shutil.rmtree(folder)
    with pytest.raises(IntegrityError, match="different base weights"):
        go(tmp_path / "sft", dataclasses.replace(run, phases=[moved]))


@pytest.mark.acceptance(6)
@pytest.mark.slow
def test_weights_of_another_tokenizer_are_refused_by_the_trainer_too(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text)
    go(tmp_path / "first", dataclasses.replace(run, phases=run.phases[:1]))
    # As a launch sends it: the folder has another name there, and run.json says where it lay at home.
    start = tmp_path / "data" / "start-sft"
    shutil.copytree(tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(4), start)
    sent = RunInput(f"start-sft/{file_names.WEIGHTS}", f"/home/anna/models/tiny/{file_names.WEIGHTS}", "")
    sft = dataclasses.replace(run.phases[2], init_from="../data/start-sft")
    alone = dataclasses.replace(run, phases=[sft], inputs=[sent])
    said = go(tmp_path / "second", alone)
    assert f"Starting from the weights of models/tiny, pretrain step 4 of {run.id}." in said

    tokenizer = json.loads((start / file_names.TOKENIZER).read_text())
    (start / file_names.TOKENIZER).write_text(json.dumps(tokenizer, indent=3))
    go(tmp_path / "third", alone)  # the same ids in other bytes
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (start / file_names.TOKENIZER).write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="a different tokenizer than the one used for the data") as caught:
        go(tmp_path / "fourth", alone)
    assert str(start / file_names.TOKENIZER) in caught.value.why
    assert str(data_dir / file_names.TOKENIZER) in caught.value.why
    opened = dataclasses.replace(run, base=Base("hf:moss/moss@abc", str(start)), phases=run.phases[2:])
    with pytest.raises(DataError, match="a different tokenizer than the one used for the data"):
        go(tmp_path / "fifth", opened)


def test_text_of_a_phase_in_the_ids_of_another_tokenizer_is_refused(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run, folder = make_chain(data_dir, chat, more_text), tmp_path / "text"
    shutil.copytree(more_text.dir, folder)
    manifest = codec.loads(DataManifest, (folder / file_names.MANIFEST).read_bytes())
    (folder / file_names.MANIFEST).write_text(codec.dumps(dataclasses.replace(manifest, tokenizer_sha256="0" * 64)))
    mid = dataclasses.replace(run.phases[1], data=own_data(folder, "text"))
    with pytest.raises(DataError, match="encoded with a different tokenizer"):
        go(tmp_path / "run", dataclasses.replace(run, phases=[mid]))


@pytest.mark.slow
def test_open_weights_without_text_of_the_run(tmp_path: Path, data_dir: Path, chat: PhaseData) -> None:
    run = make_chain(data_dir, chat, chat)
    go(tmp_path / "first", dataclasses.replace(run, phases=run.phases[:1]))
    base = tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(4)
    data = dataclasses.replace(run.data, manifest_sha256="", num_train_tokens=0, num_val_tokens=0)
    open_run = dataclasses.replace(run, data=data, base=Base("hf:moss/moss@abc", str(base)), phases=run.phases[2:])
    go(tmp_path / "next", open_run)
    assert [stage.phase for stage in manifest(tmp_path / "next", "sft", 4).lineage] == ["base", "sft"]


@pytest.mark.slow
def test_template_and_ways_of_sampling_of_open_weights_go_from_phase_to_phase(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text)
    go(tmp_path / "first", dataclasses.replace(run, phases=run.phases[:1]))
    base = tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(4)
    (base / file_names.GENERATION).write_text('{"eos_token_id": 3}')
    own = shutil.copytree(data_dir, tmp_path / "data")
    (own / file_names.CHAT_TEMPLATE).write_text("{{ messages }}\n")
    data = dataclasses.replace(run.data, dir=str(own))
    open_run = dataclasses.replace(run, data=data, base=Base("hf:moss/moss@abc", str(base)), phases=run.phases[1:])
    go(tmp_path / "next", open_run)
    for phase in ("mid", "sft"):
        listed = {file.name for file in manifest(tmp_path / "next", phase, 4).files}
        folder = tmp_path / "next" / file_names.CHECKPOINTS / phase / file_names.step_dir(4)
        for name, where in ((file_names.CHAT_TEMPLATE, own), (file_names.GENERATION, base)):
            assert name in listed
            assert (folder / name).read_bytes() == (where / name).read_bytes()
    first = {file.name for file in manifest(tmp_path / "first", "pretrain", 4).files}
    assert not first & {file_names.CHAT_TEMPLATE, file_names.GENERATION}, "these weights have no earlier files"


def test_data_that_changed_since_the_run_was_resolved_is_refused(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, dataclasses.replace(chat, manifest_sha256="0" * 64), more_text)
    with pytest.raises(DataError, match=r"has changed since run\.json was written"):
        go(tmp_path, dataclasses.replace(run, phases=run.phases[2:]))


def test_a_chain_with_a_hole_is_refused_before_it_costs_anything(tmp_path: Path, data_dir: Path) -> None:
    run = make_run(data_dir)
    hole = dataclasses.replace(run.phases[0], kind="sft", method="lora")
    with pytest.raises(UsageError) as caught:
        go(tmp_path, dataclasses.replace(run, phases=[*run.phases, hole]))
    assert "sft/lora has no conversations and no settings for its adapters" in caught.value.why
    assert not (tmp_path / file_names.METRICS).exists()


@pytest.mark.acceptance("X10")
def test_samples_of_a_chat_without_the_marks_of_turns_are_said_to_be_plain_once_in_a_phase(tmp_path: Path) -> None:
    marks = {"<|im_start|>": "<|start_header_id|>", "<|im_end|>": "<|eot_id|>"}
    make_data(tmp_path / "data", specials=[marks.get(name, name) for name in SPECIALS])
    path = tmp_path / "data" / file_names.TOKENIZER_CONFIG
    template = CHAT_TEMPLATE.replace("<|im_start|>", "<|start_header_id|>").replace("<|im_end|>", "<|eot_id|>")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": NAME}]
    lines = [{"messages": [{**turns[0], "content": f"Who {n}?"}, turns[1]]} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ChatSource(str(tmp_path / "chat.jsonl"))
    prepare_chat(ChatOrder(tmp_path / "out", [source], tokenizer=tmp_path / "data", context=128, val_fraction=0.1))
    run = make_run(
        tmp_path / "data", kind="sft", data=own_data(tmp_path / "out", "chat"), num_steps=4, batch_tokens=512,
        micro_batch=2, sample_every=1,
    )  # fmt: skip
    said = go(tmp_path / "run", dataclasses.replace(run, model=dataclasses.replace(run.model, context=128)))
    messages = [line for line in said if "no <|im_start|> and no <|im_end|>" in line]
    assert len(messages) == 1
    assert "sft samples continue the prompt as plain text" in messages[0]
    assert len(list((tmp_path / "run" / file_names.SAMPLES).iterdir())) == 4
    events = [json.loads(line) for line in (tmp_path / "run" / file_names.EVENTS).read_text().splitlines()]
    assert [(event["kind"], event["phase"]) for event in events if event["kind"] == "samples_plain"] == [
        ("samples_plain", "sft")
    ]


@pytest.mark.acceptance(1)
@pytest.mark.slow
def test_verify_opens_the_weights_and_the_conversations_that_the_chosen_phase_begins_with(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text)
    whole = verify(run, tmp_path)
    assert (whole.phase, whole.weights, whole.num_adapter_params) == ("pretrain", "fresh ones", 0)
    assert whole.left_out == ["mid: it starts from the result of pretrain.", "sft: it starts from the result of mid."]
    longer = dataclasses.replace(run.phases[0], num_steps=40, schedule=Schedule("wsd", 2, 20, 0.0), save_every=40)
    go(tmp_path / "first", dataclasses.replace(run, phases=[longer]))
    start = tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(40)

    sft = dataclasses.replace(run.phases[2], init_from=str(start))
    report = verify(dataclasses.replace(run, phases=[sft]), tmp_path)
    assert report.is_ok, report.problems
    assert report.weights == f"{start.relative_to(tmp_path)}, pretrain step 40 of {run.id}"
    assert str(chat.dir) in report.batch
    assert "of which" in report.batch, "what the assistant says alone"
    assert report.left_out == []
    fresh = verify(dataclasses.replace(run, phases=run.phases[2:]), tmp_path)
    assert abs(report.loss - fresh.loss) > 0.02, "not those of fresh weights"

    # The same model with adapters, as open weights: trained parameters are counted, and none is reported as dead.
    adapters = dataclasses.replace(run.phases[2], method="lora", lora=Lora(rank=2))
    opened = dataclasses.replace(run, base=Base("hf:moss/moss@abc", str(start)), phases=[adapters])
    neighbor = verify(opened, tmp_path)
    assert neighbor.is_ok, neighbor.problems
    assert neighbor.weights == "hf:moss/moss@abc"
    assert neighbor.num_adapter_params == 2 * 2 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 3 * (32 + 64))
    assert neighbor.loss == pytest.approx(report.loss, abs=1e-3), "new adapters change nothing"

    absent = dataclasses.replace(opened, base=Base("hf:moss/moss@abc", str(tmp_path / "metadata")))
    without = verify(absent, tmp_path)
    assert without.weights == "random ones of that shape"
    assert without.left_out == ["The weights of hf:moss/moss@abc: they are not on this machine."]


def test_verify_says_where_weights_do_not_know_the_data(
    tmp_path: Path, data_dir: Path, chat: PhaseData, more_text: PhaseData
) -> None:
    run = make_chain(data_dir, chat, more_text)
    go(tmp_path / "first", dataclasses.replace(run, phases=run.phases[:1]))
    start = tmp_path / "first" / file_names.CHECKPOINTS / "pretrain" / file_names.step_dir(4)
    weights = load_file(start / file_names.WEIGHTS)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous() * 40
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", file_names.TOKENIZER):
        shutil.copyfile(start / name, base / name)
    save_file(weights, base / file_names.WEIGHTS)
    mid = dataclasses.replace(run.phases[1], init_from=str(base))
    report = verify(dataclasses.replace(run, phases=[mid]), tmp_path)
    assert report.is_ok, "it may be right"
    assert "worse than guessing" in report.notes[0]


def test_a_part_of_the_held_out_conversations_is_a_fair_one(data_dir: Path, tmp_path: Path) -> None:
    """Rows are packed longest first: read from their beginning, a part of them would be the longest ones alone."""
    run = make_many_held_out(data_dir, tmp_path)

    def mean_size(num_tokens: int) -> float:
        model, _ = examined(run, num_tokens)
        return sum(model.sizes) / len(model.sizes)

    assert mean_size(20 * 128) == pytest.approx(mean_size(10**6), rel=0.1)


def test_held_out_conversations_are_the_same_ones_whatever_the_seed(data_dir: Path, tmp_path: Path) -> None:
    run = make_many_held_out(data_dir, tmp_path)
    received = [examined(dataclasses.replace(run, seed=seed), 8 * 128)[0].ids for seed in (1, 2)]
    assert len(received[0]) == 8
    assert received[0] == received[1]


def test_an_exam_on_a_part_of_the_conversations_says_on_which(data_dir: Path, tmp_path: Path) -> None:
    run = make_many_held_out(data_dir, tmp_path)
    exams = [examined(run, num_tokens)[1].exam for num_tokens in (8 * 128, 20 * 128, 10**6, 10**7)]
    assert exams == ["8 rows drawn", "20 rows drawn", "", ""]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_id_past_the_vocabulary_in_a_conversation_is_named_before_it_reaches_the_model(
    data_dir: Path, chat: PhaseData, tmp_path: Path, split: str, place: int
) -> None:
    """The last token of a conversation is only a target, and a card would read past its logits."""
    folder = tmp_path / "chat"
    shutil.copytree(chat.dir, folder)
    ids = np.fromfile(folder / file_names.shard_name(split, 0), dtype="<u2")
    starts = np.fromfile(folder / file_names.index_name(split, 0), dtype="<u8").astype(int)
    for begin, end in pairwise(starts.tolist()):
        ids[begin:end][place] = 65279
    ids.tofile(folder / file_names.shard_name(split, 0))
    mask = np.fromfile(folder / file_names.mask_name(split, 0), dtype=np.uint8)
    mask[starts[1:] - 1] = 1
    mask.tofile(folder / file_names.mask_name(split, 0))
    run = make_chain(data_dir, chat, chat)
    work = Chat(run, run.phases[2], folder)

    def look() -> None:
        with work.open_batches(cast(Decoder, _Listener()), first_row=0, device=torch.device("cpu")) as batches:
            batches.next()
        work.evaluate(cast(Decoder, _Listener()), lambda done, of: None)

    with pytest.raises(DataError, match=rf"The {split} shards contain token id 65,279, but the vocabulary ends at 271"):
        look()


def make_many_held_out(data_dir: Path, folder: Path) -> Run:
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant"}]
    lines = [{"messages": [turns[0], turns[1] | {"content": f"{n} " + "la " * (n % 25)}]} for n in range(400)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ChatSource(str(folder / "chat.jsonl"))
    prepare_chat(ChatOrder(folder / "out", [source], tokenizer=data_dir, context=128, val_fraction=0.5))
    run = make_run(data_dir, batch_tokens=512)
    taught = dataclasses.replace(run.phases[0], kind="sft", data=own_data(folder / "out", "chat"))
    return dataclasses.replace(run, model=dataclasses.replace(run.model, context=128), phases=[taught])


def examined(run: Run, num_tokens: int) -> tuple[_Listener, Evaluation]:
    phase, model = dataclasses.replace(run.phases[0], eval_tokens=num_tokens), _Listener()
    assert phase.data is not None
    work = Chat(run, phase, Path(phase.data.dir))
    return model, work.evaluate(cast(Decoder, model), lambda done, of: None)


class _Listener:
    """In the place of a model: hears what it is asked about, and how long the conversations are."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ids: list[list[int]] = []

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor, *, segments: Tensor) -> Tensor:
        self.ids += ids_BT.tolist()
        for row in segments:
            self.sizes += torch.bincount(row[row >= 0]).tolist()
        return torch.zeros(ids_BT.shape)
