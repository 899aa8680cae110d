"""A Hugging Face folder opens in transformers without our code, and computes and says what the trainer's model does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.export.folders import make_checkpoint
from tests.lm.model.open_weights.foreign_models import write_reference

from homing.errors import IntegrityError, UsageError
from homing.lm.export import Facts, Order, check_export, export, read_record
from homing.lm.export import hf_folder as folder
from homing.lm.generate import generate, load_for_use
from homing.lm.model import Decoder
from homing.lm.model.open_weights import find_weights
from homing.sampling_settings import SamplingSettings
from homing.wire import codec
from homing.wire.checkpoint_manifest import CheckpointManifest, Stage

PROMPTS = [f"the {word} {number}" for number, word in enumerate(["cat", "dog", "fish", "mat", "night"] * 4)]


def order(folder: Path, out: Path, kind: str = "hf", **more: Any) -> Order:
    return Order(folder, kind, out, Facts("tiny", licence="apache-2.0", cost="$0.12 in 1 instance."), **more)


def reference_of(folder: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


@torch.no_grad()
def same_text(model: Decoder, tokenizer: Any, reference: Any) -> int:
    """On how many prompts the greedy ids are the same."""
    count = 0
    for prompt in PROMPTS:
        ids = [tokenizer.end_of_text_id, *tokenizer.encode(prompt)]
        ours = list(generate(model, ids, num_tokens=12, sampling=SamplingSettings(temperature=0.0)))
        out = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=12, do_sample=False,
            eos_token_id=None, use_cache=False,
        )  # fmt: skip
        count += ours == out[0, len(ids) :].tolist()
    return count


@pytest.mark.acceptance("X16")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_transformers_opens_it_without_remote_code_with_the_same_logits_and_greedy_text(
    kind: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "c", kind)
    made = export(order(tmp_path / "c", tmp_path / "out"))
    assert made.proof is not None
    assert made.proof.max_gap < 1e-3
    assert made.proof.num_chats == check_export.NUM_CHATS
    reference = reference_of(tmp_path / "out")
    model, tokenizer = load_for_use(tmp_path / "c", "cpu")
    ids = torch.randint(model.shape.vocab_size, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(reference(ids).logits, model(ids), atol=1e-3, rtol=0)
    assert same_text(model, tokenizer, reference) == len(PROMPTS) == 20
    # What transformers 5 does to the digits of every qwen2 folder is said, not hidden.
    assert ("PreTrainedTokenizerFast" in (tmp_path / "out" / "README.md").read_text()) == (kind == "qwen2")
    assert bool(made.notes) == (kind == "qwen2")


def test_a_swift_model_opens_with_the_modelling_file_that_comes_with_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "swift")
    made = export(order(tmp_path / "c", tmp_path / "out"))
    assert made.proof is not None
    assert made.proof.max_gap < 1e-3
    reference = reference_of(tmp_path / "out", trust_remote_code=True)
    model, tokenizer = load_for_use(tmp_path / "c", "cpu")
    assert same_text(model, tokenizer, reference) == len(PROMPTS)
    assert "trust_remote_code" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ValueError, match="padding on the right"):
        reference(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1]]))


def test_the_folder_has_all_that_readers_look_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    made = export(order(tmp_path / "c", tmp_path / "out"))
    assert {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "README.md", "export.json",
    } == made.files.keys()  # fmt: skip
    read = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert read["config"]["architectures"] == ["Qwen3ForCausalLM"]
    assert read["tokenizer_config"]["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in read["tokenizer_config"]["chat_template"]
    assert read["generation_config"]["eos_token_id"] == [2, 0]
    assert read["export"]["checked"] == made.checked
    card = (tmp_path / "out" / "README.md").read_text()
    for word in ("apache-2.0", "$0.12", "1.2500", "0.9000", "| sft | full |", made.checked[0][20:]):
        assert word in card, word
    assert read_record(tmp_path / "out") is not None


def test_how_the_base_is_sampled_from_stays_and_the_end_of_a_turn_is_an_end(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "qwen3")
    base = {"eos_token_id": [0, 7], "temperature": 0.6, "pad_token_id": 3}
    (tmp_path / "c" / "generation_config.json").write_text(json.dumps(base))
    export(order(tmp_path / "c", tmp_path / "out"))
    messages = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert messages == {**base, "eos_token_id": [2, 0, 7]}  # 2 is <|im_end|>
    assert reference_of(tmp_path / "out").generation_config.eos_token_id == [2, 0, 7]


@pytest.mark.parametrize("kind", ["hf", "ollama"])
def test_what_was_asked_in_turns_is_not_exported_without_their_template(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "c", "llama", phase="rl")
    (tmp_path / "c" / "tokenizer_config.json").unlink()
    with pytest.raises(IntegrityError, match="no chat template") as caught:
        export(order(tmp_path / "c", tmp_path / "out", kind))
    assert "tokenizer_config.json" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_a_template_that_was_lost_on_the_way_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    write = folder.write_tokenizer

    def forgetful(opened: Any, target: Path) -> None:
        write(opened, target)
        path = target / "tokenizer_config.json"
        config = json.loads(path.read_text())
        del config["chat_template"]
        path.write_text(json.dumps(config))

    monkeypatch.setattr("homing.lm.export.hf_folder.write_tokenizer", forgetful)
    with pytest.raises(IntegrityError, match="chats differ"):
        export(order(tmp_path / "c", tmp_path / "out"))


def test_only_what_is_compared_is_announced(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "llama", phase="pretrain")
    (tmp_path / "c" / "tokenizer_config.json").unlink()
    messages: list[str] = []
    export(order(tmp_path / "c", tmp_path / "out"), notify=messages.append)
    assert (
        messages[-1] == "opening the export with transformers and comparing logits and ids (there is no chat template)"
    )
    assert "It completes text; it was not trained to chat." in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_rl_calls_what_is_missing_from_a_pass_by_its_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "llama", phase="rl")
    path = tmp_path / "c" / "manifest.json"
    lineage = [Stage("sft", step=5, val_loss=2.5), Stage("rl", step=2, val_loss=0.9722)]
    path.write_text(codec.dumps(replace(codec.loads(CheckpointManifest, path.read_bytes()), lineage=lineage)))
    export(order(tmp_path / "c", tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nats" not in card
    assert "| missing reward on held-out questions (pass_reward minus their mean reward) | 1.2500 |" in card
    assert "| phase | method | steps | tokens | held out | data | from |" in card
    assert "| loss 2.5000 |" in card
    assert "| missing reward 0.9722 |" in card


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "BF16"), ("fp16", "F16")])
def test_a_narrower_type_is_proven_as_it_was_rounded(tmp_path: Path, dtype: str, name: str) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    export(order(tmp_path / "c", tmp_path / "out", dtype=dtype))
    assert set(find_weights(tmp_path / "out").dtypes.values()) == {name}


def test_an_export_opens_here_again_and_can_be_exported_again(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "c", "qwen2")
    export(order(tmp_path / "c", tmp_path / "one"))
    again, tokenizer = load_for_use(tmp_path / "one", "cpu")
    torch.testing.assert_close(again.weights_for_disk(), model.weights_for_disk(), atol=0, rtol=0)
    assert tokenizer.specials["<|im_end|>"] == 2
    export(order(tmp_path / "one", tmp_path / "two"))
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_weights_of_others_with_spare_rows_and_a_rope_of_llama_3_are_exported_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    reference = tmp_path / "upstream"
    write_reference(reference, "llama-3.1", vocab_size=400, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (reference / name).write_bytes((tmp_path / "c" / name).read_bytes())
    made = export(order(reference, tmp_path / "out"))
    assert made.proof is not None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["dtype"] == "bfloat16"


@pytest.mark.acceptance("X16")
def test_a_failed_check_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    right = check_export.expect

    def wrong(*args: Any) -> check_export.Expected:
        expected = right(*args)
        expected.logits_RTV[0, 3, 5] += 0.01
        return expected

    monkeypatch.setattr("homing.lm.export.export_model.expect", wrong)
    with pytest.raises(IntegrityError, match="logits differ"):
        export(order(tmp_path / "c", tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "data"]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tokenizer_config.json", "<|im_end|>\\\\n", "<|im_end|> \\\\n"),
        ("tokenizer.json", "{1,3}", "{1,2}"),
    ],
)
def test_a_template_or_a_tokenizer_that_reads_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    write = folder.write_tokenizer

    def damaged(opened: Any, target: Path) -> None:
        write(opened, target)
        text = (target / name).read_text()
        assert old in text
        (target / name).write_text(text.replace(old, new))

    monkeypatch.setattr("homing.lm.export.hf_folder.write_tokenizer", damaged)
    with pytest.raises(IntegrityError, match="differ"):
        export(order(tmp_path / "c", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_export_replaces_a_folder_only_if_it_is_an_export_and_force_is_set(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "c", "llama")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(UsageError, match="not an export"):
            export(order(tmp_path / "c", tmp_path / "mine", force=force))
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    export(order(tmp_path / "c", tmp_path / "out"))
    with pytest.raises(UsageError, match="already"):
        export(order(tmp_path / "c", tmp_path / "out"))
    export(order(tmp_path / "c", tmp_path / "out", dtype="bf16", force=True))
    assert find_weights(tmp_path / "out").main_dtype == "BF16"
    with pytest.raises(UsageError, match="no adapter"):
        export(order(tmp_path / "c", tmp_path / "a", "adapter"))
