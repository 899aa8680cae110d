"""Questions in the turns of the weights: their own template taken apart, or ChatML where they lack one."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from small import make_rl_run
from tests.lm.model.open_weights.foreign_models import write_their_tokenizer

from homing.errors import DataError
from homing.lm.data.chat import template as template_module
from homing.lm.data.chat.chat_settings import open_renderer
from homing.lm.data.chat.text_around_turns import write_turns
from homing.lm.phases.rl import Reinforce
from homing.lm.rl.prompter import Prompter
from homing.lm.tokenizer import load_tokenizer
from homing.wire import file_names
from homing.wire.run_json import RlTask

ASK = [{"role": "user", "content": " Who sat? <|eot_id|>"}]
# The templates of Llama 3.2 and Qwen 2.5, without tools.
LLAMA = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{%- endif %}"
    "Today: {{ strftime_now('%d %b %Y') }}\n\n"
    "{%- for m in messages %}{{- '[' + m.role + ']' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"
)
QWEN = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the cat <|im_end|>"},
    {"role": "assistant", "content": " sat"},
    *ASK,
]


def folder_of(folder: Path, family: str, template: str) -> Path:
    write_their_tokenizer(folder, family, "the cat sat on the mat, and the dog ran home. " * 30)
    config = {"bos_token": "<|begin_of_text|>" if family == "llama" else None, "chat_template": template}
    (folder / file_names.TOKENIZER_CONFIG).write_text(json.dumps(config))
    return folder


class Later(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Later:
        return cls(2031, 1, 1)


@pytest.mark.acceptance(91)
def test_weights_with_a_template_of_their_own_are_asked_in_it_on_the_same_day_whenever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "llama", "llama", LLAMA)
    monkeypatch.setattr(template_module.datetime, "datetime", Later)
    assert write_turns(folder) == ""
    tokenizer = load_tokenizer(folder)
    prompter = Prompter(folder, tokenizer)
    ids = prompter.ids(ASK)
    said = "<|begin_of_text|>Today: 26 Jul 2024[user]Who sat? <|eot_id|><|eot_id|>[assistant]"
    assert tokenizer.decode(ids) == said, "or a run that is resumed another day would not ask the same"
    assert ids.count(tokenizer.specials["<|eot_id|>"]) == 1, "what a question spells stays text"
    assert tokenizer.specials["<|eot_id|>"] in prompter.stop_ids
    with pytest.raises(DataError, match="Who sat") as caught:
        prompter.ids([{"role": "system", "content": "Be brief."}, *ASK])
    assert "does not support this order of turns: system, user" in caught.value.why
    assert "ids" in caught.value.fix


@pytest.mark.parametrize("messages", [ASK, CHAT, CHAT[1:], [CHAT[0], *ASK], [*ASK, *ASK]])
def test_taken_apart_a_template_gives_the_ids_that_it_gave_as_it_was(
    tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    folder = folder_of(tmp_path / "qwen", "qwen", QWEN)
    assert write_turns(folder) == ""
    ids = Prompter(folder, load_tokenizer(folder)).ids(messages)
    assert list(ids) == open_renderer(folder).prompt(messages)


def test_a_template_that_cannot_be_split_around_the_text_is_refused_instead_of_guessed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "qwen", "qwen", QWEN.replace("m.content +", "m.content | upper +"))
    (folder / file_names.TURNS).write_text("of a template that was here before")
    assert "between a fixed prefix and suffix" in write_turns(folder)
    assert not (folder / file_names.TURNS).exists()
    with pytest.raises(DataError, match="has not been split into turns") as caught:
        Prompter(folder, load_tokenizer(folder)).ids(ASK)
    assert "homing prep" in caught.value.fix
    counts = (
        "{%- for m in messages %}{{- '<|im_start|>' ~ (m.content | length) ~ m.content ~ '<|im_end|>' }}{%- endfor %}"
    )
    assert "more around a question" in write_turns(folder_of(tmp_path / "qwen", "qwen", counts))


def test_a_split_of_another_template_is_not_reused_for_this_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "qwen", "qwen", QWEN)
    write_turns(folder)
    (folder / file_names.CHAT_TEMPLATE).write_text(QWEN.replace("Qwen", "Moss"))
    with pytest.raises(DataError, match="their own chat template"):
        Prompter(folder, load_tokenizer(folder)).ids(ASK)


def test_a_phase_renders_every_question_with_the_template_next_to_its_tokenizer(tmp_path: Path) -> None:
    file = RlTask(kind="prompts", file="asks.jsonl")
    run = make_rl_run(tmp_path / "data", tasks=[RlTask(kind="arithmetic"), file], context=96)
    asks = [json.dumps({"prompt": f"Go {number}", "answer": "e"}) for number in range(60)]
    (tmp_path / "data/asks.jsonl").write_text("\n".join(asks))
    (tmp_path / "data" / file_names.CHAT_TEMPLATE).write_text(QWEN)
    write_turns(tmp_path / "data")
    work = Reinforce(run, run.phases[0], tmp_path / "data")
    for asked in work.tasks:
        for question in (asked.draw(0), *asked.held_out(1)):
            said = work.tokenizer.decode(question.ids)
            assert said.startswith("<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n" + question.text)


def test_without_a_template_it_is_chatml_and_without_its_marks_nothing(tmp_path: Path) -> None:
    for family in ("qwen", "llama"):
        write_their_tokenizer(tmp_path / family, family, "the cat sat on the mat. " * 30)
        assert write_turns(tmp_path / family) == ""
    tokenizer = load_tokenizer(tmp_path / "qwen")
    prompter = Prompter(tmp_path / "qwen", tokenizer)
    assert tokenizer.decode(prompter.ids(ASK)).startswith("<|endoftext|><|im_start|>user\n Who sat?")
    with pytest.raises(DataError, match="does not support chat"):
        Prompter(tmp_path / "llama", load_tokenizer(tmp_path / "llama")).ids(ASK)


def test_turns_that_the_split_template_cannot_render_are_refused_and_the_others_asked(tmp_path: Path) -> None:
    """As Qwen3, which rewrites what the assistant said."""
    rewritten = QWEN.replace("m.content +", "(m.content | trim if m.role == 'assistant' else m.content) +")
    folder = folder_of(tmp_path / "qwen", "qwen", rewritten)
    assert write_turns(folder) == ""
    prompter = Prompter(folder, load_tokenizer(folder))
    assert list(prompter.ids([CHAT[0], *ASK])) == open_renderer(folder).prompt([CHAT[0], *ASK])
    with pytest.raises(DataError, match="cannot be formatted as a prompt"):
        prompter.ids(CHAT)
