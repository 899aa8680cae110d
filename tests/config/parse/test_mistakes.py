"""Every mistake at once, with its line, its key and what would be right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.config.conftest import BASE

from homing.config.load import Loaded
from homing.errors import Mistake

Mistakes = Callable[..., list[Mistake]]


@pytest.mark.acceptance(75, 85, 98)
def test_all_mistakes_are_listed_in_the_order_of_their_lines(mistakes: Mistakes) -> None:
    found = mistakes(
        "name: base\nseed: many\nmodel:\n  widht: 64\n  heads: 3\n  width: 64\n"
        "phases:\n  - kind: pretrian\n    steps: 0\n"
    )
    assert [m.line for m in found] == [2, 4, 5, 8, 9]
    assert [m.key for m in found] == ["seed", "model.widht", "model.heads", "phases.0.kind", "phases.0.steps"]
    assert "model.width" in found[1].suggestion
    assert "2 or 4" in found[2].suggestion
    assert "pretrain" in found[3].suggestion
    assert "at least 1" in found[4].suggestion


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (BASE.replace("steps: 100", "stesp: 100"), "phases.0.stesp"),
        (BASE.replace("steps: 100", "max_steps: 100"), "phases.0.max_steps"),
        (BASE.replace("- steps: 100\n   ", "-") + "steps: 100\n", "steps"),
        (BASE.replace("phases:", "phasse:"), "phasse"),
        (BASE.replace("layers: 2\n  width: 64\n  heads: 2", "dpeth: 2").replace("steps: 100\n    ", ""), "model.dpeth"),
        (BASE.replace("steps: 100", "steps: 10\n    kind: sft\n    data: {caht: [a.jsonl]}"), "phases.0.data.caht"),
        (BASE.replace("steps: 100", "stesp:"), "phases.0.stesp"),
    ],
)
def test_what_a_misspelt_key_leaves_without_a_value_is_no_mistake_of_its_own(
    mistakes: Mistakes, text: str, unknown: str
) -> None:
    assert [found.key for found in mistakes(text)] == [unknown]


def test_a_key_that_is_like_no_other_explains_nothing(mistakes: Mistakes) -> None:
    found = mistakes(BASE.replace("steps: 100", "qqqqqq: 100"))
    assert [(m.key, m.problem) for m in found] == [
        ("phases.0", "has no length."),
        ("phases.0.qqqqqq", "unknown key."),
    ]


@pytest.mark.acceptance(29, 82, 86)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.heads", "5", "is not divisible"),
        ("model.kv_heads", "3", "cannot share"),
        ("model.head_size", "31", "odd"),
        ("phases.0.lr_scalar", "0.5", "does not apply to family: stock"),
        ("phases.0.batch_tokens", "250", "Nearest: 224 or 256"),
        ("phases.0.micro_batch", "3", "Nearest: 2, 4"),
        ("phases.0.epochs", "-1", "out of range"),
        ("phases.0.warmup_steps", "100", "would fill all 100 steps"),
        ("phases.0.kind", "sft", "no conversations to train on"),
        ("phases.0.kind", "midd", "one of pretrain, mid, sft, rl"),
        ("phases.0.method", "qlora", "needs trained weights"),
        ("phases.0.decay_fraction", "2", "at most 1"),
        ("phases.0.lr", "fast", "not a number"),
        ("phases.0.init_from", "nowhere", "has no config.json and no model.safetensors"),
        ("tokenizer.vocab_size", "260", "at least 272"),
        ("tokenizer.vocab_size", "true", "not a count"),
        ("tokenizer.file", "nowhere.json", "No tokenizer"),
        ("limits.spend", "0", "more than $0.00"),
        ("limits.idle", "soon", "not a duration"),
        ("limits.idle", "30", "has no unit: 30s, 30m or 30h"),
        ("limits.time", "6", "has no unit: 6s, 6m or 6h"),
        ("checkpoint.every_time", "1.5", "has no unit: 1.5s, 1.5m or 1.5h"),
        ("limits.spend", "'9e999999'", "too large"),
        ("cloud.gpu", "H1000", "Did you mean H100"),
        ("cloud.providers", "[runpood]", "Did you mean runpod"),
        ("cloud.providers", "5", "expected a list"),
        ("store", "ftp://x", "file:/folder, s3://bucket/prefix"),
        ("store", "s3://Not_A_Bucket/x", "s3://bucket/prefix"),
        ("store", "hf:only-a-name", "hf:OWNER/NAME"),
        ("store", "'file:'", "file:/folder"),
        ("name", "My Run", "my-run"),
        ("train.deterministic", "maybe", "true or false"),
        ("data.text", "[1]", "expected a string"),
        ("data.val_fraction", ".nan", "not a number"),
        ("data.shard_tokens", "0", "at least 1000"),
        ("data.shard_tokens", "lines", "not a count"),
        ("data.take", "some", "not a size"),
        ("model", "12", "expected a section"),
        ("phases", "[]", "1 to 20 phases"),
        ("phases", "{steps: 3}", "expected a list"),
        ("phases.0", "pretrain", "expected a section"),
        ("train.compile", "perhaps", "one of auto, on, off"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(mistakes: Mistakes, key: str, value: str, words: str) -> None:
    found = mistakes(BASE, f"{key}={value}")
    assert any(words in f"{m.problem} {m.suggestion}" and m.key.startswith(key) for m in found), found


def test_exactly_one_length_is_needed(mistakes: Mistakes) -> None:
    without = BASE.replace("steps: 100\n    ", "")
    (missing,) = mistakes(without)
    assert "has no length" in missing.problem
    (double,) = mistakes(BASE + "    epochs: 2\n")
    assert "steps (run file, line 8)" in double.problem or "line 8" in double.problem
    assert "epochs" in double.problem


@pytest.mark.acceptance("P5")
def test_a_key_that_would_do_nothing_is_refused(mistakes: Mistakes) -> None:
    text = (
        BASE
        + "    optimizer: adamw\n    momentum: 0.9\n    schedule: constant\n    floor: 0.1\n    decay_fraction: 0.2\n"
    )
    assert [m.key.split(".")[-1] for m in mistakes(text)] == ["momentum", "floor", "decay_fraction"]


def test_a_key_without_a_value_is_a_mistake_and_an_empty_section_is_not(
    load: Callable[..., Loaded], mistakes: Mistakes
) -> None:
    assert load(BASE + "limits:\n  # spend: $3\ncloud:\n").run.limits.spend_usd is None
    (found,) = mistakes(BASE + "limits:\n  spend:\n")
    assert "has no value" in found.problem
    assert found.line == 11


def test_secrets_are_refused_and_never_printed(mistakes: Mistakes) -> None:
    secret = "hf_" + "s" * 30
    found = mistakes(BASE + f"cloud:\n  api_key: abc123\nsample:\n  prompts: [{secret}]\n", f"store={secret}")
    assert len(found) == 3
    assert all("secret" in m.problem for m in found)
    assert not any(secret in str(m) or "abc123" in str(m) for m in found)


@pytest.mark.acceptance("X6")
def test_the_same_kind_of_phase_twice_is_refused(mistakes: Mistakes) -> None:
    (found,) = mistakes(BASE + "  - steps: 5\n    batch_tokens: 256\n")
    assert found.key == "phases.1.kind"
    assert "folder is named after the kind" in found.problem
    assert "init_from: models/base" in found.suggestion


RL = "  - {kind: rl, steps: 5, rl: {tasks: [{kind: arithmetic}]}}\n"
MID = "  - {kind: mid, steps: 5, batch_tokens: 256}\n"


@pytest.mark.parametrize("only", ["", "pretrain", "mid", "rl"])
def test_a_chain_that_comes_round_again_is_cut_in_two_at_one_place_whichever_phases_are_chosen(
    mistakes: Mistakes, only: str
) -> None:
    settings = [f"train.only={only}"] if only else []
    found = mistakes(BASE + MID + RL + MID + RL, *settings)
    (of_kinds,) = [each for each in found if each.key.endswith(".kind")]
    assert (of_kinds.key, of_kinds.line) == ("phases.3.kind", 12)  # the rest of the chain goes with it
    assert "phases.1 is already mid" in of_kinds.problem
    assert "those after it" in of_kinds.suggestion


def test_a_kind_that_is_no_kind_is_not_said_to_be_there_twice(mistakes: Mistakes) -> None:
    (found,) = mistakes(BASE + "  - {kind: pretrian, steps: 5, batch_tokens: 256}\n")
    assert "folder" not in found.problem


def test_a_file_with_an_invalid_run_name_needs_a_name_key(mistakes: Mistakes) -> None:
    (found,) = mistakes(BASE.replace("name: base\n", ""), name="My_Run.yaml")
    assert found.key == "name"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nothing", "has no `=`"),
        ("=3", "is not a key"),
        ("a..b=3", "is not a key"),
        ("phases.3.lr=1", "there is no phases.3"),
        ("phases.lr=1", "Write its number"),
        ("name.x=1", "is not a section"),
        ("model.0.x=1", "is not a list"),
        ("model.width=[1", "cannot be read"),
        ("model.widht=64", "Did you mean model.width?"),
        ("d_model=64", "Did you mean model.width?"),
    ],
)
def test_a_wrong_set_names_itself(mistakes: Mistakes, setting: str, words: str) -> None:
    (found,) = mistakes(BASE, setting)
    assert found.file == f"--set {setting}"
    assert words in f"{found.problem} {found.suggestion}"


@pytest.mark.acceptance("X8")
def test_toml_and_json_have_lines_too(mistakes: Mistakes) -> None:
    toml = "[model]\nwidth = 63\nheads = 2\n[[phases]]\nsteps = 1\nlearning_rate = 1\n"
    assert [(m.line, m.key) for m in mistakes(toml, name="t.toml")] == [
        (3, "model.heads"),
        (6, "phases.0.learning_rate"),
    ]
    json = '{\n"model": {\n"widht": 64},\n"phases": [\n{"steps": 1,\n"lr": "x"}]}'
    assert [(m.line, m.key) for m in mistakes(json, name="j.json")] == [(3, "model.widht"), (6, "phases.0.lr")]


def test_a_mistake_in_a_phase_added_by_set_names_the_set(mistakes: Mistakes) -> None:
    found = mistakes(BASE, "phases.1.lr=0.1")
    assert "phases.1" in [each.key for each in found]
    assert {(each.file, each.line) for each in found} == {("--set phases.1.lr=0.1", None)}
