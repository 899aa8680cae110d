"""What is to be exported, opened once: the decoder in fp32, its tokenizer, its template, and how it was made.

a checkpoint of ours | an adapter's checkpoint | anybody's folder  ->  open_for_export  ->  Opened
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from homing.errors import DataError, UsageError
from homing.lm.chat.render import Renderer
from homing.lm.chat.template import ChatTemplate, find_template
from homing.lm.chat.tokens import ChatTokens
from homing.lm.generate.adapted import load_with_adapter
from homing.lm.generate.load import Card, load_for_use, read_card, verify_files
from homing.lm.model import Decoder
from homing.lm.open_weights import WeightFiles, find_weights
from homing.lm.open_weights.load import DTYPES
from homing.lm.tokenizer import Tokenizer, load_tokenizer
from homing.lm.tokenizer.specials import IM_START
from homing.wire import names

__all__ = ["CHAT_PHASES", "Opened", "open_for_export"]

CHAT_PHASES = ("sft", "rl")


@dataclass
class Opened:
    folder: Path
    card: Card
    files: WeightFiles  # of the folder: the adapter's alone, where it is one
    model: Decoder  # in fp32; with its adapters beside it where there are some
    tokenizer: Tokenizer
    tokenizer_config: dict[str, Any]
    template: ChatTemplate | None
    base: Path | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json of the weights that it began with

    @property
    def is_adapter(self) -> bool:
        return self.model.lora is not None

    @property
    def is_chat(self) -> bool:
        """Whether it was taught to answer. Of somebody's weights the template says so: base models have none."""
        is_foreign = not self.card.phase or (self.card.run is not None and self.card.run.base is not None)
        return self.template is not None and (is_foreign or self.card.phase in CHAT_PHASES)

    @property
    def was_taught_turns(self) -> bool:
        """Whether its last phase of ours asked it in turns: then a reader needs the template that wrote them. rl asks
        so where there is one, or the tokenizer has the marks of ChatML; else its questions are bare ids."""
        phases = self.card.run.phases if self.card.run is not None else []
        of_chat = [phase.kind for phase in phases if phase.data is not None and phase.data.kind == "chat"]
        asks = self.card.phase == "rl" and (self.template is not None or IM_START in self.tokenizer.specials)
        return asks or self.card.phase == "sft" or self.card.phase in of_chat

    @property
    def stored_dtype(self) -> torch.dtype:
        return DTYPES[self.files.main_dtype]

    def end_ids(self) -> list[int]:
        """The ids at which a reader stops; the end of a turn first, where it talks in turns."""
        theirs = _ids(self.generation.get("eos_token_id"))
        if not self.is_chat or self.template is None:
            return list(dict.fromkeys([*theirs, *self.tokenizer.stop_ids]))
        end = Renderer(self.template, ChatTokens(self.folder)).end_id()
        return list(dict.fromkeys([*([] if end is None else [end]), *(theirs or self.tokenizer.stop_ids)]))


def open_for_export(folder: Path, *, base: Path | None = None, is_adapter_kept: bool = False) -> Opened:
    """`is_adapter_kept`: adapters stay beside the weights; else they are merged by whoever writes the weights."""
    card = read_card(folder)
    files = None
    if card.adapter_phase is not None:
        assert card.run is not None
        verify_files(folder, card)
        files = find_weights(folder)
        cpu = torch.device("cpu")
        model = load_with_adapter(files, card.run, card.adapter_phase, card.base_sha256, cpu, base).eval()
        tokenizer = load_tokenizer(folder / names.TOKENIZER)
    elif is_adapter_kept:
        raise UsageError(
            what=f"{folder} has no adapter.",
            why="Its weights were trained as a whole (method: full), so there is nothing beside them.",
            fix=f"homing export {shlex.quote(str(folder))} --to hf",
        )
    else:
        model, tokenizer = load_for_use(folder, "cpu", precision="fp32")
        files = find_weights(folder)
    told, generation = _read_json(folder / names.TOKENIZER_CONFIG), _read_json(folder / names.GENERATION)
    return Opened(folder, card, files, model, tokenizer, told, find_template(folder), base, generation)


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]


def _read_json(path: Path) -> dict[str, Any]:
    """Nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise DataError(f"{path} cannot be read.", why=str(exc), fix="Fetch the folder again.") from exc
    return data if isinstance(data, dict) else {}
