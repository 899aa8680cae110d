"""Loads the model to export: the decoder in fp32, its tokenizer, its chat template, and how it was trained.

a full checkpoint | an adapter checkpoint | any model folder  ->  open_for_export  ->  Opened
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from homing.errors import DataError, UsageError
from homing.lm.data.chat.render import ChatTokens, Renderer
from homing.lm.data.chat.template import ChatTemplate, find_template
from homing.lm.generate.load_adapter import load_with_adapter
from homing.lm.generate.load_model import Card, load_for_use, read_card, verify_files
from homing.lm.model import Decoder
from homing.lm.model.open_weights import WeightFiles, find_weights
from homing.lm.model.open_weights.load_and_save import DTYPES
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.tokenizer import IM_START
from homing.wire import file_names

__all__ = ["CHAT_PHASES", "Opened", "open_for_export"]

CHAT_PHASES = ("sft", "rl")


@dataclass
class Opened:
    folder: Path
    card: Card
    files: WeightFiles  # the folder's weight files; for an adapter, these do not include the base weights
    model: Decoder  # the decoder in fp32, with unmerged adapters if there are any
    tokenizer: Tokenizer
    tokenizer_config: dict[str, Any]
    template: ChatTemplate | None
    base: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json of the initial weights

    @property
    def is_adapter(self) -> bool:
        return self.model.lora is not None

    @property
    def is_chat(self) -> bool:
        """True if the model was trained on chats.

        Third-party weights count as chat models if they have a template, because base models have none.
        """
        is_foreign = not self.card.phase or (self.card.run is not None and self.card.run.base is not None)
        return self.template is not None and (is_foreign or self.card.phase in CHAT_PHASES)

    @property
    def was_taught_turns(self) -> bool:
        """True if the last phase trained the model on chat turns, so that users of the export need the template.

        In an rl phase, prompts are formatted as chat turns if there is a template or the tokenizer has the ChatML
        markers. Otherwise prompts are plain ids.
        """
        phases = self.card.run.phases if self.card.run is not None else []
        of_chat = [phase.kind for phase in phases if phase.data is not None and phase.data.kind == "chat"]
        asks = self.card.phase == "rl" and (self.template is not None or IM_START in self.tokenizer.specials)
        return asks or self.card.phase == "sft" or self.card.phase in of_chat

    @property
    def stored_dtype(self) -> torch.dtype:
        return DTYPES[self.files.main_dtype]

    def end_ids(self) -> list[int]:
        """Return the ids at which generation stops. For a chat model, the end-of-turn id comes first."""
        upstream = _ids(self.generation.get("eos_token_id"))
        if not self.is_chat or self.template is None:
            return list(dict.fromkeys([*upstream, *self.tokenizer.stop_ids]))
        end = Renderer(self.template, ChatTokens(self.folder)).end_id()
        return list(dict.fromkeys([*([] if end is None else [end]), *(upstream or self.tokenizer.stop_ids)]))


def open_for_export(folder: Path, *, base: Path | None = None, is_adapter_kept: bool = False) -> Opened:
    """Load a model for export, with any adapter unmerged.

    Raises UsageError if `is_adapter_kept` is set but the folder contains no adapter.
    """
    card = read_card(folder)
    files = None
    if card.adapter_phase is not None:
        assert card.run is not None
        verify_files(folder, card)
        files = find_weights(folder)
        cpu = torch.device("cpu")
        model = load_with_adapter(files, card.run, card.adapter_phase, card.base_sha256, cpu, base).eval()
        tokenizer = load_tokenizer(folder / file_names.TOKENIZER)
    elif is_adapter_kept:
        raise UsageError(
            what=f"{folder} has no adapter.",
            why="All weights were trained (method: full), so there is no separate adapter.",
            fix=f"Export the whole model: homing export {shlex.quote(str(folder))} --to hf",
        )
    else:
        model, tokenizer = load_for_use(folder, "cpu", precision="fp32")
        files = find_weights(folder)
    tokenizer_config, generation = (
        _read_json(folder / file_names.TOKENIZER_CONFIG),
        _read_json(folder / file_names.GENERATION),
    )
    return Opened(folder, card, files, model, tokenizer, tokenizer_config, find_template(folder), base, generation)


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]


def _read_json(path: Path) -> dict[str, Any]:
    """Return the parsed file, or {} if it does not exist."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(f"{path} cannot be read.", why=str(exc), fix="Fetch the folder again.") from exc
    return data if isinstance(data, dict) else {}
