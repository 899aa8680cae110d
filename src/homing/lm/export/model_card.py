"""Writes the model card, a README.md that contains only information from the model's records.

The card has front matter for the Hub, followed by data, phases, cost, evaluation, checks, and instructions for use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from homing.hf_config import SWIFT
from homing.lm.export.gguf_file import adds_bos
from homing.lm.export.source_model import CHAT_PHASES, Opened
from homing.lm.model.model_shape import count_params
from homing.units import format_count
from homing.wire.checkpoint_manifest import MISSING_REWARD, CheckpointManifest, figure_of
from homing.wire.run_json import Phase, Run

__all__ = ["LISTED", "Facts", "write_card"]

# The license names on the Hub's list. The Hub rejects a card with any other name, except `other`.
LISTED = frozenset(
    (
        *(
            "apache-2.0",
            "mit",
            "bsd-2-clause",
            "bsd-3-clause",
            "isc",
            "mpl-2.0",
            "unlicense",
            "gpl-2.0",
            "gpl-3.0",
            "lgpl-3.0",
            "agpl-3.0",
        ),
        *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0"),
        *(
            "openrail",
            "llama2",
            "llama3",
            "llama3.1",
            "llama3.2",
            "llama3.3",
            "llama4",
            "gemma",
            "odc-by",
            "unknown",
            "other",
        ),
    )
)


@dataclass(frozen=True)
class Facts:
    """Facts that the caller supplies, because the weights do not contain them. "" means unknown."""

    name: str
    licence: str = ""  # an SPDX name from the Hub's list
    cost: str = ""  # a sentence
    evaluation: Sequence[tuple[str, str]] = ()  # (metric, value), in addition to those in the checkpoint's manifest
    version: str = ""  # of homing


def write_card(
    opened: Opened,
    facts: Facts,
    manifest: CheckpointManifest | None,
    checked: Sequence[str],
    *,
    kind: str,
    note: str = "",
    gguf: str = "",
) -> str:
    """Return the text of README.md. `gguf`: the name of the GGUF file, if the export has one."""
    run = opened.card.run
    parts = [
        _front_matter(opened, facts, run, kind),
        f"# {facts.name}",
        _opening(opened, facts, kind),
        "## How it was made",
        *_making(run, manifest),
        "## Cost",
        facts.cost or "The cost is not recorded with these weights.",
        "## Evaluation",
        _evaluation(facts, manifest),
        "## Licence",
        facts.licence or "Not specified. Set it with `homing export --licence NAME`.",
        "## Checks before publication",
        "\n".join(f"- {sentence[:1].upper()}{sentence[1:]}" for sentence in checked),
        "## How to use it",
        _usage(opened, kind, facts.name, gguf),
        *([f"Note: {note}"] if note else []),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(opened: Opened, facts: Facts, run: Run | None, kind: str) -> str:
    lines = ["---"]
    if facts.licence in LISTED:
        lines.append(f"license: {facts.licence}")
    elif facts.licence:
        lines += ["license: other", f"license_name: {json.dumps(facts.licence)}"]
    lines += [f"library_name: {'peft' if kind == 'adapter' else 'transformers'}", "pipeline_tag: text-generation"]
    if run is not None and run.base is not None and run.base.address.startswith("hf:"):
        lines.append(f"base_model: {json.dumps(run.base.address.removeprefix('hf:').split('@')[0])}")
    lines += ["tags:", "- homing", f"- {opened.model.shape.arch}", "---"]
    return "\n".join(lines)


def _opening(opened: Opened, facts: Facts, kind: str) -> str:
    shape = opened.model.shape
    what = "An adapter for a" if kind == "adapter" else "A"
    what += f" {shape.arch} decoder with {format_count(sum(count_params(shape).values()))} parameters"
    seen = f"{shape.num_layers} layers, width {shape.width}, context {shape.context:,}, vocabulary {shape.vocab_size:,}"
    if opened.is_chat:
        talks = "It is a chat model."
    elif opened.card.phase in CHAT_PHASES:
        talks = "It was trained on chats, but has no chat template."
    else:
        talks = "It completes text; it was not trained to chat."
    return f"{what} ({seen}), trained with homing{f' {facts.version}' if facts.version else ''}. {talks}"


def _making(run: Run | None, manifest: CheckpointManifest | None) -> list[str]:
    if run is None:
        return ["No record of their training is stored with these weights."]
    lines = [f"- run: `{run.id or run.name}`" + (f", {manifest.phase} step {manifest.step:,}" if manifest else "")]
    if run.base is not None:
        lines.append(f"- initialized from open weights: `{run.base.address}`" + _licence_of(run))
    if run.data.manifest_sha256:  # a run without a pretrain phase may have no text
        amount = f"{run.data.num_train_tokens:,} tokens, manifest `{run.data.manifest_sha256[:16]}`"
        lines.append(f"- text data: {amount}")
    lines.append(f"- tokenizer: `{run.data.tokenizer_sha256[:16]}`, {run.model.vocab_size:,} tokens in the vocabulary")
    lines.append(f"- seed {run.seed}, code version {run.code_version or 'unknown'}")
    if manifest is not None and manifest.lineage:
        return ["\n".join(lines), _lineage(manifest)]
    table = ["| phase | method | steps | tokens per step | optimizer | rate |", "|---|---|---|---|---|---|"]
    for phase in run.phases:
        table.append(_phase_row(phase))
        if manifest is not None and phase.kind == manifest.phase:
            break  # omit later phases, because these weights were saved before them
    return ["\n".join(lines), "\n".join(table)]


def _lineage(manifest: CheckpointManifest) -> str:
    """Return a table of all phases in which the weights were trained, first to last, as recorded in the checkpoint."""
    rows = ["| phase | method | steps | tokens | held out | data | from |", "|---|---|---|---|---|---|---|"]
    for stage in manifest.lineage:
        called = figure_of(stage.phase).removeprefix("held-out ")
        held_out = "" if stage.val_loss is None else f"{called} {stage.val_loss:.4f}"
        data = f"`{stage.data_sha256[:16]}`" if stage.data_sha256 else ""
        cells = [stage.phase, stage.method, f"{stage.step:,}", f"{stage.num_tokens:,}", held_out, data]
        rows.append(f"| {' | '.join(cells)} | {stage.address or stage.run_id} |")
    return "\n".join(rows)


def _licence_of(run: Run) -> str:
    return f" ({run.base.licence})" if run.base is not None and run.base.licence else ""


def _phase_row(phase: Phase) -> str:
    optimizer = phase.optimizer
    cells = [phase.kind, phase.method, f"{phase.num_steps:,}", f"{phase.batch_tokens:,}", optimizer.kind]
    return f"| {' | '.join(cells)} | {optimizer.lr:g} |"


def _evaluation(facts: Facts, manifest: CheckpointManifest | None) -> str:
    rows = []
    if manifest is not None and manifest.val_loss is not None:
        called = figure_of(manifest.phase)
        is_reward = called == MISSING_REWARD
        of = " on held-out questions (pass_reward minus their mean reward)" if is_reward else ", nats per token"
        rows.append((called + of, f"{manifest.val_loss:.4f}"))
    if manifest is not None and manifest.val_bits_per_byte is not None:
        rows.append(("held-out bits per byte", f"{manifest.val_bits_per_byte:.4f}"))
    rows += list(facts.evaluation)
    if not rows:
        return "No evaluation results are stored with these weights."
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _usage(opened: Opened, kind: str, name: str, gguf: str) -> str:
    if kind == "ollama":
        return f"Run `ollama create {name} -f Modelfile && ollama run {name}`, or use any program built on llama.cpp."
    if kind == "gguf":
        return f"Run `llama-cli -m {gguf}`, or use any program built on llama.cpp."
    if kind == "adapter":
        return (
            "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
            'model = AutoPeftModelForCausalLM.from_pretrained(".")\n```'
        )
    trust = ", trust_remote_code=True" if opened.model.shape.family == SWIFT else ""
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{trust})\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\n' + _with_lm_eval(opened, trust.replace(" ", ""))
    )


def _with_lm_eval(opened: Opened, trust: str) -> str:
    """Return instructions for evaluating the model with lm-eval.

    lm-eval itself puts the begin-of-text token before each text of a rolling task. Unless configured otherwise, it also
    lets the tokenizer add one. The text would then begin with two such tokens, which never occurred in training.
    """
    if not adds_bos(opened):
        return f"lm-eval: `lm_eval --model hf --model_args pretrained=.{trust} --tasks wikitext`"
    return (
        f"lm-eval: `lm_eval --model hf --model_args pretrained=.{trust},add_bos_token=False --tasks wikitext`. Without"
        " `add_bos_token=False`, lm-eval starts each text of a rolling task (bits per byte, perplexity) with two"
        " begin-of-text tokens and reports a figure that is too high."
    )
