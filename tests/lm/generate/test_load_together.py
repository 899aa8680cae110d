"""Models that are served side by side: adapters on one base share its weights; too many are refused with figures."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lm.export.folders import make_adapter, make_checkpoint, seal

from homing.errors import IntegrityError, UsageError
from homing.lm.generate import generate, load_for_use, load_together
from homing.lm.generate.load_together import Source
from homing.lm.generate.load_together import load_together as load
from homing.lm.model import Decoder
from homing.sampling_settings import SamplingSettings
from homing.wire import file_names


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, two adapters of one run on it, one of qlora, one with DoRA, and a model of its own."""
    folder = tmp_path_factory.mktemp("models")
    made = {"base": folder / "base", "other": folder / "other"}
    for name, lora in {"first": {}, "later": {}, "quantized": {}, "dora": {"is_dora": True}}.items():
        made[name] = folder / name
        shutil.rmtree(made["base"], ignore_errors=True)
        make_adapter(made[name], made["base"], **lora)
    change_adapter(made["later"], 0.5)
    run = json.loads((made["quantized"] / file_names.RUN).read_text())
    run["phases"][0]["method"] = "qlora"
    (made["quantized"] / file_names.RUN).write_text(json.dumps(run))
    seal(made["quantized"], "sft")
    make_checkpoint(made["other"], seed=9)
    return made


def change_adapter(folder: Path, amount: float) -> None:
    """As later training would."""
    path = folder / file_names.ADAPTER
    tensors = {name: tensor + amount * torch.randn(tensor.shape) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    seal(folder, "sft")


def sources(folders: dict[str, Path], *names: str) -> list[Source]:
    return [Source(name, folders[name]) for name in names]


def storages(model: Decoder) -> dict[str, int]:
    """Return the address of the memory of each weight, without those of adapters."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors if ".adapter." not in name}


def num_bytes(*models: Decoder) -> int:
    """Return the bytes of all weights, counting memory that several models use only once."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


def text(model: Decoder, seed: int = 1) -> list[int]:
    return list(generate(model, [3, 5, 8, 9], num_tokens=30, sampling=SamplingSettings(seed=seed)))


def test_adapters_on_one_base_share_the_memory_of_its_weights(folders: dict[str, Path]) -> None:
    (first, _), (later, _), (quantized, _) = load(sources(folders, "first", "later", "quantized"), "cpu")
    assert storages(first) == storages(later) == storages(quantized)
    alone = num_bytes(load_for_use(folders["first"], "cpu")[0])
    adapter = (folders["first"] / file_names.ADAPTER).stat().st_size
    assert num_bytes(first, later, quantized) <= alone + 3 * adapter
    assert text(first) != text(later), "each has its own adapter"


@pytest.mark.parametrize("name", ["first", "later", "quantized", "dora"])
def test_a_model_on_a_shared_base_says_what_it_says_alone(folders: dict[str, Path], name: str) -> None:
    found = dict(zip(folders, load([Source(each, folder) for each, folder in folders.items()], "cpu"), strict=True))
    alone, _ = load_for_use(folders[name], "cpu")
    ids_BT = torch.randint(100, (2, 20), generator=torch.Generator().manual_seed(1)) % alone.shape.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(found[name][0](ids_BT), alone(ids_BT), atol=1e-3, rtol=1e-3)
    assert text(found[name][0]) == text(alone)


def test_the_base_itself_is_served_from_the_memory_that_its_adapters_use(folders: dict[str, Path]) -> None:
    (base, _), (first, _), (other, _) = load(sources(folders, "base", "first", "other"), "cpu")
    assert storages(base) == storages(first)
    assert not set(storages(other).values()) & set(storages(base).values())
    assert text(base) == text(load_for_use(folders["base"], "cpu")[0])


def test_a_single_adapter_is_merged_as_everywhere_else(folders: dict[str, Path]) -> None:
    (first, _), (other, _) = load(sources(folders, "first", "other"), "cpu")
    assert first.lora is None
    assert other.lora is None


def test_an_adapter_of_another_base_is_refused_in_a_group_too(folders: dict[str, Path], tmp_path: Path) -> None:
    wrong = shutil.copytree(folders["later"], tmp_path / "wrong")
    config = json.loads((wrong / file_names.ADAPTER_CONFIG).read_text())
    (wrong / file_names.ADAPTER_CONFIG).write_text(json.dumps({**config, "homing_base_sha256": "0" * 64}))
    seal(wrong, "sft")
    with pytest.raises(IntegrityError, match="different base weights"):
        load([*sources(folders, "first"), Source("wrong", wrong)], "cpu")


def test_what_does_not_fit_is_refused_with_figures_before_anything_is_loaded(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(load_together, "free_host_bytes", lambda: 200_000)
    monkeypatch.setattr(load_together, "load_for_use", never)
    monkeypatch.setattr(load_together, "frozen_base", never)
    with pytest.raises(UsageError, match="do not fit in memory together") as caught:
        load(sources(folders, "first", "later", "other"), "cpu")
    assert "200.00 kB free" in caught.value.why
    needed = dict(each.rsplit(" ", 2)[:2] for each in caught.value.why.split("(")[1].split(")")[0].split(", "))
    assert float(needed["later"]) < float(needed["first"]), "the second one needs only its adapter and its cache"
    with pytest.raises(UsageError, match="The model does not fit in memory"):
        load(sources(folders, "other"), "cpu")


def test_another_context_is_another_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Positions are part of what is shared, so runs with different contexts have weights of their own."""
    longer = shutil.copytree(folders["later"], tmp_path / "longer")
    run = json.loads((longer / file_names.RUN).read_text())
    run["model"]["context"] *= 2
    (longer / file_names.RUN).write_text(json.dumps(run))
    seal(longer, "sft")
    (first, _), (second, _) = load([*sources(folders, "first"), Source("longer", longer)], "cpu")
    assert second.shape == dataclasses.replace(first.shape, context=2 * first.shape.context)
    assert not set(storages(first).values()) & set(storages(second).values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_second_adapter_needs_only_its_own_memory(folders: dict[str, Path]) -> None:
    one = load(sources(folders, "first", "later"), "cuda")
    before = torch.cuda.memory_allocated()
    more = load(sources(folders, "first", "later", "quantized", "dora"), "cuda")
    base = num_bytes(load_for_use(folders["base"], "cpu", precision="bf16")[0])
    adapters = sum((folders[name] / file_names.ADAPTER).stat().st_size for name in folders if name != "base")
    assert torch.cuda.memory_allocated() - before <= base + adapters + (1 << 20)
    assert text(one[1][0]) == text(more[1][0])
