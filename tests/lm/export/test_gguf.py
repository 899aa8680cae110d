"""A GGUF file read back gives the same tensors, tokens and template; what llama.cpp cannot do is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.lm.export.folders import make_checkpoint
from tests.lm.model.open_weights.foreign_models import write_reference

from homing.errors import DataError, IntegrityError, UsageError
from homing.lm.export import Facts, Order, export
from homing.lm.export.gguf_file import _QWEN2


def order(folder: Path, out: Path, kind: str = "gguf", **more: Any) -> Order:
    return Order(folder, kind, out, Facts("tiny"), **more)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def unturned(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Llama's rows of q and k back from llama.cpp's order: written on its own, not by the exporter's code."""
    rows, _ = array.shape
    size = rows // num_heads
    back = np.empty_like(array)
    for head in range(num_heads):
        for i in range(size // 2):
            back[head * size + i] = array[head * size + 2 * i]
            back[head * size + size // 2 + i] = array[head * size + 2 * i + 1]
    return back


@pytest.mark.acceptance("X16")
@pytest.mark.parametrize("gguf_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_read_back_it_has_the_same_tensors(kind: str, gguf_type: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "c", kind)
    made = export(order(tmp_path / "c", tmp_path / "out", gguf_type=gguf_type))
    reader = gguf.GGUFReader(tmp_path / "out" / f"tiny-{gguf_type.upper()}.gguf")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, model.shape.arch.upper()), 2)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert len(found) == len(model.weights_for_disk())
    loosest = {"f32": 0.0, "f16": 1e-3, "q8_0": 0.02}[gguf_type]
    for name, tensor in model.weights_for_disk().items():
        there = found.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        array = gguf.quants.dequantize(there.data, there.tensor_type)
        if kind.startswith("llama") and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = unturned(array, 4 if "q_proj" in name else 2)
        biggest = float(tensor.abs().max())
        np.testing.assert_allclose(array, tensor.numpy(), atol=loosest * biggest, rtol=0)
        if tensor.dim() == 1:
            assert there.tensor_type == gguf.GGMLQuantizationType.F32
    assert not found
    assert value(reader, "general.architecture") == model.shape.arch
    assert value(reader, f"{model.shape.arch}.attention.key_length") == model.shape.head_size
    assert "all " in made.checked[0]


def test_the_tokenizer_is_all_there_under_the_name_that_llama_cpp_knows(tmp_path: Path) -> None:
    for split, pre in (("gpt4", "dbrx"), ("gpt2", "gpt-2")):
        folder = tmp_path / split / "c"
        make_checkpoint(folder, "qwen3", split=split)
        export(order(folder, tmp_path / split / "out", gguf_type="f32"))
        reader = gguf.GGUFReader(tmp_path / split / "out" / "tiny-F32.gguf")
        data = json.loads((folder / "tokenizer.json").read_text())
        assert value(reader, "tokenizer.ggml.pre") == pre
        tokens = value(reader, "tokenizer.ggml.tokens")
        assert {token: number for number, token in enumerate(tokens)} == data["model"]["vocab"]
        assert value(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in data["model"]["merges"]]
        kinds = value(reader, "tokenizer.ggml.token_type")
        assert kinds[:16] == [gguf.TokenType.CONTROL] * 16
        assert set(kinds[16:]) == {gguf.TokenType.NORMAL}
        assert (value(reader, "tokenizer.ggml.bos_token_id"), value(reader, "tokenizer.ggml.eos_token_id")) == (0, 2)
        assert value(reader, "tokenizer.ggml.add_bos_token") is True
        assert "<|im_start|>" in value(reader, "tokenizer.chat_template")


def test_weights_of_others_keep_their_split_spare_rows_and_scaled_rope(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    reference = tmp_path / "upstream"
    write_reference(reference, "llama-3.1", vocab_size=400, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "c" / "tokenizer_config.json").read_text())
    (reference / "tokenizer_config.json").write_text(json.dumps(config))
    data = json.loads((tmp_path / "c" / "tokenizer.json").read_text())
    for change, pre in (({"ignore_merges": True}, "llama-bpe"), ({}, "qwen2")):
        changed = {**data, "model": {**data["model"], **change}}
        if pre == "qwen2":
            changed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": _QWEN2}
        (reference / "tokenizer.json").write_text(json.dumps(changed))
        export(order(reference, tmp_path / pre, gguf_type="f32"))
        reader = gguf.GGUFReader(tmp_path / pre / "tiny-F32.gguf")
        assert value(reader, "tokenizer.ggml.pre") == pre
        tokens = value(reader, "tokenizer.ggml.tokens")
        assert tokens[399] == "[PAD399]"
        assert value(reader, "tokenizer.ggml.token_type")[399] == gguf.TokenType.UNUSED
        factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        assert 1.0 <= factors.min() < factors.max() == 8.0
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+|\W"}
    (reference / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(DataError, match="cannot be stored in a GGUF"):
        export(order(reference, tmp_path / "odd"))
    assert not (tmp_path / "odd").exists()


def test_a_modelfile_has_the_template_and_stops_of_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "chat" / "c", "qwen3")
    make_checkpoint(tmp_path / "base" / "c", "qwen3", phase="pretrain")
    for kind in ("chat", "base"):
        made = export(order(tmp_path / kind / "c", tmp_path / kind / "out", "ollama", gguf_type="q8_0"))
        assert {"Modelfile", "tiny-Q8_0.gguf", "README.md", "export.json"} == made.files.keys()
    chat, base = ((tmp_path / kind / "out" / "Modelfile").read_text() for kind in ("chat", "base"))
    assert chat.startswith("FROM ./tiny-Q8_0.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"' in chat
    assert "<|im_start|>{{ .Role }}" in chat
    assert '"""{{ .Prompt }}"""' in base
    assert "<|im_start|>" not in base


def test_swift_and_unknown_types_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "swift")
    with pytest.raises(UsageError, match="swift"):
        export(order(tmp_path / "c", tmp_path / "out"))
    make_checkpoint(tmp_path / "d", "llama")
    with pytest.raises(UsageError, match="q4_k"):
        export(order(tmp_path / "d", tmp_path / "out", gguf_type="q4_k"))
    assert not (tmp_path / "out").exists()


def test_a_file_that_says_something_else_is_found_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    add = gguf.GGUFWriter.add_tensor

    def bent(self: Any, name: str, tensor: Any, **more: Any) -> None:
        add(self, name, tensor * 1.001 if name == "blk.1.ffn_up.weight" else tensor, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", bent)
    with pytest.raises(IntegrityError, match="differs from what was written"):
        export(order(tmp_path / "c", tmp_path / "out", gguf_type="f32"))
    assert not (tmp_path / "out").exists()
    assert load_file(tmp_path / "c" / "model.safetensors")


def test_a_shape_or_a_token_that_the_file_says_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    for method, end in (("add_uint32", "head_count_kv"), ("add_float32", "freq_base"), ("add_bool", "add_bos_token")):
        add = getattr(gguf.GGUFWriter, method)

        def bent(self: Any, key: str, value: Any, add: Any = add, end: str = end) -> None:
            add(self, key, type(value)(not value) if key.endswith(end) else value)

        with monkeypatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, method, bent)
            with pytest.raises(IntegrityError, match=end):
                export(order(tmp_path / "c", tmp_path / "out", gguf_type="f32"))
        assert not (tmp_path / "out").exists()


def test_a_key_that_is_missing_from_the_file_is_found_whatever_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    add = gguf.GGUFWriter.add_uint32

    def forgetful(self: Any, key: str, value: int) -> None:
        if not key.endswith("bos_token_id"):
            add(self, key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", forgetful)
    with pytest.raises(IntegrityError, match="bos_token_id"):
        export(order(tmp_path / "c", tmp_path / "out", gguf_type="f32"))


@pytest.mark.parametrize("kind", ["gguf", "ollama"])
def test_the_card_names_only_files_that_the_export_has(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    made = export(order(tmp_path / "c", tmp_path / "out", kind, gguf_type="q8_0"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("Modelfile" in card) == ("Modelfile" in made.files)
    use = "ollama create tiny -f Modelfile && ollama run tiny" if kind == "ollama" else "llama-cli -m tiny-Q8_0.gguf"
    assert f"Run `{use}`" in card
