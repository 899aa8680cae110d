from __future__ import annotations

import string

import pytest

from homing.config.parse.key_suggestions import FOREIGN, suggest_key, tidy_name
from homing.config.schema.keys import all_keys, find_keys
from homing.redact import looks_like_secret_key, looks_like_secret_value


@pytest.mark.acceptance(96, 98, "X18")
@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        (("model", "d_model"), "model.width"),
        (("model", "n_embd"), "model.width"),
        (("model", "num_hidden_layers"), "model.layers"),
        (("training", ), "phases"),
        (("phases", 0, "learning_rate"), "phases.0.lr"),
        (("phases", 2, "per_device_train_batch_size"), "phases.2.micro_batch"),
        (("train", "gradient_accumulation_steps"), "phases.0.batch_tokens"),
        (("train", "save_total_limit"), "checkpoint.keep_last"),
        (("model", "vocab_size"), "tokenizer.vocab_size"),
        (("train", "bf16"), "train.precision"),
        (("train", "torch_compile"), "train.compile"),
        (("max_iters",), "phases.0.steps"),
        (("model", "block-size"), "model.context"),
        (("model", "Width"), "model.width"),
        (("lr",), "phases.0.lr"),
        (("phases", 0, "depth"), "model.depth"),
        (("phases", 1, "data", "test_fraction"), "phases.1.data.val_fraction"),
        (("test_fraction",), "--smoke"),
        (("data", "test-size"), "data.val_fraction"),
        (("test_mode",), "--smoke"),
        (("train", "testMode"), "--smoke"),
        (("phases", 1, "lora", "r"), "phases.1.lora.rank"),
        (("phases", 0, "deepspeed"), "phases.0.offload"),
        (("train", "use_flash_attention"), "train.attention"),
        (("data", "lines_per_shard"), "data.shard_tokens (in tokens, not lines)"),
        (("experiment",), "Did you mean name?"),
        (("TRAINING_PHASE",), "train.only"),
    ],
)  # fmt: skip
def test_names_from_other_trainers_and_other_sections_are_answered_with_ours(
    typed: tuple[str | int, ...], ours: str
) -> None:
    assert ours in suggest_key(typed)


def test_the_table_is_large_and_points_only_at_keys_that_exist() -> None:
    assert len(FOREIGN) >= 40
    sections = {path.split(".")[0] for path in all_keys()}
    for reference, ours in FOREIGN.items():
        target = ours.split(" ")[0]
        assert find_keys(target) or target in sections, (reference, ours)
        assert reference not in {found.name for found in all_keys().values()}, f"{reference} is a key of ours"


@pytest.mark.acceptance(98)
def test_one_wrong_letter_in_any_key_finds_that_key() -> None:
    right = wrong = 0
    for found in all_keys().values():
        path = tuple(0 if part == "N" else part for part in found.path.split("."))
        names = {other.name for other in all_keys().values() if other.section == found.section}
        for position in range(len(found.name)):
            for letter in (string.ascii_lowercase[position % 26], ""):
                typed = found.name[:position] + letter + found.name[position + 1 :]
                if not typed or typed in names or typed == found.name:
                    continue
                said = suggest_key((*path[:-1], typed))
                shown = found.path.replace(".N.", ".0.")
                right, wrong = (right + 1, wrong) if f"{shown}?" in said else (right, wrong + 1)
    assert right / (right + wrong) >= 0.95, (right, wrong)


def test_what_looks_like_a_secret_is_known_and_what_does_not_is_left_alone() -> None:
    for name in ("api_key", "RUNPOD_API_KEY", "hf_token", "wandb-token", "password", "aws_secret_access_key", "token"):
        assert looks_like_secret_key(name), name
    for name in ("tokens", "tokenizer", "num_tokens", "key", "batch_tokens", "monkey"):
        assert not looks_like_secret_key(name), name
    assert looks_like_secret_value("hf_" + "a" * 30)
    assert not looks_like_secret_value("hf:me/model")
    assert not looks_like_secret_value(3)


@pytest.mark.parametrize(
    ("typed", "tidy"),
    [("Über Goethe", "ueber-goethe"), ("Straße 2", "strasse-2"), ("café_au.lait", "cafe-au-lait"), ("漢字", "")],
)
def test_a_name_with_letters_of_its_own_keeps_what_it_can(typed: str, tidy: str) -> None:
    assert tidy_name(typed) == tidy
