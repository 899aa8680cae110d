"""Writes the Modelfile for `ollama create`, next to the GGUF.

Ollama's templates are in Go, not Jinja. Two are recognized by what they render: ChatML, with or without a begin-of-text
token, and Llama 3's. Any other template is left to Ollama, which derives it from the GGUF, and the file says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from homing.lm.data.chat.messages import Fault
from homing.lm.export.source_model import Opened

__all__ = ["MODELFILE", "modelfile"]

MODELFILE = "Modelfile"
_PROBE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
# What each known template renders for the probe -> the same in Go. The tokenizer adds the begin-of-text token.
_CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
)
_CHATML_GO = "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
_LLAMA3 = "".join(
    f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{message['content']}<|eot_id|>" for message in _PROBE
)
_LLAMA3 += "<|start_header_id|>assistant<|end_header_id|>\n\n"
_LLAMA3_GO = (
    "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


def modelfile(opened: Opened, gguf_name: str) -> str:
    lines = [f"FROM ./{gguf_name}", f"PARAMETER num_ctx {opened.model.shape.max_context or opened.model.shape.context}"]
    by_id = {number: name for name, number in opened.tokenizer.specials.items()}
    lines += [f"PARAMETER stop {json.dumps(by_id[number])}" for number in opened.end_ids() if number in by_id]
    if not opened.is_chat:
        # A base model: the input is the beginning of a text.
        return "\n".join([*lines, 'TEMPLATE """{{ .Prompt }}"""', ""])
    template = _in_go(opened)
    if template is None:
        return "\n".join([*lines, "# The chat template is the GGUF's own; Ollama reads it from there.", ""])
    return "\n".join([*lines, f'TEMPLATE """{template}"""', ""])


def _in_go(opened: Opened) -> str | None:
    assert opened.template is not None, "a chat model has a template"
    marks: Sequence[str] = ("", *opened.tokenizer.specials)
    try:
        rendered = opened.template.render(_PROBE, add_generation_prompt=True)
    except Fault:
        return None
    for known, in_go in ((_CHATML, _CHATML_GO), (_LLAMA3, _LLAMA3_GO)):
        if any(rendered == mark + known for mark in marks):
            return in_go
    return None
