"""Checkpoints of every kind that can be exported, with a real tokenizer, made without training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.lm.tiny import make_data, make_run
from torch import Tensor

from homing.hf_config import config_of
from homing.lm.model import Decoder, count_params
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.model.lora import adapter_config, add_lora, freeze, merge, merged_sha256
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.tokenizer.train_bpe import learn_merges
from homing.lm.tokenizer.write_files import build_tokenizer_json, write_extras
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash
from homing.wire.run_json import Lora, Run

__all__ = ["SHAPES", "make_adapter", "make_adapter_on", "make_checkpoint", "seal", "write_tokenizer"]

WORDS = "the cat sat on a mat and the dog ran home to eat red fish at night, don't it? 12345 übel 日本 👍\n"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-tied": {"arch": "llama", "is_tied": True},
    "qwen2": {"arch": "qwen2", "head_size": 8},
    "qwen3": {"arch": "qwen3"},
    "swift": {"family": "swift", "arch": "swift"},
}


def write_tokenizer(folder: Path, split: str = "gpt4") -> None:
    merges = learn_merges([WORDS.encode() * 50], num_merges=40, split=split)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file_names.TOKENIZER).write_text(build_tokenizer_json(merges, SPECIALS["standard"], split))
    write_extras(folder)


def make_checkpoint(
    folder: Path, kind: str = "qwen3", *, phase: str = "sft", split: str = "gpt4", seed: int = 3, **changes: Any
) -> Decoder:
    write_tokenizer(folder, split)
    vocab_size = len(json.loads((folder / file_names.TOKENIZER).read_text())["model"]["vocab"])
    shape: dict[str, Any] = {
        "family": "stock", "num_layers": 2, "width": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 16,
        "ffn_width": 64, "context": 128, "vocab_size": vocab_size, "is_tied": False, "rope_base": 10000.0,
    }  # fmt: skip
    run = _run(folder.parent / "data", {**shape, **SHAPES[kind], **changes}, phase)
    model = Decoder(run.model)
    model.init_weights(seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        if model.lm_head is not None:
            model.lm_head.weight.mul_(4.0)  # greedy choices that no rounding can change
    save_file(model.weights_for_disk(), folder / file_names.WEIGHTS)
    _write_run_documents(folder, run)
    seal(folder, phase)
    return model


def _run(data_dir: Path, shape: dict[str, Any], phase: str) -> Run:
    if not data_dir.exists():
        make_data(data_dir, num_documents=20)
    run = make_run(data_dir)
    made = dataclasses.replace(run.model, **shape)
    sizes = dataclasses.replace(run.sizes, num_params=sum(count_params(made).values()))
    phases = [dataclasses.replace(run.phases[0], kind=phase)]
    return dataclasses.replace(run, model=made, sizes=sizes, phases=phases)


def _write_run_documents(folder: Path, run: Run) -> None:
    sha256 = hashlib.sha256((folder / file_names.TOKENIZER).read_bytes()).hexdigest()
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer_sha256=sha256))
    (folder / file_names.RUN).write_text(codec.dumps(run))
    (folder / "config.json").write_text(json.dumps(config_of(run.model)))


def seal(folder: Path, phase: str) -> None:
    files = [
        FileHash(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if path.name != file_names.MANIFEST
    ]
    manifest = CheckpointManifest(
        "tiny", "tiny-20260101-000000-abcd", phase, 12, 3072, True, "", 7, files,
        val_loss=1.25, val_bits_per_byte=0.9,
    )  # fmt: skip
    (folder / file_names.MANIFEST).write_text(codec.dumps(manifest))


def make_adapter(folder: Path, base: Path, kind: str = "qwen2", **lora: Any) -> Decoder:
    """A checkpoint of method lora on the weights in `base`; returns the adapted model."""
    model = make_checkpoint(base, kind)
    make_checkpoint(folder, kind)
    sha256 = _adapt(model, Lora(**{"rank": 4, "alpha": 8.0, **lora}), folder, "sft", init_from=str(base))
    _write_adapter(model, folder, "sft", {"homing_base_sha256": sha256})
    return model.eval()


@torch.no_grad()
def make_adapter_on(first: Decoder, folder: Path, base_dir: str) -> Tensor:
    """The checkpoint of a phase of rl with an adapter on top of `first`; returns logits of the two together."""
    make_checkpoint(folder, first.shape.arch, phase="rl")
    below = json.loads((folder.parent / base_dir / file_names.ADAPTER_CONFIG).read_text())["homing_base_sha256"]
    assert first.lora is not None
    sha256 = merged_sha256(below, first.lora, lora_tensors(first))
    merge(first)
    _adapt(first, Lora(rank=2, alpha=4.0), folder, "rl")
    seen_from_run = str(Path("checkpoints/rl") / base_dir)
    _write_adapter(first, folder, "rl", {"homing_base_sha256": sha256, "homing_base_dir": seen_from_run})
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(4))
    logits: Tensor = first.eval()(ids)
    return logits


def _adapt(model: Decoder, settings: Lora, folder: Path, kind: str, **phase_keys: Any) -> str:
    """Freeze the model and add adapters with non-zero weights; return the hash of the base."""
    run = codec.loads(Run, (folder / file_names.RUN).read_bytes())
    phase = dataclasses.replace(run.phases[0], kind=kind, method="lora", lora=settings, **phase_keys)
    sha256 = freeze(model, "fp32")
    add_lora(model, settings, seed=run.seed)
    with torch.no_grad():
        for number, (name, tensor) in enumerate(sorted(lora_tensors(model).items())):
            if "magnitude" in name:
                tensor.mul_(1.1)
            else:
                tensor.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(number))
    _write_run_documents(folder, dataclasses.replace(run, phases=[phase]))
    return sha256


def _write_adapter(model: Decoder, folder: Path, kind: str, messages: dict[str, str]) -> None:
    assert model.lora is not None
    (folder / file_names.WEIGHTS).unlink()
    save_file(model.weights_for_disk(), folder / file_names.ADAPTER)
    (folder / file_names.ADAPTER_CONFIG).write_text(json.dumps({**adapter_config(model.lora, "base"), **messages}))
    seal(folder, kind)
