"""An adapter opens in peft on its base with the same logits; merged, it is a folder like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.export.folders import make_adapter, make_adapter_on

from homing.errors import DataError, IntegrityError, UsageError
from homing.lm.export import Facts, Order, export
from homing.lm.generate import load_for_use
from homing.lm.model import Decoder

LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora-attention": {"is_rslora": True, "targets": ["q", "v"]},
    "dora": {"is_dora": True},
}


def order(folder: Path, out: Path, kind: str, **more: Any) -> Order:
    return Order(folder, kind, out, Facts("tiny"), **more)


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(4))
    out: torch.Tensor = model(ids)
    return out


@pytest.mark.acceptance("X16")
@pytest.mark.slow
@pytest.mark.parametrize("name", LORAS)
def test_peft_opens_the_adapter_with_the_same_logits(name: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = make_adapter(tmp_path / "c", tmp_path / "base", **LORAS[name])
    made = export(order(tmp_path / "c", tmp_path / "out", "adapter"))
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= made.files.keys()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        plain = base(ids).logits
        reference = PeftModel.from_pretrained(base, tmp_path / "out").eval()(input_ids=ids).logits
    torch.testing.assert_close(reference, logits(adapted), atol=1e-3, rtol=0)
    assert (plain - reference).abs().max() > 0.1  # an adapter that does nothing would pass as well
    assert "peft" in made.checked[0]


@pytest.mark.parametrize("kind", ["merged", "hf"])
def test_merged_weights_compute_what_the_adapter_does(kind: str, tmp_path: Path) -> None:
    adapted = make_adapter(tmp_path / "c", tmp_path / "base", kind="qwen3")
    expected = logits(adapted)
    made = export(order(tmp_path / "c", tmp_path / "out", kind))
    assert made.proof is not None
    for folder in (tmp_path / "out", tmp_path / "c"):
        model, _ = load_for_use(folder, "cpu")
        torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=0)
    export(order(tmp_path / "c", tmp_path / "gguf", "gguf", gguf_type="f16"))


def test_an_adapter_is_never_put_on_other_weights(tmp_path: Path) -> None:
    make_adapter(tmp_path / "c", tmp_path / "base")
    other = tmp_path / "other"
    make_adapter(tmp_path / "d", other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (other / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(IntegrityError, match="different base weights"):
        load_for_use(tmp_path / "c", "cpu", base=other)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(DataError, match="weights it was trained on are missing") as caught:
        load_for_use(tmp_path / "c", "cpu")
    assert "--base" in caught.value.fix


def test_an_adapter_on_top_of_another_is_used_and_merged_but_not_given_away_alone(tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "run" / "checkpoints" / "sft" / "step-00000012", tmp_path / "base")
    expected = make_adapter_on(first, tmp_path / "run" / "checkpoints" / "rl" / "step-00000012", "../sft/step-00000012")
    second = tmp_path / "run" / "checkpoints" / "rl" / "step-00000012"
    model, _ = load_for_use(second, "cpu")
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=0)
    made = export(order(second, tmp_path / "merged", "merged"))
    assert made.proof is not None
    with pytest.raises(UsageError, match="on top of another") as caught:
        export(order(second, tmp_path / "alone", "adapter"))
    assert "--to merged" in caught.value.fix
    assert not (tmp_path / "alone").exists()
