"""Split patterns: how text is split into words before merging. There are two regular expressions and no others.

Every reader of tokenizer.json must support them: rustbpe and `tokenizers` accept any expression, but gigatoken and
llama.cpp know only certain ones by name, so a custom expression would train here and load nowhere else.
"""

from __future__ import annotations

from typing import Any

from homing.errors import DataError

__all__ = ["SPLITS", "name_of_split", "pattern_named", "pre_tokenizer_named"]

# Exactly the expression in Llama 3's tokenizer.json; GPT-4's splits text in the same way.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {"gpt2": _GPT2, "gpt4": _GPT4}


def pattern_named(name: str) -> str:
    if name not in SPLITS:
        raise DataError(
            what=f"Unknown split: {name!r}",
            why=f"Known: {', '.join(SPLITS)}. The encoder and llama.cpp support no others.",
            fix="Set the split of the tokenizer to gpt4 or gpt2.",
        )
    return SPLITS[name]


def pre_tokenizer_named(name: str) -> Any:
    """Return the pre-tokenizer for `tokenizers`: GPT-2's pattern is built in, the other is given as an expression."""
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
    """Return which of our split patterns a `pre_tokenizer` of tokenizer.json is, or None."""
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
