"""An adapter folder as peft writes and opens it: adapter_model.safetensors + adapter_config.json + the tokenizer.

The check opens the base with transformers and the adapter with peft, so both packages must be installed.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from homing.errors import UsageError
from homing.install import pip_install
from homing.lm.export.atomic_folder import write_json
from homing.lm.export.hf_folder import write_tokenizer
from homing.lm.export.source_model import Opened
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.model.lora import adapter_config
from homing.lm.model.open_weights.write_weights import save_tensors
from homing.wire import file_names

__all__ = ["open_with_peft", "write_adapter"]


def write_adapter(opened: Opened, folder: Path, base: Path) -> None:
    """Write the adapter folder.

    `base`: the local base weights; if they are from the Hub, the config names the repository.
    """
    settings = opened.model.lora
    assert settings is not None, "whoever calls has asked for an adapter"
    if (base / file_names.ADAPTER).is_file():
        raise UsageError(
            what=f"{opened.folder} is an adapter on top of another adapter.",
            why=f"{base} holds no full weights, so peft could not load what this adapter was trained on.",
            fix=f"homing export {shlex.quote(str(opened.folder))} --to merged",
        )
    save_tensors({name: t.contiguous() for name, t in lora_tensors(opened.model).items()}, folder / file_names.ADAPTER)
    run = opened.card.run
    repository, _, revision = _repository(opened, run.base.address if run is not None and run.base is not None else "")
    config = adapter_config(settings, repository or str(base.resolve()))
    if repository and revision:
        config["revision"] = revision
    write_json(folder / file_names.ADAPTER_CONFIG, config)
    write_tokenizer(opened, folder)


def _repository(opened: Opened, address: str) -> tuple[str, str, str]:
    """Return OWNER/NAME, @ and commit of the open weights used as the base; empty if the base is our own weights."""
    parts = address.removeprefix("hf:").partition("@")
    try:
        config = json.loads((opened.folder / file_names.ADAPTER_CONFIG).read_text(encoding="utf-8"))
        is_open = address.startswith("hf:") and config["base_model_name_or_path"] == parts[0]
    except (OSError, ValueError, KeyError, TypeError):
        is_open = False
    return parts if is_open else ("", "", "")


def open_with_peft(base: Path) -> Any:
    """Return a function that opens the adapter folder on these base weights, for `check.prove`."""
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise UsageError(
            what="Checking an adapter needs peft, which is not installed.",
            why="homing loads every exported adapter with peft before it finishes.",
            fix=pip_install("export"),
        ) from exc
    from transformers import AutoModelForCausalLM

    def opened(folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        return PeftModel.from_pretrained(model, folder).eval()

    return opened
