"""Loads tokenizer.json: encoding, decoding, and the properties that training needs.

Our special tokens have the ids 0, 1, 2, ... before the 256 bytes and the merges. `standard` has all sixteen, so that
chat and tools need no new embedding rows later; `one` has only <|endoftext|>, so that a vocabulary of N has N - 257
merges. A special token's name in a text never becomes its id: only homing's own code puts these ids into a stream.

Bytes are written as printable characters, one to one, as in every byte-level BPE (GPT-2's table).

The `tokenizers` package aborts a regex search that takes too long, and some expressions it cannot compile, with a Rust
panic. In Python that is a BaseException, which `except Exception` does not catch: a single text would end the whole
process. `panics_as_errors` turns it into an error that names the file.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from homing.errors import DataError
from homing.tokenizer_json import read_tokenizer_bytes

__all__ = [
    "BYTE_TO_CHAR",
    "CHAR_TO_BYTE",
    "CHAT_TEMPLATE",
    "DOCUMENT_MARKS",
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "PAD",
    "SPECIALS",
    "TEXT_ENDS",
    "Tokenizer",
    "as_text",
    "document_mark",
    "lacks_turns",
    "load_tokenizer",
    "panics_as_errors",
    "read_tokenizer_json",
    "specials_named",
    "specials_of",
]


END_OF_TEXT = "<|endoftext|>"  # before each document
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"  # ends a chat turn
PAD = "<|pad|>"
_TOOLS = ["<|tool_call|>", "<|tool_call_end|>", "<|tool_result|>", "<|tool_result_end|>"]
_RESERVED = [f"<|reserved_{number}|>" for number in range(8)]

SPECIALS: dict[str, list[str]] = {
    "one": [END_OF_TEXT],
    "standard": [END_OF_TEXT, IM_START, IM_END, PAD, *_TOOLS, *_RESERVED],
}

# ChatML that starts with <|endoftext|>, like every document, and marks tool calls with their own special tokens.
# Deliberately plain Jinja (no generation tag, no filters but tojson), so that every inference engine can render it.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'Tools, one a line:\\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {%- if message['role'] == 'tool' %}
            {{- '<|tool_result|>' + message['content'] + '<|tool_result_end|>' }}
        {%- else %}
            {%- if message['content'] %}
                {{- message['content'] }}
            {%- endif %}
            {%- for call in message['tool_calls'] or [] %}
                {{- '<|tool_call|>' + (call['function'] | tojson) + '<|tool_call_end|>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def specials_named(name: str) -> list[str]:
    if name not in SPECIALS:
        raise DataError(
            what=f"Unknown set of special tokens: {name!r}",
            why=f"Known sets: {', '.join(SPECIALS)}.",
            fix="Set tokenizer.specials to one of the known sets.",
        )
    return SPECIALS[name]


def lacks_turns(specials: Container[str]) -> list[str]:
    """Return the turn markers (<|im_start|>, <|im_end|>) that are missing from these special tokens."""
    return [mark for mark in (IM_START, IM_END) if mark not in specials]


def _table() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


BYTE_TO_CHAR = _table()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def as_text(token: bytes) -> str:
    return "".join([BYTE_TO_CHAR[byte] for byte in token])


# Document tokens in order of precedence: homing and Qwen, then Llama 3, then Llama 2 and Mistral.
DOCUMENT_MARKS = (END_OF_TEXT, "<|begin_of_text|>", "<s>")
TEXT_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class Tokenizer:
    def __init__(self, backend: Any, specials: dict[str, int], path: str = "tokenizer.json") -> None:
        self._backend = backend
        self._path = path  # shown in error messages
        # The text of a special token is encoded as plain text: only code may put a special id into a stream.
        self._backend.encode_special_tokens = True
        # A tokenizer.json may configure truncation or padding, which must not apply here.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.specials = specials
        self.vocab_size: int = backend.get_vocab_size()
        if backend.id_to_token(self.vocab_size - 1) is None:  # a third-party tokenizer with gaps in its ids
            self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        # The id of the token that precedes each document; in most model families it also ends documents.
        self.end_of_text_id = specials[document_mark(specials)]
        self.stop_ids = [specials[mark] for mark in TEXT_ENDS if mark in specials] or [self.end_of_text_id]

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text. A special token's name in the text is encoded as plain text."""
        with panics_as_errors(self._path):
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Encode each text like `encode`, on all cores."""
        with panics_as_errors(self._path):
            return [list(row.ids) for row in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, skip_specials: bool = False) -> str:
        """Return the text of the ids. Special tokens appear by name unless skipped; invalid bytes become U+FFFD."""
        with panics_as_errors(self._path):
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_specials))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that the id stands for; a special token's name, and nothing for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token in self.specials or not set(token) <= CHAR_TO_BYTE.keys():
            return str(token).encode()
        return bytes(CHAR_TO_BYTE[char] for char in token)

    def token_bytes(self) -> list[int]:
        """Return the number of UTF-8 bytes of each id; 0 for special tokens."""
        sizes, added = [0] * self.vocab_size, self._backend.get_added_tokens_decoder()
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            if token not in self.specials:
                # In the byte alphabet, each character represents one byte. Added tokens are stored as plain text.
                sizes[number] = len(token.encode()) if number in added else len(token)
        return sizes


def document_mark(specials: Iterable[str]) -> str:
    """Return the special token that a tokenizer puts before a document."""
    return next(mark for mark in DOCUMENT_MARKS if mark in specials)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a tokenizer from tokenizer.json, or from the folder that contains it."""
    from tokenizers import Tokenizer as Backend

    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    data = read_tokenizer_json(path)
    specials = specials_of(data, path)
    try:
        with panics_as_errors(path):
            backend = Backend.from_file(os.fspath(path))
    except DataError:
        raise
    except Exception as exc:  # the package raises a bare Exception
        raise _unusable(path, str(exc)) from exc
    return Tokenizer(backend, specials, os.fspath(path))


def specials_of(data: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, int]:
    """Return name -> id of the special tokens. Raises if the vocabulary is not byte-level or has no document token."""
    vocab, added = data["model"].get("vocab"), data.get("added_tokens", [])
    if not isinstance(vocab, dict):
        raise _unusable(path, "Its vocabulary is missing or is not a mapping of tokens to ids.")
    if not isinstance(added, list) or not all(_is_added_token(entry) for entry in added):
        raise _unusable(path, "Its added_tokens are not a list of tokens, each with a content and an id.")
    specials = {entry["content"]: entry["id"] for entry in added if entry.get("special")}
    if not specials.keys() & set(DOCUMENT_MARKS):
        raise _unusable(path, f"It has no special token {END_OF_TEXT}, nor {' or '.join(DOCUMENT_MARKS[1:])}.")
    if not set("".join(token for token in vocab if token not in specials)) <= set(CHAR_TO_BYTE):
        raise _unusable(path, "Its vocabulary is not byte-level.")
    return specials


def _is_added_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int


def read_tokenizer_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed and validated tokenizer.json. The result is cached, so copy it before changing it."""
    try:
        data = _parse(read_tokenizer_bytes(path))
    except FileNotFoundError as exc:
        raise DataError(
            what=f"No tokenizer at {os.fspath(path)}.",
            why="Token ids are meaningless without the tokenizer that produced them.",
            fix="Create one with homing prep RUN; a fetched checkpoint includes its own.",
        ) from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise _unusable(path, str(exc)) from exc
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict) or data["model"].get("type") != "BPE":
        raise _unusable(path, "It is not the tokenizer.json of a BPE tokenizer.")
    return data


@functools.lru_cache(maxsize=2)
def _parse(text: bytes) -> Any:
    # Disable garbage collection: parsing creates tens of thousands of lists but no garbage, and the collector would
    # scan all of them again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text)
    finally:
        if was_enabled:
            gc.enable()


def _unusable(path: str | os.PathLike[str], why: str) -> DataError:
    return DataError(
        what=f"{os.fspath(path)} cannot be used as a tokenizer.",
        why=why,
        fix="Create a new one: homing prep RUN --force",
    )


@contextmanager
def panics_as_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":
            raise
        raise DataError(
            what=f"{os.fspath(path)} cannot encode this text.",
            why=f"The tokenizers package failed: {str(exc) or 'it panicked'}.",
            fix="Use a different tokenizer. This tokenizer's regular expression is invalid or too slow for this text.",
        ) from exc
