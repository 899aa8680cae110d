"""An adapter folder, as peft writes and opens it: adapter_model.safetensors + adapter_config.json + the tokenizer.

Its proof opens the base by transformers and the adapter by peft, so both must be there.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from homing.errors import UsageError
from homing.install import pip_install
from homing.lm.export.folder import write_tokenizer
from homing.lm.export.opened import Opened
from homing.lm.export.whole import write_json
from homing.lm.model.lora import adapter_config, lora_tensors
from homing.lm.open_weights.save import save_tensors
from homing.wire import names

__all__ = ["open_with_peft", "write_adapter"]


def write_adapter(opened: Opened, folder: Path, base: Path) -> None:
    """`base` is where the weights lie here; on the Hub the adapter names the repository instead."""
    settings = opened.model.lora
    assert settings is not None, "whoever calls has asked for an adapter"
    if (base / names.ADAPTER).is_file():
        raise UsageError(
            what=f"{opened.folder} is an adapter on top of another adapter.",
            why=f"{base} holds no whole weights, so nobody else has what this one was trained on.",
            fix=f"homing export {shlex.quote(str(opened.folder))} --to merged",
        )
    save_tensors({name: t.contiguous() for name, t in lora_tensors(opened.model).items()}, folder / names.ADAPTER)
    run = opened.card.run
    repository, _, revision = _repository(opened, run.base.address if run is not None and run.base is not None else "")
    config = adapter_config(settings, repository or str(base.resolve()))
    if repository and revision:
        config["revision"] = revision
    write_json(folder / names.ADAPTER_CONFIG, config)
    write_tokenizer(opened, folder)


def _repository(opened: Opened, address: str) -> tuple[str, str, str]:
    """OWNER/NAME, @ and commit of the open weights that it stands beside; empty where it began with weights of ours."""
    parts = address.removeprefix("hf:").partition("@")
    try:
        told = json.loads((opened.folder / names.ADAPTER_CONFIG).read_text(encoding="utf-8"))
        is_open = address.startswith("hf:") and told["base_model_name_or_path"] == parts[0]
    except (OSError, ValueError, KeyError, TypeError):
        is_open = False
    return parts if is_open else ("", "", "")


def open_with_peft(base: Path) -> Any:
    """-> a function that opens the adapter folder on these base weights, for `check.prove`."""
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise UsageError(
            what="An adapter is proven by peft, which is not installed.",
            why="Without it nobody has seen that the folder opens.",
            fix=pip_install("export"),
        ) from exc
    from transformers import AutoModelForCausalLM

    def opened(folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        return PeftModel.from_pretrained(model, folder).eval()

    return opened
