"""Weights that transformers wrote: the same logits here, and the same bits when they are saved again."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.lm.model.open_weights.foreign_models import FAMILIES, write_reference

from homing.errors import DataError, IntegrityError
from homing.lm.model import Decoder, shape_from_config
from homing.lm.model.open_weights import find_weights, load_decoder, save_weights
from homing.lm.model.open_weights.find_tensors import INDEX
from homing.lm.model.open_weights.load_and_save import save_tensors


def opened(folder: Path, dtype: torch.dtype | None = torch.float32) -> Decoder:
    shape = shape_from_config(json.loads((folder / "config.json").read_text()))
    return load_decoder(find_weights(folder), shape, dtype=dtype)


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


@pytest.mark.acceptance(94)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "16KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_transformers_give_the_same_logits_and_go_back_bit_for_bit(
    family: str, max_shard_size: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference_value, again = tmp_path / "upstream", tmp_path / "again"
    reference = write_reference(reference_value, family, dtype=dtype, max_shard_size=max_shard_size)
    files = find_weights(reference_value)
    assert (len(files.files) > 2) == (max_shard_size == "16KB")
    model = opened(reference_value)
    ids = torch.randint(100, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
    again.mkdir()
    save_weights(model, again, like=files)
    assert hashes(again) == hashes(reference_value)
    if len(files.files) > 1:
        assert json.loads((again / INDEX).read_text())["weight_map"] == files.where


def test_weights_are_kept_in_the_type_that_was_asked_for_and_saved_in_it(tmp_path: Path) -> None:
    write_reference(tmp_path / "upstream", "qwen2", dtype=torch.bfloat16)
    model = opened(tmp_path / "upstream", dtype=None)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    (tmp_path / "again").mkdir()
    save_weights(model, tmp_path / "again")
    assert hashes(tmp_path / "again") == hashes(tmp_path / "upstream")
    wider = tmp_path / "wider"
    wider.mkdir()
    assert save_weights(model, wider, dtype=torch.float32, shard_bytes=20_000)[-1] == INDEX
    assert set(find_weights(wider).dtypes.values()) == {"F32"}
    (wider / "config.json").write_bytes((tmp_path / "upstream" / "config.json").read_bytes())
    torch.testing.assert_close(opened(wider).weights_for_disk(), opened(tmp_path / "upstream").weights_for_disk())


def test_every_missing_shard_is_named_at_once(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama", max_shard_size="16KB")
    files = find_weights(tmp_path).files
    for name in files[1:3]:
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="are incomplete") as caught:
        find_weights(tmp_path)
    assert all(name in caught.value.why for name in files[1:3])


def test_a_pickle_is_never_opened_and_an_index_cannot_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(DataError, match="There are no weights") as caught:
        find_weights(tmp_path)
    assert "pytorch_model.bin" in caught.value.why
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(DataError, match="not a valid weights index"):
        find_weights(tmp_path)
    for text in ("[]", "{", '{"weight_map": 3}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(IntegrityError, match="cannot be read"):
            find_weights(tmp_path)


def test_a_tensor_that_is_promised_and_absent_or_not_a_number_type_is_named(tmp_path: Path) -> None:
    write_reference(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    tensors["model.layers.0.mlp.odd"] = torch.zeros(3)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="do not fit") as caught:
        opened(tmp_path)
    assert "model.norm.weight is missing" in caught.value.why
    assert "odd is not a weight" in caught.value.why
    assert "I8" in caught.value.why


_MEASURE = """
import json, resource, sys, torch
from pathlib import Path
from homing.lm.model import Decoder, shape_from_config
from homing.lm.model.open_weights import find_weights, load_decoder
folder = Path(sys.argv[1])
shape = shape_from_config(json.loads((folder / "config.json").read_text()))
with torch.device("meta"):
    Decoder(shape)
torch.empty(8, 8) @ torch.empty(8, 8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_decoder(find_weights(folder), shape, dtype=torch.float32)
size = sum(p.numel() * 4 for p in model.parameters()) / 1024
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_several_shards_are_loaded_without_holding_the_weights_twice(tmp_path: Path) -> None:
    write_reference(
        tmp_path, "llama", dtype=torch.bfloat16, max_shard_size="12MB", hidden_size=512, intermediate_size=2048,
        num_hidden_layers=10, vocab_size=1000,
    )  # fmt: skip
    assert len(find_weights(tmp_path).files) >= 6
    done = subprocess.run([sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    size_kb, grown_kb = map(float, done.stdout.split())
    assert size_kb > 100_000
    # The weights once, the file pages of one shard, and change; twice would be the whole of it again.
    assert grown_kb < 1.35 * size_kb, (grown_kb, size_kb)


def test_a_disk_that_is_full_is_an_error_of_the_disk_and_not_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(sys.modules["homing.lm.model.open_weights.load_and_save"], "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors could not be written: .*No space left") as caught:
        save_tensors({}, tmp_path / "model.safetensors")
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_that_is_gone_is_an_error_of_the_disk_and_tensors_that_cannot_be_written_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        save_tensors({"a": torch.zeros(2)}, tmp_path / "gone/model.safetensors")
    assert caught.value.errno == errno.EIO

    def refuse(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: invalid shape, data type, or offset for tensor")

    monkeypatch.setattr(sys.modules["homing.lm.model.open_weights.load_and_save"], "save_file", refuse)
    with pytest.raises(SafetensorError, match="invalid shape"):
        save_tensors({}, tmp_path / "model.safetensors")
