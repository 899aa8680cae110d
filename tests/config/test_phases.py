"""Chains of phases in the run file: what each becomes, which are chosen, and what is refused before renting."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from homing.config import Loaded
from homing.config.adapter_base import find_adapter_base
from homing.config.open_weights import INDEX
from homing.errors import DataError, Mistake
from homing.hf_config import config_of
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, Stage
from homing.wire.run import RunInput

from .test_open_weights import papers
from .test_open_weights import write as write_open_weights

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
    folder = run_dir / names.CHECKPOINTS / kind / names.step_dir(step)
    folder.mkdir(parents=True)
    lineage = [Stage(kind, run_id="base-1", step=step)]
    manifest = CheckpointManifest("base", "base-1", kind, step, 0, True, "", 1, [], lineage=lineage)
    (folder / names.MANIFEST).write_text(codec.dumps(manifest))
    (folder / "config.json").write_text(json.dumps(config_of(loaded.run.model)))
    (folder / names.WEIGHTS).write_bytes(b"")
    return folder


def adapted(folder: Path, before: Stage, told: str) -> Path:
    """The checkpoint made into one of a phase that trained an adapter of the weights `before`."""
    manifest = codec.loads(CheckpointManifest, (folder / names.MANIFEST).read_bytes())
    manifest = dataclasses.replace(manifest, lineage=[before, manifest.lineage[-1]])
    (folder / names.MANIFEST).write_text(codec.dumps(manifest))
    (folder / names.WEIGHTS).rename(folder / names.ADAPTER)
    (folder / names.ADAPTER_CONFIG).write_text(json.dumps({"homing_base_dir": told}))
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


def test_some_phases_start_from_the_newest_final_checkpoint_of_the_one_before(load: Load, homing_home: Path) -> None:
    whole = load(RUN)
    trained(homing_home / "runs/base-20260101-000000-aaaa", whole, "mid")
    newest = trained(homing_home / "runs/base-20260202-000000-bbbb", whole, "mid")
    loaded = load(RUN, "train.only=sft")
    assert [phase.kind for phase in loaded.run.phases] == ["sft"]
    assert loaded.run.phases[0].init_from == str(newest)
    assert loaded.run.origin["phases.0.init_from"] == "found at home"
    assert loaded.run.origin["phases.0.kind"].startswith("run file")
    assert [prep.phase for prep in loaded.phase_preps] == ["sft"]


def test_what_was_fetched_beside_another_run_of_that_name_is_found_too(
    load: Load, homing_home: Path, folder: Path
) -> None:
    whole, models = load(RUN), folder / "models"
    models.mkdir()
    trained(homing_home / "runs/base-1", whole, "pretrain").rename(models / "base")
    beside = trained(homing_home / "runs/base-2", whole, "mid").rename(models / "base-mid")
    assert load(RUN, "train.only=sft").run.phases[0].init_from == str(beside)
    older = codec.loads(CheckpointManifest, (beside / names.MANIFEST).read_bytes())
    newest = trained(homing_home / "runs/base-3", whole, "mid").rename(models / "base-20260303-000000-cccc")
    newer = dataclasses.replace(older, run_id="base-3", made_at=older.made_at + 1)
    (newest / names.MANIFEST).write_text(codec.dumps(newer))
    assert load(RUN, "train.only=sft").run.phases[0].init_from == str(newest), "the one that was made last"


def test_without_one_it_is_said_where_was_looked_and_an_unknown_phase_lists_the_valid_ones(mistakes: Mistakes) -> None:
    (missing,) = mistakes(RUN, "train.only=sft")
    assert "no trained mid or pretrain of base is here" in missing.problem
    found = mistakes(RUN, "train.only=mid+stf")
    assert any("Did you mean sft? This run has pretrain, mid, sft" in mistake.suggestion for mistake in found)


def test_a_phase_after_an_adapter_starts_from_it_and_the_weights_that_it_stood_beside(
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

    # Fetched to where the suggestion says, the adapter too: neither lies in a run directory then.
    (folder / "models").mkdir()
    fetched = base.rename(folder / "models/base-1-pretrain")
    mid.rename(folder / "models/base")
    assert load(RUN, "train.only=sft").run.phases[0].init_base == str(fetched)
    adapted(fetched, Stage("base", address="hf:a/b"), "")
    (nested,) = mistakes(RUN, "train.only=sft")
    assert "an adapter on top of another adapter" in nested.problem


def test_of_weights_that_a_machine_took_from_the_hub_itself_the_papers_here_are_not_enough(
    load: Load, homing_home: Path, tmp_path: Path
) -> None:
    loaded, sent, before = load(RUN), tmp_path / "papers", Stage("base", address="hf:a/b@1")
    adapter = adapted(trained(homing_home / "runs/base-1", loaded, "mid"), before, "../data/base")
    sent.mkdir()
    (sent / INDEX).write_text('{"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}')
    inputs = [RunInput(f"base/{INDEX}", str(sent / INDEX), ""), RunInput("base/model-1.safetensors", "hf:a/b@1/x", "")]
    (adapter / names.RUN).write_text(codec.dumps(dataclasses.replace(loaded.run, inputs=inputs)))
    (sent / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        find_adapter_base(adapter, None)
    assert caught.value.fix == "Set model.from: hf:a/b@1"
    (sent / "model-2.safetensors").write_bytes(b"")
    assert find_adapter_base(adapter, None) == sent


def test_on_open_weights_a_later_phase_starts_from_the_adapter_and_not_from_the_weights_alone(
    load: Load, mistakes: Mistakes, homing_home: Path, tmp_path: Path
) -> None:
    source = str(write_open_weights(tmp_path / "open", papers()).resolve())
    rl = "rl: {tasks: [{kind: prompts, file: asks.jsonl}], answer_tokens: 8}"
    text = f"name: base\nmodel: {{from: {source}}}\nphases:\n"
    text += "  - {kind: sft, method: lora, data: {chat: [a.jsonl]}}\n" + f"  - {{kind: rl, steps: 5, {rl}}}\n"
    Path("asks.jsonl").write_text('{"ids": [1, 2], "answer": "x"}\n')
    (missing,) = mistakes(text, "train.only=rl")
    assert "rl starts from sft, and no trained sft of base is here" in missing.problem
    run_dir = homing_home / "runs/base-20260101-000000-aaaa"
    sft = adapted(trained(run_dir, load(text), "sft"), Stage("base", address=source), "../../../open")
    phase = load(text, "train.only=rl").run.phases[0]
    assert (phase.init_from, phase.init_base) == (str(sft), source)
    other = Stage("base", address="hf:another/one@1")
    manifest = codec.loads(CheckpointManifest, (sft / names.MANIFEST).read_bytes())
    manifest = dataclasses.replace(manifest, lineage=[other, manifest.lineage[-1]])
    (sft / names.MANIFEST).write_text(codec.dumps(manifest))
    (wrong,) = mistakes(text, "train.only=rl")
    assert f"It was trained on hf:another/one@1, and model.from is {source}" in wrong.problem


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
    assert any("is not a tokenizer that can be used" in wrong.problem for wrong in mistakes(second))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("phases.0.data.chat=a.jsonl", "pretraining reads text"),
        ("phases.2.data.text=more.txt", "there is text and chat"),
        ("phases.1.lora.rank=8", "has no effect with method: full"),
        ("phases.1.rl.kl=0.1", "has no effect in a phase of kind mid"),
        ("phases.0.method=lora", "needs trained weights to stand beside"),
        ("phases.2.states=int8", "is about AdamW's moments"),
        (["phases.0.offload=optimizer", "train.device=cpu"], "has no effect with train.device: cpu"),
        (["phases.2.offload=optimizer", "phases.2.method=lora"], "has no use with method: lora"),
        ("model.from=nowhere", "no open weights"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(mistakes: Mistakes, change: str | list[str], words: str) -> None:
    found = mistakes(RUN, *([change] if isinstance(change, str) else change))
    assert any(words in wrong.problem for wrong in found), found


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
