"""`homing eval`, from the command line to table, report and JSON."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path

import pytest
from tests.cli.trained import make_checkpoint
from tests.cli.typed import Homing
from tests.lm.tiny import make_data, make_run

from homing.errors import DataError
from homing.lm.tokenizer.tokenizer import SPECIALS
from homing.wire.run_json import Base, Rl, RlTask

CHOICES = [{"question": f"the cat {n}", "choices": ["sat", "ran home"], "gold": n % 2} for n in range(6)]


@pytest.fixture
def homing(homing: Homing) -> Homing:
    return functools.partial(homing, "eval")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, CHOICES)))
    (tmp_path / "text.txt").write_text("the cat sat on a mat. " * 1000)
    return make_checkpoint(tmp_path / "models" / "tiny", tmp_path / "data" / "tiny")


@pytest.fixture
def answering(tmp_path: Path) -> Path:
    """Of a context of 128, as every `tiny` run has, after a phase of rl on sums and on questions of its own."""
    data = tmp_path / "data" / "tiny"
    make_data(data, num_documents=20, specials=SPECIALS["standard"])
    own = [json.dumps({"prompt": f"{n}?", "answer": str(n)}) for n in range(200)]
    (data / "own.jsonl").write_text("\n".join(own))
    sha256 = hashlib.sha256((data / "own.jsonl").read_bytes()).hexdigest()
    tasks = [RlTask("arithmetic", difficulty=2), RlTask("prompts", file="own.jsonl", file_sha256=sha256)]
    run = make_run(data, kind="rl", rl=Rl(tasks=tasks, max_new_tokens=12))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, context=128))
    return make_checkpoint(tmp_path / "models" / "tiny", data, phase="rl", run=run)


def test_without_a_set_it_is_the_text_that_the_run_held_out(homing: Homing, model: Path) -> None:
    code, out, err = homing("tiny", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "homing.eval/1"
    (measured,) = document["results"][0]
    assert measured["name"] == "text held out for tiny"
    assert [score["name"] for score in measured["scores"]] == ["bits_per_byte", "perplexity", "nats_per_token"]
    assert len(document["models"][0]["sha256"]) == len(measured["data_sha256"]) == 64
    assert "homing eval --compare" in err


def test_where_no_text_was_held_out_it_is_said_and_nothing_is_called_damaged(homing: Homing, tmp_path: Path) -> None:
    data = tmp_path / "data" / "tiny"
    make_data(data, num_documents=20)
    made = make_run(data)
    none = dataclasses.replace(made, data=dataclasses.replace(made.data, num_val_tokens=0))
    make_checkpoint(tmp_path / "models" / "tiny", data, run=none)
    code, _, err = homing("tiny")
    assert code == 2
    assert "tiny has no held-out text" in err
    assert "--text FILE" in err


def test_an_adapter_of_weights_on_the_hub_is_measured_with_them_as_it_is_talked_to(
    homing: Homing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data" / "tiny"
    make_data(data, num_documents=20)
    made = make_run(data)
    phase = dataclasses.replace(made.phases[0], method="lora")
    base = Base("hf:some/base", dir="")
    make_checkpoint(tmp_path / "models" / "tiny", data, run=dataclasses.replace(made, phases=[phase], base=base))
    asked: list[str] = []

    def bring(address: str) -> Path:
        asked.append(address)
        raise DataError(f"{address} was asked for.")

    monkeypatch.setattr("homing.api.lookup.find_adapter_base._bring", bring)
    assert "hf:some/base was asked for." in homing("tiny")[2]
    assert "hf:other/base was asked for." in homing("tiny", "--base", "hf:other/base")[2]
    assert asked == ["hf:some/base", "hf:other/base"]


def test_data_under_another_name_is_known_by_its_hash(homing: Homing, tmp_path: Path) -> None:
    """As after `homing launch moss --name fern`, and `homing fetch fern`."""
    data = tmp_path / "data" / "moss"
    make_data(data, num_documents=20)
    made = make_run(data)
    away = dataclasses.replace(made, name="fern", data=dataclasses.replace(made.data, dir="../data"))
    make_checkpoint(tmp_path / "models" / "fern", data, run=away)
    make_data(tmp_path / "data" / "aster", num_documents=21)
    code, out, err = homing("fern", "--json")
    assert code == 0, err
    assert json.loads(out)["results"][0][0]["name"] == "text held out for fern"
    with (data / "manifest.json").open("a") as file:
        file.write("\n")
    code, _, err = homing("fern")
    assert code == 2, "the held-out part of other data is unknown"
    assert f"Looked for the run's data in {tmp_path / 'data'}, " in err
    assert "data/fern and the other data folders." in err


def test_figures_are_on_stdout_with_their_intervals_and_how_they_were_made(homing: Homing, model: Path) -> None:
    code, out, err = homing("tiny", "--text", "text.txt", "--task", "task.jsonl", "--seed", "4")
    assert code == 0
    assert "bits_per_byte" in out
    assert "bootstrap over 11 stretches of 2,048 bytes, 2,000 draws, seed 4" in out
    assert "acc_norm" in out
    assert "exact (Clopper-Pearson)" in out
    assert "22,000 bytes" in err
    assert "6 questions" in err


def test_the_report_is_written_with_hashes_and_the_same_figures_as_json(homing: Homing, model: Path) -> None:
    code, out, _ = homing("tiny", "--task", "task.jsonl", "--out", "reports/first.md", "--json")
    assert code == 0
    printed, kept = json.loads(out), json.loads(Path("reports/first.json").read_text())
    assert kept == printed
    report = Path("reports/first.md").read_text()
    assert printed["models"][0]["sha256"] in report
    assert printed["results"][0][0]["data_sha256"] in report
    assert "| task.jsonl | acc |" in report
    assert sorted(path.name for path in Path("reports").iterdir()) == ["first.json", "first.md"]


def test_the_same_command_gives_the_same_figures(homing: Homing, model: Path) -> None:
    arguments = ("tiny", "--text", "text.txt", "--task", "task.jsonl", "--json")
    first, again = (json.loads(homing(*arguments)[1]) for _ in range(2))
    assert first["results"] == again["results"]
    assert first["models"] == again["models"]


@pytest.mark.acceptance(100)
def test_two_models_are_compared_in_a_plain_sentence(homing: Homing, model: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "models" / "other", tmp_path / "data" / "tiny", seed=5)
    code, out, _ = homing("--compare", "tiny", "other", "--text", "text.txt")
    assert code == 0
    (sentence,) = [line for line in out.splitlines() if line.startswith("bits_per_byte on text.txt: ")]
    assert "is better than" in sentence or "within noise" in sentence
    assert "models/tiny" in out
    assert "models/other" in out
    _, out, _ = homing("--compare", "tiny", "tiny", "--text", "text.txt", "--out", "r.md", "--json")
    (difference,) = json.loads(out)["differences"]
    assert difference["difference"] == 0
    assert not difference["is_more_than_noise"]
    assert "## Comparison" in Path("r.md").read_text()


def test_text_that_one_run_held_out_may_have_been_read_by_the_other(
    homing: Homing, model: Path, tmp_path: Path
) -> None:
    from tests.lm.tiny import make_data

    make_data(tmp_path / "data" / "more", num_documents=30)
    make_checkpoint(tmp_path / "models" / "other", tmp_path / "data" / "more")
    code, _, err = homing("--compare", "tiny", "other")
    assert code == 0
    assert "warning: the text was held out of tiny's training data;" in err
    assert " other was trained on other data, which may include the text." in err


@pytest.mark.acceptance(100)
@pytest.mark.parametrize("task", ["arithmetic:1", "arithmetic:5", "spelling:1", "spelling:5"])
def test_made_up_tasks_fit_a_context_of_128_without_a_flag(homing: Homing, answering: Path, task: str) -> None:
    code, out, err = homing("tiny", "--task", task, "--at-most", "4", "--json")
    assert code == 0, err
    (measured,) = json.loads(out)["results"][0]
    assert measured["counts"]["too_long"] == 0
    new_tokens = measured["settings"]["new_tokens"]
    assert 16 <= new_tokens < 128
    assert f"The context of 128 tokens limits answers to {new_tokens} tokens." in err


def test_the_flags_of_answers_are_heeded_with_made_up_tasks(homing: Homing, answering: Path) -> None:
    page = Path(__file__).parents[3].joinpath("docs", "guides", "eval.md").read_text()
    (advised,) = re.findall(r"`(--new-tokens \d+)`", page)
    code, out, err = homing("tiny", "--task", "spelling:1", "--at-most", "3", *advised.split(), "--json")
    assert code == 0, err
    assert json.loads(out)["results"][0][0]["settings"]["new_tokens"] == int(advised.split()[1])
    code, out, err = homing("tiny", "--task", "arithmetic:1", "--at-most", "3", "--pass-at", "2", "--json")
    assert code == 0, err
    assert [one["name"] for one in json.loads(out)["results"][0][0]["scores"]] == ["pass@1", "pass@2"]
    code, _, err = homing("tiny", "--task", "arithmetic:1", "--at-most", "3", "--new-tokens", "200")
    assert code == 2
    (fix,) = re.findall(r"or lower it: (--new-tokens \d+)", err)
    assert homing("tiny", "--task", "arithmetic:1", "--at-most", "3", *fix.split())[0] == 0, "the advice must work"


@pytest.mark.acceptance(100)
def test_after_rl_eval_measures_its_tasks_and_the_text(homing: Homing, answering: Path) -> None:
    code, out, err = homing("tiny", "--at-most", "4", "--json")
    assert code == 0, err
    sums, own, text = json.loads(out)["results"][0]
    assert (sums["name"], own["name"]) == ("arithmetic:2", "own.jsonl, held out")
    assert text["name"] == "text held out for tiny"
    assert {one["settings"]["new_tokens"] for one in (sums, own)} == {12}, "as in the phase"
    assert own["counts"]["questions"] == 4
    code, out, err = homing("tiny", "--at-most", "4", "--pass-at", "2", "--json")
    assert code == 0, err
    (Path("data") / "tiny" / "own.jsonl").write_text('{"prompt": "1?", "answer": "1"}')
    code, _, err = homing("tiny", "--at-most", "4")
    assert code == 2
    assert "own.jsonl" in err
    assert "--task" in err


def test_a_task_with_a_reward_of_its_own_is_left_out_and_said_so(
    homing: Homing, answering: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data" / "tiny"
    run = make_run(data, kind="rl", rl=Rl(tasks=[RlTask("prompts", file="own.jsonl", reward="reward.py")]))
    make_checkpoint(tmp_path / "models" / "own", data, phase="rl", run=run)
    code, out, err = homing("own", "--json")
    assert code == 0, err
    assert [one["name"] for one in json.loads(out)["results"][0]] == ["text held out for tiny"]
    assert "Skipped prompts: it is scored by reward.py, which eval does not run." in err


@pytest.mark.acceptance(100)
@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["absent"], "No trained model called 'absent'", "homing fetch absent"),
        (["tiny", "--text", "nowhere.txt"], "text: nowhere.txt does not exist", "--text PATH"),
        (["tiny", "--task", "nowhere.jsonl"], "task: nowhere.jsonl does not exist", "--task PATH"),
        (["tiny", "--task", "hellaswag"], "Unknown task: 'hellaswag'", "--task FILE.jsonl"),
        (["tiny", "--task", "gsm8k"], "The GSM8K questions were not found", "--task gsm8k:test.jsonl"),
        (["tiny", "--task", "arithmetic:9"], "the difficulty must be 1 to 5", "--task arithmetic:1"),
        (["tiny", "--pass-at", "8", "--samples", "2"], "cannot be computed from 2 samples", "--samples 8"),
        (["tiny", "--pass-at", "2"], "--pass-at applies only to generated answers", "--task arithmetic:1"),
        (
            ["tiny", "--task", "task.jsonl", "--new-tokens", "8"],
            "--new-tokens applies only to generated answers",
            "leave out the option",
        ),
        (["tiny", "--task", "task.jsonl", "--window", "16"], "--window applies only to text", "--text FILE"),
        (["tiny", "--compare", "tiny", "tiny"], "Three models were given", "homing eval --compare tiny tiny"),
        (["tiny", "--chat", "nowhere.jsonl"], "chat: nowhere.jsonl does not exist", "--chat PATH"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_fix(
    homing: Homing, model: Path, arguments: list[str], what: str, fix: str
) -> None:
    code, out, err = homing(*arguments)
    assert (code, out) == (2, "")
    assert what in err
    assert fix in err
    assert "Traceback" not in err


def test_eval_refuses_a_run_with_missing_or_different_data(homing: Homing, model: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "data" / "tiny" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    code, _, err = homing("tiny")
    assert code == 2
    assert "The held-out text of tiny was not found." in err
    (model / "run.json").unlink()
    (model / "manifest.json").unlink()
    (model / "config.json").write_text(json.dumps(QWEN3))
    code, _, err = homing("models/tiny")
    assert code == 2
    assert "--text FILE" in err


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 272, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
