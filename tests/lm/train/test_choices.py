"""What is picked for a device, and what is refused there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from homing.errors import UsageError
from homing.lm.model.backends import Race
from homing.lm.train import choices
from homing.lm.train.choices import memory_warning, pick_attention, pick_choices
from homing.wire.run import PhaseData, Run

CPU = torch.device("cpu")


def test_an_attention_for_cards_is_refused_on_a_processor(tiny_run: Run) -> None:
    train = dataclasses.replace(tiny_run.train, attention="flash")
    picked, _ = pick_choices(train, tiny_run.phases[0], tiny_run.model, CPU, 8, {})
    with pytest.raises(UsageError, match=r"train.attention: flash is for CUDA cards"):
        pick_attention(train, tiny_run.phases[0], tiny_run.model, CPU, picked)


def test_a_processor_has_one_attention_and_tells_nothing(tiny_run: Run) -> None:
    picked, changed = pick_choices(tiny_run.train, tiny_run.phases[0], tiny_run.model, CPU, 8, {})
    assert pick_attention(tiny_run.train, tiny_run.phases[0], tiny_run.model, CPU, picked) == (picked, [])
    assert (picked.attention, picked.segments, changed) == ("sdpa", "mask", [])


def test_a_choice_of_another_card_is_not_kept(tiny_run: Run) -> None:
    before = {"device": "cuda (NVIDIA H200)", "attention": "cudnn", "segments": "flex", "micro_batch": 4}
    picked, changed = pick_choices(tiny_run.train, tiny_run.phases[0], tiny_run.model, CPU, 8, before)
    assert picked.attention == "sdpa"
    assert "attention cudnn -> sdpa" in changed
    assert "segments flex -> mask" in changed


def on_card(run: Run, monkeypatch: pytest.MonkeyPatch, card: str, kind: str, before: dict[str, str]) -> list[str]:
    """What a phase of that kind says of its choices on a card by that name, where flash and flex win their races."""
    monkeypatch.setattr(choices, "describe_device", lambda _: card)
    monkeypatch.setattr(choices, "pick_precision", lambda *_: "bf16")
    monkeypatch.setattr(choices, "race_attention", lambda *_: Race("flash"))
    monkeypatch.setattr(choices, "race_segments", lambda *_: Race("flex"))
    train = dataclasses.replace(run.train, compile="off")
    data = PhaseData("chat", "chat", "") if kind == "sft" else None
    phase = dataclasses.replace(run.phases[0], kind=kind, data=data, micro_batch=4)
    picked, changed = pick_choices(train, phase, run.model, torch.device("cuda"), 8, before)
    picked, _ = pick_attention(train, phase, run.model, torch.device("cuda"), picked)
    return [picked.attention, picked.segments, *changed]


def test_a_card_keeps_its_attention_and_another_finds_out_anew(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"device": "cuda (NVIDIA H200)", "attention": "cudnn", "segments": "mask"}
    assert on_card(tiny_run, monkeypatch, "cuda (NVIDIA H200)", "sft", before) == ["cudnn", "mask"]
    told = on_card(tiny_run, monkeypatch, "cuda (NVIDIA L4)", "sft", before)
    assert told == ["flash", "flex", "device cuda (NVIDIA H200) -> cuda (NVIDIA L4)"]


@pytest.mark.parametrize(("kind", "segments"), [("pretrain", "mask"), ("rl", "mask"), ("sft", "flex")])
def test_only_rows_of_several_conversations_ask_how_to_attend_inside_them(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch, kind: str, segments: str
) -> None:
    """A row of rl is one answer: what a race compiles would be for nothing."""
    assert on_card(tiny_run, monkeypatch, "cuda (NVIDIA H200)", kind, {}) == ["flash", segments]


@pytest.mark.regression("masked-gqa")
def test_attention_inside_conversations_is_raced_with_the_attention_that_was_chosen(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_on, seen = torch.backends.cuda, []
    before = is_on.cudnn_sdp_enabled()

    def race(*_: object) -> Race:
        seen.append((is_on.flash_sdp_enabled(), is_on.cudnn_sdp_enabled()))
        return Race("flex")

    phase = dataclasses.replace(tiny_run.phases[0], kind="sft", data=PhaseData("chat", "chat", ""), micro_batch=4)
    monkeypatch.setattr(choices, "describe_device", lambda _: "cuda (NVIDIA H200)")
    monkeypatch.setattr(choices, "pick_precision", lambda *_: "bf16")
    monkeypatch.setattr(choices, "race_attention", lambda *_: Race("flash"))
    monkeypatch.setattr(choices, "race_segments", race)
    train = dataclasses.replace(tiny_run.train, compile="off")
    picked, _ = pick_choices(train, phase, tiny_run.model, torch.device("cuda"), 8, {})
    picked, _ = pick_attention(train, phase, tiny_run.model, torch.device("cuda"), picked)
    assert (picked.attention, picked.segments) == ("flash", "flex")
    assert seen == [(True, False)]
    assert is_on.cudnn_sdp_enabled() == before  # the engine decides, after all ranks agreed


def test_a_card_that_is_nearly_full_after_the_first_step_is_warned_of_with_what_to_change() -> None:
    assert memory_warning(20 * 2**30, 24 * 2**30) == ""
    text = memory_warning(int(23.5 * 2**30), 24 * 2**30)
    assert "23.5 of 24.0 GiB" in text
    assert "micro_batch" in text
