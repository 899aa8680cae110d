"""How text is split into words before merging: two regular expressions, and nothing else.

Each must be one that every reader of tokenizer.json spells the same way: rustbpe and `tokenizers` take the expression,
gigatoken and llama.cpp only know it by name, so an expression of one's own would train here and open nowhere.
"""

from __future__ import annotations

from typing import Any

from homing.errors import DataError

__all__ = ["SPLITS", "name_of_split", "pattern_named", "pre_tokenizer_named"]

# Character for character the expression in Llama 3's tokenizer.json; GPT-4's splits text the same way.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"gpt2": _GPT2, "gpt4": _GPT4}


def pattern_named(name: str) -> str:
    if name not in SPLITS:
        raise DataError(
            what=f"There is no split called {name!r}.",
            why=f"Known: {', '.join(SPLITS)}. Another would be refused by the encoder and by llama.cpp.",
            fix="Set the tokenizer's split to gpt4 or gpt2.",
        )
    return SPLITS[name]


def pre_tokenizer_named(name: str) -> Any:
    """The split as `tokenizers` writes it: GPT-2's has a switch of its own, the other is spelled out."""
    from tokenizers import Regex, pre_tokenizers

    if name == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern_named(name)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def name_of_split(pre_tokenizer: Any) -> str | None:
    """Which of ours a tokenizer.json's `pre_tokenizer` is, or None."""
    if not isinstance(pre_tokenizer, dict):
        return None
    if pre_tokenizer.get("type") == "ByteLevel":
        is_gpt2 = pre_tokenizer.get("use_regex", True) and not pre_tokenizer.get("add_prefix_space", True)
        return "gpt2" if is_gpt2 else None
    parts = pre_tokenizer.get("pretokenizers") or []
    if pre_tokenizer.get("type") != "Sequence" or [part.get("type") for part in parts] != ["Split", "ByteLevel"]:
        return None
    words, as_bytes = parts
    is_plain = words.get("behavior") == "Isolated" and not words.get("invert") and not as_bytes.get("use_regex", True)
    is_ours = is_plain and not as_bytes.get("add_prefix_space", True)
    return "gpt4" if is_ours and words.get("pattern") == {"Regex": _GPT4} else None
