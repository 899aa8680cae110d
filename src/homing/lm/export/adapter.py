"""An adapter folder, as peft writes and opens it: adapter_model.safetensors + adapter_config.json + the tokenizer.

Its proof opens the base by transformers and the adapter by peft, so both must be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from homing.errors import UsageError
from homing.lm.export.folder import write_tokenizer
from homing.lm.export.opened import Opened
from homing.lm.export.whole import write_json
from homing.lm.model.lora import adapter_config, lora_tensors

__all__ = ["ADAPTER", "ADAPTER_CONFIG", "open_with_peft", "write_adapter"]

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(opened: Opened, folder: Path, base: Path) -> None:
    """`base` is where the weights lie here; on the Hub the adapter names the repository instead."""
    settings = opened.model.lora
    assert settings is not None, "whoever calls has asked for an adapter"
    run = opened.card.run
    address = run.base.address if run is not None and run.base is not None else ""
    named = address.removeprefix("hf:").split("@")[0] if address.startswith("hf:") else str(base)
    save_file({name: t.contiguous() for name, t in lora_tensors(opened.model).items()}, folder / ADAPTER)
    config = adapter_config(settings, named)
    if address.startswith("hf:") and "@" in address:
        config["revision"] = address.split("@")[1]
    write_json(folder / ADAPTER_CONFIG, config)
    write_tokenizer(opened, folder)


def open_with_peft(base: Path) -> Any:
    """-> a function that opens the adapter folder on these base weights, for `check.prove`."""
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise UsageError(
            what="An adapter is proven by peft, which is not installed.",
            why="Without it nobody has seen that the folder opens.",
            fix="pip install peft",
        ) from exc
    from transformers import AutoModelForCausalLM

    def opened(folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        return PeftModel.from_pretrained(model, folder).eval()

    return opened
