"""Chains of phases in the run file: what each becomes, which are chosen, and what is refused before renting."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.config.weights.test_open_weights import documents
from tests.config.weights.test_open_weights import write as write_open_weights

from homing.config.load import Loaded
from homing.config.resolve.phase_weights import find_adapter_base
from homing.config.weights.open_weights import INDEX
from homing.errors import DataError, Mistake
from homing.hf_config import config_of
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Stage
from homing.wire.run_json import RunInput
from homing.wire.shard_manifest import DataManifest, Split

Load = Callable[..., Loaded]
Mistakes = Callable[..., list[Mistake]]

RUN = """\
name: base
data: {text: [text.txt]}
model: {layers: 2, width: 64, heads: 2, context: 128}
phases:
  - {kind: pretrain, steps: 10, batch_tokens: 1024}
  - {kind: mid, batch_tokens: 1024, data: {text: [more.txt]}}
  - {kind: sft, batch_tokens: 1024, data: {chat: [{path: a.jsonl, repeat: 3}, b.jsonl]}}
"""


@pytest.fixture(autouse=True)
def texts(folder: Path) -> None:
    for name in ("text.txt", "more.txt", "a.jsonl", "b.jsonl"):
        (folder / name).write_text("moss grows on stones\n" * 400)


def trained(run_dir: Path, loaded: Loaded, kind: str, step: int = 10) -> Path:
    """A final checkpoint as a phase leaves it, as far as the run file looks at it."""
    folder = run_dir / file_names.CHECKPOINTS / kind / file_names.step_dir(step)
    folder.mkdir(parents=True)
    lineage = [Stage(kind, run_id="base-1", step=step)]
    manifest = CheckpointManifest("base", "base-1", kind, step, 0, True, "", 1, [], lineage=lineage)
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    (folder / "config.json").write_text(json.dumps(config_of(loaded.run.model)))
    (folder / file_names.WEIGHTS).write_bytes(b"")
    return folder


def adapted(folder: Path, before: Stage, messages: str) -> Path:
    """The checkpoint made into one of a phase that trained an adapter of the weights `before`."""
    manifest = codec.loads(CheckpointManifest, (folder / file_names.MANIFEST).read_bytes())
    manifest = dataclasses.replace(manifest, lineage=[before, manifest.lineage[-1]])
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))
    (folder / file_names.WEIGHTS).rename(folder / file_names.ADAPTER)
    (folder / file_names.ADAPTER_CONFIG).write_text(json.dumps({"homing_base_dir": messages}))
    return folder


def test_a_phase_has_data_length_and_rates_of_its_own(load: Load) -> None:
    loaded = load(RUN)
    pretrain, mid, sft = loaded.run.phases
    assert [phase.data.kind if phase.data else "" for phase in loaded.run.phases] == ["", "text", "chat"]
    assert [prep.dir.name for prep in loaded.phase_preps] == ["mid", "sft"]
    assert [(source.path, source.repeat) for source in loaded.phase_preps[1].chat] == [("a.jsonl", 3), ("b.jsonl", 1)]
    assert pretrain.optimizer.lr > mid.optimizer.lr > sft.optimizer.lr, "what is learned is not to be unlearned"
    assert (mid.optimizer.weight_decay, sft.optimizer.weight_decay) == (0.1, 0.0)
    assert sft.num_steps > mid.num_steps > 0, "three epochs and one where no length is given"
    assert not loaded.is_prepared


@pytest.mark.acceptance(67)
def test_some_phases_start_from_the_newest_final_checkpoint_of_the_one_before(load: Load, homing_home: Path) -> None:
    whole = load(RUN)
    trained(homing_home / "runs/base-20260101-000000-aaaa", whole, "mid")
    newest = trained(homing_home / "runs/base-20260202-000000-bbbb", whole, "mid")
    loaded = load(RUN, "train.only=sft")
    assert [phase.kind for phase in loaded.run.phases] == ["sft"]
    assert loaded.run.phases[0].init_from == str(newest)
    assert loaded.run.origin["phases.0.init_from"] == "found locally"
    assert loaded.run.origin["phases.0.kind"].startswith("run file")
    assert [prep.phase for prep in loaded.phase_preps] == ["sft"]


def test_a_model_fetched_next_to_another_run_of_the_same_name_is_found(
    load: Load, homing_home: Path, folder: Path
) -> None:
    whole, models = load(RUN), folder / "models"
    models.mkdir()
    trained(homing_home / "runs/base-1", whole, "pretrain").rename(models / "base")
    neighbor = trained(homing_home / "runs/base-2", whole, "mid").rename(models / "base-mid")
    assert load(RUN, "train.only=sft").run.phases[0].init_from == str(neighbor)
    older = codec.loads(CheckpointManifest, (neighbor / file_names.MANIFEST).read_bytes())
    newest = trained(homing_home / "runs/base-3", whole, "mid").rename(models / "base-20260303-000000-cccc")
    newer = dataclasses.replace(older, run_id="base-3", made_at=older.made_at + 1)
    (newest / file_names.MANIFEST).write_text(codec.dumps(newer))
    assert load(RUN, "train.only=sft").run.phases[0].init_from == str(newest), "the one that was made last"


@pytest.mark.acceptance(42, 67)
def test_without_one_it_is_said_where_was_looked_and_an_unknown_phase_lists_the_valid_ones(mistakes: Mistakes) -> None:
    (missing,) = mistakes(RUN, "train.only=sft")
    assert "no mid or pretrain checkpoint of base was found" in missing.problem
    assert "Train mid first: homing train base --phase mid" in missing.suggestion
    assert "--set phases.2.init_from=FOLDER" in missing.suggestion
    found = mistakes(RUN, "train.only=mid+stf")
    assert {mistake.file for mistake in found} == {"--phase mid+stf"}, "as a person types it"
    assert any("Did you mean sft? This run has pretrain, mid, sft" in mistake.suggestion for mistake in found)


def test_a_phase_after_lora_starts_from_the_adapter_and_its_base_weights(
    load: Load, mistakes: Mistakes, homing_home: Path, folder: Path
) -> None:
    run_dir, before = homing_home / "runs/base-1", Stage("pretrain", run_id="base-1", step=12)
    mid = adapted(trained(run_dir, load(RUN), "mid"), before, "checkpoints/pretrain/step-00000012")
    (missing,) = mistakes(RUN, "train.only=sft")
    assert "those of pretrain at step 12 of base-1" in missing.problem
    assert missing.suggestion == "homing fetch base-1 --checkpoint pretrain:12 --to models/base-1-pretrain"

    base = trained(run_dir, load(RUN), "pretrain", 12)
    loaded = load(RUN, "train.only=sft")
    assert (loaded.run.phases[0].init_from, loaded.run.phases[0].init_base) == (str(mid), str(base))
    assert loaded.run.origin["phases.0.init_base"] == "derived from phases.2.init_from"

    # One that went on with another: its base is not the stage before it.
    manifest = codec.loads(CheckpointManifest, (mid / file_names.MANIFEST).read_bytes())
    longer = [before, Stage("sft", method="lora", run_id="base-1", step=3), manifest.lineage[-1]]
    (mid / file_names.MANIFEST).write_text(codec.dumps(dataclasses.replace(manifest, lineage=longer)))
    messages = {"homing_base_dir": "checkpoints/pretrain/step-00000012", "homing_base_stage": 0}
    (mid / file_names.ADAPTER_CONFIG).write_text(json.dumps(messages))
    assert load(RUN, "train.only=sft").run.phases[0].init_base == str(base)

    # Fetched to where the suggestion says, the adapter too: neither is in a run directory then.
    (folder / "models").mkdir()
    fetched = base.rename(folder / "models/base-1-pretrain")
    mid.rename(folder / "models/base")
    assert load(RUN, "train.only=sft").run.phases[0].init_base == str(fetched)
    adapted(fetched, Stage("base", address="hf:a/b"), "")
    (nested,) = mistakes(RUN, "train.only=sft")
    assert "an adapter on top of another adapter" in nested.problem


def test_metadata_alone_is_not_enough_if_the_instance_downloaded_the_weights(
    load: Load, homing_home: Path, tmp_path: Path
) -> None:
    loaded, sent, before = load(RUN), tmp_path / "metadata", Stage("base", address="hf:a/b@1")
    adapter = adapted(trained(homing_home / "runs/base-1", loaded, "mid"), before, "../data/base")
    sent.mkdir()
    (sent / INDEX).write_text('{"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}')
    inputs = [RunInput(f"base/{INDEX}", str(sent / INDEX), ""), RunInput("base/model-1.safetensors", "hf:a/b@1/x", "")]
    (adapter / file_names.RUN).write_text(codec.dumps(dataclasses.replace(loaded.run, inputs=inputs)))
    (sent / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        find_adapter_base(adapter, None)
    assert caught.value.fix == "Set model.from: hf:a/b@1"
    (sent / "model-2.safetensors").write_bytes(b"")
    assert find_adapter_base(adapter, None) == sent


def test_on_open_weights_a_later_phase_starts_from_the_adapter_and_not_from_the_weights_alone(
    load: Load, mistakes: Mistakes, homing_home: Path, tmp_path: Path
) -> None:
    source = str(write_open_weights(tmp_path / "open", documents()).resolve())
    rl = "rl: {tasks: [{kind: prompts, file: asks.jsonl}], answer_tokens: 8}"
    text = f"name: base\nmodel: {{from: {source}}}\nphases:\n"
    text += "  - {kind: sft, method: lora, data: {chat: [a.jsonl]}}\n" + f"  - {{kind: rl, steps: 5, {rl}}}\n"
    Path("asks.jsonl").write_text('{"ids": [1, 2], "answer": "x"}\n')
    (missing,) = mistakes(text, "train.only=rl")
    assert "rl starts from sft, but no sft checkpoint of base was found" in missing.problem
    run_dir = homing_home / "runs/base-20260101-000000-aaaa"
    sft = adapted(trained(run_dir, load(text), "sft"), Stage("base", address=source), "../../../open")
    phase = load(text, "train.only=rl").run.phases[0]
    assert (phase.init_from, phase.init_base) == (str(sft), source)
    other = Stage("base", address="hf:another/one@1")
    manifest = codec.loads(CheckpointManifest, (sft / file_names.MANIFEST).read_bytes())
    manifest = dataclasses.replace(manifest, lineage=[other, manifest.lineage[-1]])
    (sft / file_names.MANIFEST).write_text(codec.dumps(manifest))
    (wrong,) = mistakes(text, "train.only=rl")
    assert f"It was trained on hf:another/one@1, but model.from is {source}" in wrong.problem


@pytest.mark.acceptance(35, 90)
def test_weights_of_another_model_are_refused_with_both(load: Load, mistakes: Mistakes, tmp_path: Path) -> None:
    folder = trained(tmp_path / "other", load(RUN), "pretrain")
    (wrong,) = mistakes(RUN, "model.layers=3", f"phases.1.init_from={folder}")
    assert "num_layers 2 there, 3 here" in wrong.problem
    (wrong,) = mistakes(RUN, "tokenizer.vocab_size=1024", f"phases.1.init_from={folder}")
    assert "vocab_size 32768 there, 1024 here" in wrong.problem
    assert "tokenizer.vocab_size" in wrong.suggestion


def test_a_run_that_reads_no_text_has_the_vocabulary_of_the_checkpoint_that_it_begins_with(
    load: Load, mistakes: Mistakes, tmp_path: Path
) -> None:
    folder = trained(tmp_path / "first", load(RUN, "tokenizer.vocab_size=512"), "rl")
    vocab = {str(number): number for number in range(512)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    second = RUN.split("phases:")[0].replace("data: {text: [text.txt]}\n", "")
    rl = "rl: {tasks: [{kind: arithmetic}], answer_tokens: 16}"
    second += f"phases:\n  - {{kind: rl, steps: 5, init_from: {folder}, {rl}}}\n"
    loaded = load(second)
    assert loaded.run.model.vocab_size == 512
    assert loaded.run.origin["model.vocab_size"].startswith("init_from: ")
    (wrong,) = mistakes(second, "tokenizer.vocab_size=1024")
    assert "vocab_size 512 there, 1024 here" in wrong.problem
    (folder / "tokenizer.json").write_text("[]")
    assert any("is not a supported tokenizer" in wrong.problem for wrong in mistakes(second))


@pytest.mark.acceptance(96)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("phases.0.data.chat=a.jsonl", "pretraining takes text"),
        ("phases.2.data.text=more.txt", "has both text and chat"),
        ("phases.1.lora.rank=8", "has no effect with method: full"),
        ("phases.1.rl.kl=0.1", "has no effect in a phase of kind mid"),
        ("phases.0.method=lora", "needs trained weights, and there are none yet"),
        ("phases.2.states=int8", "applies only to AdamW's moments"),
        (["phases.0.offload=optimizer", "train.device=cpu"], "has no effect with train.device: cpu"),
        (["phases.2.offload=optimizer", "phases.2.method=lora"], "does not help with method: lora"),
        (["train.parallel=zero3", "phases.2.method=lora"], "zero3 cannot train phases.2 (sft, method: lora)"),
        (["train.parallel=zero2", "phases.0.optimizer=adamw", "phases.0.states=int8"], "int8 does not work with"),
        ("train.parallel=tensor", "homing has no tensor parallelism. Use zero3"),
        ("train.parallel=fsdp", "zero3 is what torch calls FSDP"),
        ("model.from=nowhere", "No open weights"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(mistakes: Mistakes, change: str | list[str], words: str) -> None:
    found = mistakes(RUN, *([change] if isinstance(change, str) else change))
    assert any(words in wrong.problem for wrong in found), found


def test_an_unknown_phase_kind_gets_no_advice_about_its_data(mistakes: Mistakes) -> None:
    problems = [wrong.problem for wrong in mistakes(RUN, "phases.2.kind=dpo")]
    assert any("is not a valid value" in problem for problem in problems)
    assert not any("pretraining takes text" in problem for problem in problems)


def test_the_optimizers_state_may_live_in_the_hosts_memory(load: Load) -> None:
    phases = load(RUN, "phases.0.offload=optimizer").run.phases
    assert [phase.offload for phase in phases] == ["optimizer", "none", "none"]


def test_adapters_take_adamw_and_know_their_matrices(load: Load, mistakes: Mistakes) -> None:
    lora = load(RUN, "phases.2.method=lora", "phases.2.lora.targets=[v_proj, q]").run.phases[2]
    assert lora.optimizer.kind == "adamw"
    assert lora.lora is not None
    assert (lora.lora.targets, lora.lora.alpha) == (["q", "v"], 32.0)
    (wrong,) = mistakes(RUN, "phases.2.method=lora", "phases.2.lora.targets=[gat]")
    assert "Did you mean gate?" in wrong.suggestion


def test_the_smoke_profile_shrinks_every_phase(load: Load) -> None:
    rl = RUN + "  - {kind: rl, steps: 500, rl: {tasks: [{kind: arithmetic}], answer_tokens: 64}}\n"
    loaded = load(rl, is_smoke=True)
    assert [phase.kind for phase in loaded.run.phases] == ["pretrain", "mid", "sft", "rl"]
    last = loaded.run.phases[3].rl
    assert last is not None
    assert (last.prompts_per_step, last.max_new_tokens) == (4, 16)


TOKENIZER: dict[str, object] = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": True, "lstrip": False}],
}


def other_tokenizer() -> dict[str, object]:
    """Of the same size, as a new `prep` of more text makes it: the ids mean other letters."""
    return {**TOKENIZER, "model": {"type": "BPE", "vocab": {"b": 0, "a": 1, "ab": 2}, "merges": ["a b"]}}


@pytest.mark.acceptance(6)
def test_weights_of_another_tokenizer_are_refused_with_both_files_and_the_way_out(
    load: Load, mistakes: Mistakes, homing_home: Path, folder: Path
) -> None:
    start, data = trained(homing_home / "runs/base-1", load(RUN), "mid"), folder / "data" / "base"
    (folder / "models").mkdir()
    start = start.rename(folder / "models" / "base")
    data.mkdir(parents=True)
    (data / file_names.TOKENIZER).write_text(json.dumps(other_tokenizer()))
    assert any("models/base has no tokenizer.json" in warning for warning in load(RUN, "train.only=sft").warnings)

    (start / file_names.TOKENIZER).write_text(json.dumps(TOKENIZER))
    (wrong,) = mistakes(RUN, "train.only=sft")
    assert "models/base/tokenizer.json and data/base/tokenizer.json give different token ids" in wrong.problem
    assert "homing prep base --tokenizer models/base/tokenizer.json" in wrong.suggestion
    (wrong,) = mistakes(RUN, f"phases.1.init_from={start}")
    assert "different tokenizers" in wrong.problem, "named in the run file as found at home"

    # The same ids in other bytes: nothing is wrong.
    written = {"added_tokens": [{"id": 3, "content": "<|endoftext|>", "special": True}], "padding": None}
    written["model"] = {"merges": [["a", "b"]], "vocab": {"ab": 2, "b": 1, "a": 0}, "type": "BPE", "dropout": None}
    (data / file_names.TOKENIZER).write_text(json.dumps(written, indent=4))
    assert load(RUN, "train.only=sft").run.phases[0].init_from == str(start)


def test_the_tokenizer_of_weights_that_are_named_is_the_one_that_prep_takes(load: Load, tmp_path: Path) -> None:
    start = trained(tmp_path / "first", load(RUN, "tokenizer.vocab_size=512"), "pretrain")
    vocab = {str(number): number for number in range(512)}
    (start / file_names.TOKENIZER).write_text(json.dumps({"model": {"vocab": vocab}}))
    going_on = RUN.replace("steps: 10,", f"steps: 10, init_from: {start},")
    loaded = load(going_on, is_for_prep=True)
    assert (loaded.prep.tokenizer, loaded.prep.vocab_size) == (str(start / file_names.TOKENIZER), 512)


def test_a_phase_of_text_in_the_ids_of_an_earlier_tokenizer_is_not_taken_for_prepared(load: Load, folder: Path) -> None:
    place = folder / "data" / "base"
    (place / "mid").mkdir(parents=True)
    (place / file_names.TOKENIZER).write_text(json.dumps(TOKENIZER))
    digest = hashlib.sha256((place / file_names.TOKENIZER).read_bytes()).hexdigest()
    manifest = DataManifest("uint16", 4, digest, [], {"train": Split(9000, 1, 9000, [])}, [], "")
    (place / "mid" / file_names.MANIFEST).write_text(codec.dumps(manifest))
    mid = load(RUN).run.phases[1].data
    assert mid is not None
    assert mid.num_train_tokens == 9000
    (place / file_names.TOKENIZER).write_text(json.dumps(other_tokenizer()))
    loaded = load(RUN)
    assert loaded.run.phases[1].data is not None
    assert loaded.run.phases[1].data.num_train_tokens == 0
    assert any("the tokenizer has changed" in warning for warning in loaded.warnings)


def test_open_weights_with_the_tokenizer_of_others_in_the_data_folder_are_not_ready(
    load: Load, folder: Path, tmp_path: Path
) -> None:
    source = write_open_weights(tmp_path / "open", documents())
    text = f"name: base\nmodel: {{from: {source}}}\nphases:\n  - kind: rl\n    steps: 5\n"
    text += "    rl: {tasks: [{kind: arithmetic}], answer_tokens: 16}\n"
    place = folder / "data" / "base"
    place.mkdir(parents=True)
    (place / "turns.json").write_text("{}")
    (place / file_names.TOKENIZER).write_bytes((source / file_names.TOKENIZER).read_bytes())
    assert load(text).is_prepared
    (place / file_names.TOKENIZER).write_text(json.dumps(TOKENIZER))
    loaded = load(text)
    assert not loaded.is_prepared
    assert any("is not the tokenizer of model.from" in warning for warning in loaded.warnings)


def test_conversation_tokens_match_prep_and_padding_is_shown_separately(load: Load, folder: Path) -> None:
    place = folder / "data" / "base"
    (place / "sft").mkdir(parents=True)
    named = load(RUN).phase_preps[1].named()
    settings = {"order": {"named": named, "context": 128}, "rows_per_epoch": 100, "context": 128}
    splits = {"train": Split(9_000, 90, 40_000, [])}
    manifest = DataManifest("uint16", 4, "", [], splits, [], "", settings=settings)
    (place / "sft" / file_names.MANIFEST).write_text(codec.dumps(manifest))
    messages = "9k tokens of conversations (12.8k tokens with repeats and padding)"
    warned = load(RUN, "phases.2.steps=200", "phases.2.batch_tokens=12800").warnings
    assert any(f"phases.2 reads {messages} (data/base/sft/manifest.json) 200 times" in each for each in warned), warned
    warned = load(RUN.replace("{kind: sft, batch_tokens: 1024,", "{kind: sft, steps: 100,")).warnings
    assert any(f"would read the {messages} " in each for each in warned), warned


def test_unprepared_tokens_are_estimated_as_a_range_or_from_prepared_text(load: Load, folder: Path) -> None:
    size = (folder / "more.txt").stat().st_size
    warned = load(RUN).warnings
    assert any("Not prepared yet: about 1.83k tokens (1.52k to 2.28k by language)" in each for each in warned), warned
    place = folder / "data" / "base"
    place.mkdir(parents=True)
    (place / file_names.TOKENIZER).write_text(json.dumps(TOKENIZER))
    digest = hashlib.sha256((place / file_names.TOKENIZER).read_bytes()).hexdigest()
    manifest = DataManifest("uint16", 4, digest, [], {"train": Split(size // 2, 9, size, [])}, [], "")
    (place / file_names.MANIFEST).write_text(codec.dumps(manifest))
    messages = "phases.1 is not prepared yet: about 4.2k tokens, estimated from the prepared text"
    warned = load(RUN).warnings
    assert any(messages in each for each in warned), warned
