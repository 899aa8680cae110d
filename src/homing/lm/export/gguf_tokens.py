"""Converts the tokenizer for llama.cpp: tokens and their types, merges, split pattern, special ids, chat template.

llama.cpp identifies split patterns by name. homing uses GPT-4's pattern, which llama.cpp calls `dbrx`. Llama 3 has the
same pattern, but its name, `llama-bpe`, also makes llama.cpp put <|begin_of_text|> before each text and take whole
words from the vocabulary without merging. Llama 3's tokenizer requests this (`ignore_merges`), but homing's does not.
If llama.cpp has no name for a split pattern, the export fails. Otherwise, llama.cpp would open the file but split about
one word in three differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.export.source_model import Opened
from homing.lm.tokenizer.tokenizer import PAD, read_tokenizer_json
from homing.lm.tokenizer.write_files import name_of_split
from homing.wire import file_names

__all__ = ["GgufTokens", "adds_bos", "gguf_tokens"]

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
# Qwen2's split pattern differs from Llama 3's only in splitting numbers into single digits.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class GgufTokens:
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    adds_bos: bool
    bos_id: int
    eos_id: int
    eot_id: int | None  # id of the token that ends a turn
    pad_id: int | None
    template: str


def gguf_tokens(opened: Opened) -> GgufTokens:
    path = opened.folder / file_names.TOKENIZER
    data = read_tokenizer_json(path)
    by_id = {int(number): token for token, number in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for entry in data.get("added_tokens") or []:
        by_id[int(entry["id"])] = entry["content"]
        kinds[int(entry["id"])] = CONTROL if entry.get("special") else USER_DEFINED
    ids = range(opened.model.shape.vocab_size)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in data["model"]["merges"]]
    ends = opened.end_ids()
    return GgufTokens(
        pre=_split_name(data, path),
        tokens=[by_id.get(number, f"[PAD{number}]") for number in ids],
        kinds=[kinds.get(number, UNUSED) for number in ids],
        merges=merges,
        adds_bos=_adds_bos(data, opened.tokenizer.end_of_text_id),
        bos_id=opened.tokenizer.end_of_text_id,
        eos_id=ends[0],
        eot_id=ends[0] if opened.is_chat else None,
        pad_id=opened.tokenizer.specials.get(PAD),
        template=opened.template.source if opened.template is not None else "",
    )


def adds_bos(opened: Opened) -> bool:
    """Return whether the model's tokenizer puts the begin-of-text token before every text."""
    return _adds_bos(read_tokenizer_json(opened.folder / file_names.TOKENIZER), opened.tokenizer.end_of_text_id)


def _split_name(data: dict[str, Any], path: Path) -> str:
    ignores_merges = bool(data["model"].get("ignore_merges"))
    split = name_of_split(data.get("pre_tokenizer"))
    if split == "gpt2":
        return "gpt-2"
    if split == "gpt4":
        return "llama-bpe" if ignores_merges else "dbrx"
    if _expression(data.get("pre_tokenizer")) == _QWEN2 and not ignores_merges:
        return "qwen2"
    raise DataError(
        what=f"The tokenizer {path} cannot be stored in a GGUF file.",
        why="llama.cpp does not support its pre-tokenizer and would encode text differently than in training.",
        fix=f"Export for transformers: homing export {path.parent} --to hf",
    )


def _expression(pre_tokenizer: Any) -> str:
    parts = (pre_tokenizer or {}).get("pretokenizers") or []
    found = [part.get("pattern", {}).get("Regex", "") for part in parts if part.get("type") == "Split"]
    return str(found[0]) if len(found) == 1 else ""


def _adds_bos(data: dict[str, Any], bos_id: int) -> bool:
    """Return whether the post-processor in tokenizer.json puts the begin-of-text token before every text."""
    processor = data.get("post_processor") or {}
    for part in processor.get("processors") or [processor]:
        if part.get("type") == "TemplateProcessing":
            first = (part.get("single") or [{}])[0].get("SpecialToken", {}).get("id")
            ids = (part.get("special_tokens") or {}).get(first, {}).get("ids", [])
            return bos_id in ids
    return False
