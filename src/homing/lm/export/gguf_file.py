"""Writes one GGUF file, for llama.cpp and tools built on it, and reads it back with the `gguf` package.

    config -> keys      decoder -> tensors under llama.cpp's names      tokenizer.json -> tokens, merges, template

F32 is exact, F16 rounds matrices, and Q8_0 stores each block of 32 numbers as one scale and 32 bytes. Norms and biases
stay F32 in all three types. For Llama, llama.cpp applies RoPE to adjacent channel pairs, whereas homing pairs the two
halves of a head, so the rows of the query and key weights are reordered. For Qwen they are not. Finally, the whole
file is read back and compared.

llama.cpp identifies split patterns by name. homing uses GPT-4's pattern, which llama.cpp calls `dbrx`. Llama 3 has the
same pattern, but its name, `llama-bpe`, also makes llama.cpp put <|begin_of_text|> before each text and take whole
words from the vocabulary without merging. Llama 3's tokenizer requests this (`ignore_merges`), but homing's does not.
If llama.cpp has no name for a split pattern, the export fails. Otherwise, llama.cpp would open the file but split about
one word in three differently.

`modelfile` returns the text of the Modelfile that `ollama create` reads. Ollama's templates are in Go, not Jinja.
Two Jinja templates are recognized by their output and translated: ChatML, with or without a begin-of-text token, and
Llama 3's. For any other template, the Modelfile contains no template, because Ollama derives one from the GGUF.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from homing.errors import DataError, IntegrityError, UsageError
from homing.hf_config import SWIFT
from homing.lm.data.chat.messages import Fault
from homing.lm.export.source_model import Opened
from homing.lm.model.layers import rope_divisors
from homing.lm.tokenizer.tokenizer import PAD, read_tokenizer_json
from homing.lm.tokenizer.write_files import name_of_split
from homing.wire import file_names
from homing.wire.run_json import Model

__all__ = [
    "KINDS",
    "MODELFILE",
    "GgufTokens",
    "Written",
    "adds_bos",
    "gguf_tokens",
    "modelfile",
    "read_back",
    "write_gguf",
]

KINDS = ("f32", "f16", "q8_0")
_BLOCK = 32  # number of values in a Q8_0 block
Array = npt.NDArray[Any]
Field = str | int | float | bool | list[str] | list[int]


@dataclass(frozen=True)
class Written:
    path: Path
    kind: str
    num_tensors: int
    num_unfit: int  # number of matrices in a Q8_0 file that are stored as F16, because their rows are not whole blocks

    @property
    def sentence(self) -> str:
        unfit = f" ({self.num_unfit} of them as F16: their rows are not whole blocks)" if self.num_unfit else ""
        return f"read back with the gguf package, all {self.num_tensors} tensors{unfit} and all tokens match."


def write_gguf(opened: Opened, path: Path, kind: str, *, name: str) -> Written:
    import gguf

    shape = opened.model.shape
    _check(opened.folder, shape, kind)
    writer = gguf.GGUFWriter(path, shape.arch)
    fields, stored = _fields(opened, kind, name), tensors_for_gguf(opened, kind)
    for key, value in fields.items():
        _add(writer, key, value)
    for tensor_name, (array, quant) in stored.items():
        writer.add_tensor(tensor_name, array, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read_back(path, fields, stored)
    unfit = sum(q == gguf.GGMLQuantizationType.F16 for _, q in stored.values()) if kind == "q8_0" else 0
    return Written(path, kind, len(stored), unfit)


def _check(folder: Path, shape: Model, kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"Unknown GGUF type: {kind!r}", f"Known types: {', '.join(KINDS)}.", "Use --type f16")
    if shape.family == SWIFT:
        raise UsageError(
            what="A swift model cannot be exported as GGUF.",
            why="llama.cpp does not support this architecture; homing and transformers (with the exported code) do.",
            fix=f"Use homing export {folder} --to hf, or train with model.family: stock",
        )


def _fields(opened: Opened, kind: str, name: str) -> dict[str, Field]:
    """Return the file's keys and values, which are written first and compared when the file is read back."""
    from gguf import Keys

    shape, tokenizer_info = opened.model.shape, gguf_tokens(opened)
    of_shape: dict[str, Field] = {
        Keys.LLM.CONTEXT_LENGTH: shape.max_context or shape.context,
        Keys.LLM.EMBEDDING_LENGTH: shape.width,
        Keys.LLM.BLOCK_COUNT: shape.num_layers,
        Keys.LLM.FEED_FORWARD_LENGTH: shape.ffn_width,
        Keys.Attention.HEAD_COUNT: shape.num_heads,
        Keys.Attention.HEAD_COUNT_KV: shape.num_kv_heads,
        Keys.Attention.KEY_LENGTH: shape.head_size,
        Keys.Attention.VALUE_LENGTH: shape.head_size,
        Keys.Attention.LAYERNORM_RMS_EPS: float(shape.norm_eps),
        Keys.Rope.FREQ_BASE: float(shape.rope_base),
        Keys.Rope.DIMENSION_COUNT: shape.head_size,
        Keys.LLM.VOCAB_SIZE: shape.vocab_size,
    }
    of_tokens: dict[str, Field | None] = {
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: tokenizer_info.pre,
        Keys.Tokenizer.LIST: tokenizer_info.tokens,
        Keys.Tokenizer.TOKEN_TYPE: tokenizer_info.kinds,
        Keys.Tokenizer.MERGES: tokenizer_info.merges,
        Keys.Tokenizer.BOS_ID: tokenizer_info.bos_id,
        Keys.Tokenizer.EOS_ID: tokenizer_info.eos_id,
        Keys.Tokenizer.ADD_BOS: tokenizer_info.adds_bos,
        Keys.Tokenizer.EOT_ID: tokenizer_info.eot_id,
        Keys.Tokenizer.PAD_ID: tokenizer_info.pad_id,
        Keys.Tokenizer.CHAT_TEMPLATE: tokenizer_info.template or None,
    }
    return {
        Keys.General.NAME: name,
        Keys.General.FILE_TYPE: {"f32": 0, "f16": 1, "q8_0": 7}[kind],
        **{key.format(arch=shape.arch): value for key, value in of_shape.items()},
        **{key: value for key, value in of_tokens.items() if value is not None},
    }


def _add(writer: Any, key: str, value: Field) -> None:
    match value:
        case bool():  # this case must come before int, because bool is a subclass of int
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def tensors_for_gguf(opened: Opened, kind: str) -> dict[str, tuple[Array, Any]]:
    """Return all tensors by their llama.cpp name, each as the bytes stored in the file and their type."""
    import gguf

    shape = opened.model.shape
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, shape.arch.upper()), shape.num_layers)
    kinds = gguf.GGMLQuantizationType
    stored: dict[str, tuple[Array, Any]] = {}
    for name, tensor in opened.model.weights_for_disk().items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise IntegrityError(
                f"GGUF has no name for the tensor {name}.", f"The architecture is {shape.arch}.", "Please report this."
            )
        array = _reordered(name, tensor.float(), shape).numpy()
        quant = kinds.F32 if tensor.dim() == 1 else _kind_of(kinds, kind, array)
        stored[gguf_name] = (gguf.quants.quantize(array, quant), quant)
    if shape.rope_scaling is not None:
        size = shape.head_size
        frequency = shape.rope_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        stored["rope_freqs.weight"] = (rope_divisors(frequency, shape.rope_scaling).float().numpy(), kinds.F32)
    return stored


def _kind_of(kinds: Any, kind: str, array: Array) -> Any:
    if kind == "q8_0" and array.shape[-1] % _BLOCK:
        return kinds.F16
    return {"f32": kinds.F32, "f16": kinds.F16, "q8_0": kinds.Q8_0}[kind]


def _reordered(name: str, tensor: torch.Tensor, shape: Model) -> torch.Tensor:
    """Reorder the rows of Llama's query and key weights, so that channels i and i + K/2 of a head become adjacent."""
    if shape.arch != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    num_heads = shape.num_heads if name.endswith("q_proj.weight") else shape.num_kv_heads
    halves = tensor.view(num_heads, 2, shape.head_size // 2, tensor.shape[-1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def read_back(path: Path, fields: dict[str, Field], stored: dict[str, tuple[Array, Any]]) -> None:
    """Raise IntegrityError unless the file contains exactly the tensors and keys that were written."""
    import gguf

    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    odd = sorted(found.keys() ^ stored.keys())
    for name, (array, quant) in stored.items():
        if name in found and found[name].tensor_type != quant:
            odd.append(f"{name} (type)")
        elif name in found and not np.array_equal(
            np.ascontiguousarray(array).view(np.uint8).ravel(),
            np.ascontiguousarray(found[name].data).view(np.uint8).ravel(),
        ):
            odd.append(name)
    for key, value in fields.items():
        field = reader.get_field(key)
        wanted = float(np.float32(value)) if isinstance(value, float) else value
        # The gguf package does not write empty lists.
        there = field.contents() if field is not None else [] if isinstance(value, list) else None
        if there != wanted:
            odd.append(key)
    if odd:
        raise IntegrityError(
            what="The GGUF file differs from what was written.",
            why=f"These entries differ: {', '.join(odd[:8])}.",
            fix="Install the tested version: pip install -c constraints.txt gguf   The faulty file was deleted.",
        )


# -- Modelfile for Ollama ----------------------------------------------------------------------------------------------

MODELFILE = "Modelfile"
_PROBE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
# For each known template, its output for _PROBE, and the same template in Go. Neither includes the begin-of-text token,
# because the tokenizer adds it.
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
        # A base model continues a text, so its prompt is used unchanged.
        return "\n".join([*lines, 'TEMPLATE """{{ .Prompt }}"""', ""])
    template = _in_go(opened)
    if template is None:
        return "\n".join([*lines, "# Ollama uses the chat template in the GGUF file.", ""])
    return "\n".join([*lines, f'TEMPLATE """{template}"""', ""])


def _in_go(opened: Opened) -> str | None:
    assert opened.template is not None, "a chat model must have a template"
    marks: Sequence[str] = ("", *opened.tokenizer.specials)
    try:
        rendered = opened.template.render(_PROBE, add_generation_prompt=True)
    except Fault:
        return None
    for known, in_go in ((_CHATML, _CHATML_GO), (_LLAMA3, _LLAMA3_GO)):
        if any(rendered == mark + known for mark in marks):
            return in_go
    return None


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
