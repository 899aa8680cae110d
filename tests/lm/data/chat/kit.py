"""Small tokenizers in the manner of homing, Qwen and Llama 3, their templates, and conversations made by chance."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from homing.lm.data.chat.messages import Conversation
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.lm.tokenizer.write_files import build_tokenizer_json, write_extras

__all__ = ["LLAMA", "QWEN", "THINKING", "conversation", "conversations", "make_tokenizer"]

_MERGES = [
    *((b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"), (b"\n", b"\n"), (b" ", b"t"), (b" t", b"h")),
    *((b"i", b"n"), (b"in", b"g"), (b"u", b"s"), (b"us", b"e"), (b"use", b"r"), (b"a", b"s"), (b"e", b"r")),
]

# Written for these tests, with what the real ones do: a system turn of its own when there is none, tools listed in it,
# calls between tags that are markers but not special, results of several tools in one turn of the user.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a model of the tests.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# A beginning of text, headers between markers, words trimmed, and a complaint of the template's own.
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Forgets the reasoning of every answer but the last, so that no rendering is the beginning of the next.
THINKING = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set words = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + (message.reasoning_content or '') }}
            {{- '\\n</think>\\n\\n' + words }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + words }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_OTHERS = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "llama": (["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], []),
}


def make_tokenizer(folder: Path, kind: str = "homing", template: str = "") -> Path:
    """tokenizer.json and tokenizer_config.json: homing's own, or with markers after the words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(build_tokenizer_json(_MERGES, SPECIALS["standard"], "gpt4"))
    if kind == "homing":
        write_extras(folder)
        if template:
            _set_config(folder, chat_template=template)
        return folder
    specials, plain = _OTHERS[kind]
    data = json.loads((folder / "tokenizer.json").read_text())
    words = [token for token in data["model"]["vocab"] if token not in SPECIALS["standard"]]
    data["model"]["vocab"] = {token: number for number, token in enumerate(words)}
    data["added_tokens"] = [
        {"id": len(words) + number, "content": token, "special": token in specials, "normalized": False,
         "single_word": False, "lstrip": False, "rstrip": False}
        for number, token in enumerate([*specials, *plain])
    ]  # fmt: skip
    data["post_processor"] = None
    if kind == "qwen":
        data["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if kind == "llama":
        config = {**config, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _set_config(folder, chat_template=template or {"qwen": QWEN, "llama": LLAMA}[kind])
    return folder


def _set_config(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


_BITS = [
    *(
        "hello",
        " there",
        "user",
        "\n",
        "\n\n",
        "  ",
        "Grüße",
        "漢字",
        "🎉👩\u200d👩\u200d👧",
        "e\u0301",
        "12345",
        "isn't",
    ),
    *("<", "|>", "{%", "{{ x }}", "\t", "."),
]


def _words(chance: random.Random) -> str:
    text = "".join(chance.choice(_BITS) for _ in range(chance.randint(1, 12)))
    return text if text.strip() else text + "word"


def conversation(chance: random.Random, *, has_tools: bool = True) -> Conversation:
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.4:
        messages.append({"role": "system", "content": _words(chance)})
    tools = None
    if has_tools and chance.random() < 0.3:
        tools = [{"type": "function", "function": {"name": "add", "description": _words(chance), "parameters": {}}}]
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": _words(chance)})
        if has_tools and chance.random() < 0.3:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "text": _words(chance)}}}
            said = chance.choice(["", _words(chance)])
            messages.append({"role": "assistant", "content": said, "tool_calls": [call] * chance.randint(1, 2)})
            messages += [{"role": "tool", "content": _words(chance)} for _ in range(chance.randint(1, 2))]
        messages.append({"role": "assistant", "content": _words(chance)})
    return Conversation(messages, tools)


def conversations(count: int, *, seed: int = 1, has_tools: bool = True) -> list[Conversation]:
    chance = random.Random(seed)
    return [conversation(chance, has_tools=has_tools) for _ in range(count)]
