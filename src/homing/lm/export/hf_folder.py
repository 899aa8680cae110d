"""Writes folders in Hugging Face's formats: a model that transformers opens, or an adapter that peft opens.

A model (vLLM and SGLang also read this format, but homing does not test them):

model.safetensors (or shards)   config.json            generation_config.json
tokenizer.json                  tokenizer_config.json  special_tokens_map.json
swift only: the modeling file, which transformers runs with trust_remote_code

An adapter: adapter_model.safetensors + adapter_config.json + the tokenizer. The check opens the base with transformers
and the adapter with peft, so both packages must be installed.
"""

from __future__ import annotations

import json
import shlex
import shutil
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch

from homing.errors import UsageError
from homing.hf_config import SWIFT, SWIFT_CLASS, config_of
from homing.lm.export.source_model import Opened
from homing.lm.model.frozen_linear import lora_tensors
from homing.lm.model.lora import adapter_config
from homing.lm.model.open_weights import save_weights
from homing.lm.model.open_weights.load_and_save import save_tensors
from homing.lm.tokenizer.tokenizer import END_OF_TEXT, PAD
from homing.pip_command import pip_install
from homing.wire import file_names

__all__ = ["CODE", "open_with_peft", "write_adapter", "write_hf", "write_json", "write_tokenizer"]

CODE = ("configuration_homing_swift.py", "modeling_homing_swift.py")


def write_hf(opened: Opened, folder: Path, dtype: torch.dtype) -> None:
    shape, ends = opened.model.shape, opened.end_ids()
    save_weights(opened.model, folder, dtype=dtype)
    config = config_of(shape, end_of_text_id=opened.tokenizer.end_of_text_id, chat_end_id=ends[0])
    name = str(dtype).removeprefix("torch.")
    config |= {"torch_dtype": name, "dtype": name}
    if shape.family == SWIFT:
        stems = [file.removesuffix(".py") for file in CODE]
        config["auto_map"] = {
            "AutoConfig": f"{stems[0]}.HomingSwiftConfig",
            "AutoModelForCausalLM": f"{stems[1]}.{SWIFT_CLASS}",
        }
        for file in CODE:
            source = package_files("homing.lm.export") / "swift_code" / file
            (folder / file).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    write_json(folder / "config.json", config)
    write_json(folder / file_names.GENERATION, _generation(opened, ends))
    write_tokenizer(opened, folder)


def _generation(opened: Opened, ends: list[int]) -> dict[str, Any]:
    """Return the initial weights' generation config, or a new one if they have none, with `ends` as the eos ids."""
    if opened.generation:
        upstream = opened.generation.get("eos_token_id")
        is_same = ends == (upstream if isinstance(upstream, list) else [upstream])
        return opened.generation if is_same else {**opened.generation, "eos_token_id": ends}
    generation = {"bos_token_id": opened.tokenizer.end_of_text_id, "eos_token_id": ends, "do_sample": True}
    if PAD in opened.tokenizer.specials:
        generation["pad_token_id"] = opened.tokenizer.specials[PAD]
    return generation


def write_tokenizer(opened: Opened, folder: Path) -> None:
    """Copy tokenizer.json unchanged, and write the files next to it, including the chat template."""
    shutil.copyfile(opened.folder / file_names.TOKENIZER, folder / file_names.TOKENIZER)
    config = {**_own_tokens(opened), **opened.tokenizer_config}
    # Put the template into tokenizer_config.json too, for older software, unless that has a list of named templates.
    if opened.template is not None and not isinstance(config.get("chat_template"), list):
        config["chat_template"] = opened.template.source
    if opened.is_chat:
        by_id = {number: name for name, number in opened.tokenizer.specials.items()}
        config["eos_token"] = by_id.get(opened.end_ids()[0], config.get("eos_token"))
    config["model_max_length"] = opened.model.shape.max_context or opened.model.shape.context
    write_json(folder / file_names.TOKENIZER_CONFIG, config)
    tokens = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    write_json(folder / "special_tokens_map.json", tokens)


def _own_tokens(opened: Opened) -> dict[str, Any]:
    by_id = {number: name for name, number in opened.tokenizer.specials.items()}
    mark = by_id[opened.tokenizer.end_of_text_id]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": mark,
        "eos_token": by_id[opened.tokenizer.stop_ids[0]],
        "pad_token": PAD if PAD in opened.tokenizer.specials else END_OF_TEXT if mark == END_OF_TEXT else mark,
        "clean_up_tokenization_spaces": False,
    }


# -- adapters ----------------------------------------------------------------------------------------------------------


def write_adapter(opened: Opened, folder: Path, base: Path) -> None:
    """Write the adapter folder.

    `base` is the local folder with the base weights. If they are from the Hub, the config names their repository.
    """
    settings = opened.model.lora
    assert settings is not None, "the model must have an adapter"
    if (base / file_names.ADAPTER).is_file():
        raise UsageError(
            what=f"{opened.folder} is an adapter on top of another adapter.",
            why=f"{base} contains no full weights, so peft could not load the model that this adapter was trained on.",
            fix=f"Merge it instead: homing export {shlex.quote(str(opened.folder))} --to merged",
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
    """Split the base's address into OWNER/NAME, "@" and commit; return empty strings if it is not a Hub model."""
    parts = address.removeprefix("hf:").partition("@")
    try:
        config = json.loads((opened.folder / file_names.ADAPTER_CONFIG).read_text(encoding="utf-8"))
        is_open = address.startswith("hf:") and config["base_model_name_or_path"] == parts[0]
    except (OSError, ValueError, KeyError, TypeError):
        is_open = False
    return parts if is_open else ("", "", "")


def open_with_peft(base: Path) -> Any:
    """Return a function for `check_export.prove` that opens an adapter folder on top of the weights in `base`."""
    try:
        from peft import PeftModel
    except ImportError as exc:
        raise UsageError(
            what="Exporting an adapter needs peft, which is not installed.",
            why="homing checks every exported adapter by loading it with peft.",
            fix=pip_install("export"),
        ) from exc
    from transformers import AutoModelForCausalLM

    def opened(folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
        return PeftModel.from_pretrained(model, folder).eval()

    return opened


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
