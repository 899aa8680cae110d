"""`homing generate`, from the command line to the text."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import pytest
from tests.cli.trained import make_checkpoint, make_trained_run
from tests.cli.typed import Homing

from homing.api.models.generate_text import continue_text
from homing.api.models.open_model import open_model
from homing.cli.model_options import takes_sampling
from homing.sampling_settings import DEFAULT_SAMPLING, SamplingSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "models" / "tiny", tmp_path / "data")


@pytest.mark.acceptance(2)
def test_the_text_is_on_stdout_and_the_talk_on_stderr(homing: Homing, model: Path) -> None:
    code, out, err = homing("generate", "tiny", "--prompt", "the cat", "--tokens", "12", "--seed", "1")
    assert code == 0
    assert out.startswith("the cat")
    assert len(out) > len("the cat\n")
    assert "models/tiny on cpu" in err
    assert "seed 1" in err
    assert "tok/s" in err


def test_a_seed_repeats_the_text_and_a_random_one_is_printed(homing: Homing, model: Path) -> None:
    texts = [homing("generate", "tiny", "--seed", "5", "--tokens", "30")[1] for _ in range(2)]
    assert texts[0] == texts[1]
    _, _, err = homing("generate", "tiny", "--tokens", "30")
    assert "seed " in err


def test_json_is_one_document_with_the_same_text(homing: Homing, model: Path) -> None:
    arguments = ("generate", "tiny", "-p", "the", "--tokens", "10", "--seed", "3", "--temperature", "0")
    _, plain, _ = homing(*arguments)
    code, out, _ = homing(*arguments, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "homing.generate/1"
    assert document["prompt"] + document["text"] + "\n" == plain
    assert document["num_tokens"] == 10
    assert document["is_ended"] is False


def test_a_prompt_of_minus_comes_from_stdin(homing: Homing, model: Path) -> None:
    code, out, _ = homing("generate", "tiny", "--prompt", "-", "--tokens", "3", stdin="für dich\n".encode())
    assert code == 0
    assert out.startswith("für dich")
    assert "\n" not in out[: len("für dich") + 1]
    code, _, err = homing("generate", "tiny", "--prompt", "-", stdin=b"\xff\xfe")
    assert code == 2
    assert "not UTF-8" in err


def test_a_long_prompt_is_cut_with_a_message(homing: Homing, model: Path) -> None:
    code, _, err = homing("generate", "tiny", "-p", "the cat sat on the mat and the dog ran home", "--tokens", "2")
    assert code == 0
    assert "only the last 16 fit" in err


def test_a_run_at_home_is_found_by_name_and_its_checkpoint_chosen(
    homing: Homing, tmp_path: Path, homing_home: Path
) -> None:
    make_trained_run(homing_home / "runs" / "tiny-20260101-000000-abcd", tmp_path / "data")
    texts = {}
    for asked, step in (("best", 4), ("latest", 12), ("8", 8)):
        code, texts[asked], err = homing("generate", "tiny", "--checkpoint", asked, "--seed", "1", "--tokens", "20")
        assert code == 0
        assert f"step-{step:08d}" in err
    assert len(set(texts.values())) == 3


def test_mistakes_end_with_three_lines_and_their_exit_code(homing: Homing, model: Path) -> None:
    cases = [
        (("generate", "absent"), 2, "No trained model called 'absent'"),
        (("generate", "tiny", "--device", "tpu"), 2, "Unknown device: 'tpu'"),
        (("generate", "tiny", "--checkpoint", "newest"), 2, "Invalid checkpoint"),
        (("generate", "tiny", "--temperature", "-1"), 2, "--temperature"),
        (("generate", "tiny", "--tokens", "0"), 2, "--tokens"),
        (("generate", "tiny", "--prompt", "half a \udcff"), 2, "not UTF-8"),
        (("generate", "tiny", "--device", "cpu:x"), 2, "Unknown device"),
        (("generate", "models/tiny", "--checkpoint", "4"), 2, "nothing to choose"),
        (("generate", "tiny", "--checkpoint", "\u00b2"), 2, "Invalid checkpoint"),
    ]
    for arguments, expected, said in cases:
        code, out, err = homing(*arguments)
        assert code == expected, err
        assert said in err
        assert "Traceback" not in err
        assert out == ""


@pytest.mark.acceptance(19)
def test_a_checkpoint_without_its_tokenizer_is_refused_with_how_to_get_it(homing: Homing, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    code, _, err = homing("generate", "tiny")
    assert code == 2
    assert "homing fetch tiny" in err


def test_a_damaged_checkpoint_is_an_integrity_failure(homing: Homing, model: Path) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, err = homing("generate", "tiny")
    assert code == 7
    assert "is damaged" in err


def test_a_stop_string_that_the_last_token_completes_ends_the_text(homing: Homing, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "models" / "tiny", tmp_path / "data")
    model = open_model("tiny", verb="generate", device="cpu")

    def ended(num_tokens: int, *stop: str) -> tuple[str, bool, str]:
        settings = SamplingSettings(temperature=1.5, seed=3)
        begun = continue_text(model, "the cat", tokens=num_tokens, sampling=settings, stop=stop)
        assert not begun.is_ended, "nothing was generated yet"
        list(begun)
        return begun.text, begun.is_ended, begun.ending

    text, is_ended, ending = ended(9)
    assert (is_ended, ending) == (False, "tokens")
    at_last_token = text[len(ended(8)[0]) :]
    assert at_last_token not in text[: -len(at_last_token)], "else it stops earlier, and the test proves nothing"
    assert ended(9, at_last_token) == (text[: -len(at_last_token)], True, "stop")


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
def test_the_verbs_have_the_same_sampling_options_with_the_same_defaults(homing: Homing, verb: str) -> None:
    code, shown, _ = homing(verb, "--help")
    assert code == 0
    module = importlib.import_module(f"homing.cli.verbs.{verb}")
    parameters = inspect.signature(module.command).parameters
    settings = {each.name: each.default for each in dataclasses.fields(SamplingSettings)}
    for name in settings.keys() - {"seed", "logit_bias"}:
        assert f"--{name.replace('_', '-')}" in shown
        assert parameters[name].default == settings[name]


def test_each_sampling_option_reaches_its_setting() -> None:
    taken: list[SamplingSettings] = []

    @takes_sampling
    def command(name: str = "", sampling: SamplingSettings = DEFAULT_SAMPLING) -> None:
        taken.append(sampling)

    given = {name: number / 8 for number, name in enumerate(inspect.signature(command).parameters) if name != "name"}
    command(name="x", **given)
    assert {name: getattr(taken[0], name) for name in given} == given
    assert len(given) == 7
