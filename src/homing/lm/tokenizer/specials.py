"""The special tokens and their ids: 0, 1, 2, ... before the 256 bytes and the merges.

`standard` has all sixteen, so that chat and tools need no new embedding rows later; `one` has only <|endoftext|>, so
that a vocabulary of N has N - 257 merges. Text that spells a special token never becomes its id: only homing's own code
puts these ids into a stream.
"""

from __future__ import annotations

from collections.abc import Container

from homing.errors import DataError

__all__ = ["CHAT_TEMPLATE", "END_OF_TEXT", "IM_END", "IM_START", "PAD", "SPECIALS", "lacks_turns", "specials_named"]

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

# ChatML, with <|endoftext|> first as before every document, and tools in their own special tokens. Deliberately plain
# Jinja (no generation tag, no filters but tojson), so that every inference engine can render it.
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
            why=f"Known: {', '.join(SPECIALS)}.",
            fix="Set tokenizer.specials to one of these.",
        )
    return SPECIALS[name]


def lacks_turns(specials: Container[str]) -> list[str]:
    """Return the turn markers (<|im_start|>, <|im_end|>) that are missing from these specials."""
    return [mark for mark in (IM_START, IM_END) if mark not in specials]
