"""Folders with random weights as transformers writes them, of each family that homing opens, and their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from homing.lm.export.gguf_file import _QWEN2 as QWEN2_SPLIT
from homing.lm.tokenizer.tokenizer import as_text
from homing.lm.tokenizer.train_bpe import learn_merges
from homing.lm.tokenizer.write_files import SPLITS

__all__ = ["FAMILIES", "LLAMA3_ROPE", "write_reference", "write_their_tokenizer"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_SMALL: dict[str, Any] = {
    "vocab_size": 100,  # not a multiple of 64: the decoder pads, the files do not
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# name -> (class of the config, what it has of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def write_reference(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **own: Any
) -> Any:
    """The model as transformers opens it again, in fp32."""
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SMALL, **more, **own})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms of 1 and biases of 0 would hide a forgotten one; small matrices would hide everything.
            noise = torch.randn(parameter.shape)
            parameter.copy_(parameter + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    # Opened anew: `to` has rounded its table of angles as well.
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def write_their_tokenizer(folder: Path, family: str, text: str, *, num_merges: int = 60, **own: Any) -> Path:
    """tokenizer.json as Qwen2.5 or Llama 3 has it: its split, its normalizer, its specials after all other ids."""
    learned = learn_merges([text.encode()], num_merges=num_merges, split="gpt4")
    merges = [(as_text(left), as_text(right)) for left, right in learned]
    tokens = [*(as_text(bytes([byte])) for byte in range(256)), *(left + right for left, right in merges)]
    is_qwen = family.startswith("qwen")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if not is_qwen:
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    added = [*((special, True) for special in specials), *([("<think>", False)] if is_qwen else [])]
    split = {"Regex": QWEN2_SPLIT if is_qwen else SPLITS["gpt4"]}
    words = {"type": "Split", "pattern": split, "behavior": "Isolated", "invert": False}
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(tokens) + number, "content": content, "special": is_special, **plain}
            for number, (content, is_special) in enumerate(added)
        ],
        "normalizer": {"type": "NFC"} if is_qwen else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, as_bytes]},
        "post_processor": None,
        "decoder": as_bytes,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
            "ignore_merges": not is_qwen,
        },
        **own,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "tokenizer.json"
