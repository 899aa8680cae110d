"""`homing export`, and the verbs that open what it wrote or what others wrote."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from tests.cli.typed import Homing
from tests.lm.export.folders import make_adapter, make_checkpoint, write_tokenizer
from tests.lm.model.open_weights.foreign_models import write_reference

from homing.api import extras
from homing.api.models.export_model import KINDS
from homing.errors import MissingExtra


@pytest.fixture
def homing(homing: Homing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Homing:
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))
    return homing


@pytest.mark.slow
def test_a_run_by_its_name_becomes_a_folder_that_generate_and_chat_open(homing: Homing, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "models" / "tiny", "llama")
    code, out, err = homing("export", "tiny", "--licence", "mit")
    assert code == 0, err
    assert out.strip() == "exports/tiny-hf"
    assert "reproduces the trainer's logits to within" in err
    assert "homing publish hf:OWNER/NAME exports/tiny-hf" in err
    assert "mit" in (tmp_path / "exports" / "tiny-hf" / "README.md").read_text()
    asked = ("--tokens", "8", "--seed", "1", "--temperature", "0", "--json")
    texts = [json.loads(homing("generate", folder, "-p", "the", *asked)[1])["text"] for folder in ("tiny", out.strip())]
    assert texts[0] == texts[1]
    code, out, _ = homing("chat", "exports/tiny-hf", *asked, stdin=b"Hello.\n")
    assert code == 0
    assert json.loads(out)["mode"] == "chat"


def test_json_tells_files_and_proof_and_a_taken_name_is_refused_in_a_moment(homing: Homing, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    code, out, _ = homing("export", str(tmp_path / "c"), "--to", "ollama", "--type", "q8_0", "--out", "o", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "homing.export/1"
    assert {"Modelfile", "tiny-Q8_0.gguf"} <= document["files"].keys()
    code, _, err = homing("export", str(tmp_path / "c"), "--to", "ollama", "--out", "p")
    assert (tmp_path / "p" / "tiny-F16.gguf").is_file()
    assert "ollama create tiny -f Modelfile && ollama run tiny" in err
    code, _, err = homing("export", str(tmp_path / "c"), "--to", "ollama", "--out", "o")
    assert code == 2
    assert "--force" in err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--to", "onnx"), "hf, gguf, ollama, adapter, merged"),
        (("--dtype", "int4"), "bf16"),
        (("--to", "gguf", "--dtype", "bf16"), "--type"),
        (("--to", "gguf", "--type", "q8"), "fix --type q8_0"),
        (("--to", "gguf", "--type", "q4_k_m"), "llama-quantize NAME-F16.gguf NAME.gguf Q4_K_M"),
        (("--to", "gguff"), "fix --to gguf"),
        (("--type", "q8_0"), "--to gguf --type q8_0"),
        (("--to", "adapter", "--type", "f16"), "--type does not apply to --to adapter"),
        (("--to", "merged"), "method: full"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    homing: Homing, tmp_path: Path, flags: tuple[str, ...], word: str
) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    code, _, err = homing("export", str(tmp_path / "c"), *flags)
    assert code == 2
    assert word in err
    assert "Traceback" not in err
    assert not (tmp_path / "exports").exists() or not list((tmp_path / "exports").iterdir())


@pytest.mark.slow
def test_weights_without_an_adapter_are_refused_with_a_command_that_works(homing: Homing, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "models" / "tiny", "llama")
    code, _, err = homing("export", "tiny", "--to", "adapter")
    assert code == 2
    (fix,) = re.findall(r"fix Export the whole model: homing (export .*)", err)
    code, out, err = homing(*fix.split())
    assert (code, out.strip()) == (0, "exports/tiny-hf"), err


def test_an_adapter_needs_its_base_and_says_so(homing: Homing, tmp_path: Path) -> None:
    make_adapter(tmp_path / "c", tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    code, _, err = homing("generate", str(tmp_path / "c"), "--tokens", "4")
    assert code == 2
    assert "--base" in err
    code, _, err = homing("generate", str(tmp_path / "c"), "--tokens", "4", "--base", str(tmp_path / "moved"))
    assert code == 0, err


@pytest.mark.slow
def test_weights_of_others_in_several_files_are_generated_from_and_talked_to(homing: Homing, tmp_path: Path) -> None:
    reference = tmp_path / "upstream"
    write_reference(reference, "qwen3", vocab_size=400, dtype=torch.bfloat16, max_shard_size="16KB")
    write_tokenizer(reference)
    assert not (reference / "model.safetensors").exists()
    for verb in (("generate", "-p", "the"), ("chat",)):
        code, out, err = homing(verb[0], "./upstream", *verb[1:], "--tokens", "5", "--seed", "1", stdin=b"Hi.\n")
        assert code == 0, err
        assert out
    (reference / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    code, _, err = homing("generate", "./upstream")
    assert code == 2
    assert "'mamba'" in err
    assert "Qwen3" in err


@pytest.mark.parametrize(
    ("absent", "refused"), [("gguf", {"gguf", "ollama"}), ("transformers", {"hf", "merged", "adapter"})]
)
def test_only_what_a_target_is_made_with_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, absent: str, refused: set[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == absent else found(name))
    for kind in KINDS:
        if kind in refused:
            with pytest.raises(MissingExtra) as caught:
                extras.need_for_export(kind, verb="export")
            assert absent in caught.value.why
            assert "[export]'" in caught.value.fix
        else:
            extras.need_for_export(kind, verb="export")
    hint = extras.export_hint("play")
    assert hint.startswith("Use it elsewhere: homing export play")
    assert ("pip install" in hint) == (absent == "transformers")
