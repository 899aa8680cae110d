"""What is picked for a device, and what is refused there."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from homing.errors import UsageError
from homing.lm.model import attention_backends
from homing.lm.model.attention_backends import Race
from homing.lm.train.compute import hardware_choices
from homing.lm.train.compute.hardware_choices import memory_warning, pick_attention, pick_choices, set_up_device
from homing.lm.train.distributed.ranks import Ranks
from homing.wire.run_json import PhaseData, Run

CPU = torch.device("cpu")


@pytest.mark.acceptance(8, 97)
def test_an_attention_for_cards_is_refused_on_a_processor(tiny_run: Run) -> None:
    train = dataclasses.replace(tiny_run.train, attention="flash")
    picked, _ = pick_choices(train, tiny_run.phases[0], tiny_run.model, CPU, 8, {})
    with pytest.raises(UsageError, match=r"train.attention: flash needs a CUDA GPU"):
        pick_attention(train, tiny_run.phases[0], tiny_run.model, CPU, picked)


@pytest.mark.acceptance(8, 97)
def test_a_named_attention_that_does_not_work_on_the_card_is_refused_with_one_that_does(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Race("efficient", {"efficient": 0.001}, {"flash": "No available kernel."})
    monkeypatch.setattr(hardware_choices, "describe_device", lambda _: "cuda (Tesla T4)")
    monkeypatch.setattr(hardware_choices, "pick_precision", lambda *_: "fp32")
    monkeypatch.setattr(hardware_choices, "race_attention", lambda *_: found)
    train = dataclasses.replace(tiny_run.train, compile="off", attention="flash")
    phase = dataclasses.replace(tiny_run.phases[0], micro_batch=4)
    picked, _ = pick_choices(train, phase, tiny_run.model, torch.device("cuda"), 8, {})
    with pytest.raises(UsageError, match=r"flash does not work on cuda \(Tesla T4\)") as caught:
        pick_attention(train, phase, tiny_run.model, torch.device("cuda"), picked)
    assert "flash excluded: No available kernel." in caught.value.why
    assert "which uses efficient here" in caught.value.fix


def test_a_cpu_has_one_attention_kernel_and_reports_nothing(tiny_run: Run) -> None:
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
    monkeypatch.setattr(hardware_choices, "describe_device", lambda _: card)
    monkeypatch.setattr(hardware_choices, "pick_precision", lambda *_: "bf16")
    monkeypatch.setattr(hardware_choices, "race_attention", lambda *_: Race("flash"))
    monkeypatch.setattr(hardware_choices, "race_segments", lambda *_: Race("flex"))
    train = dataclasses.replace(run.train, compile="off")
    data = PhaseData("chat", "chat", "") if kind == "sft" else None
    phase = dataclasses.replace(run.phases[0], kind=kind, data=data, micro_batch=4)
    picked, changed = pick_choices(train, phase, run.model, torch.device("cuda"), 8, before)
    picked, _ = pick_attention(train, phase, run.model, torch.device("cuda"), picked)
    return [picked.attention, picked.segments, *changed]


def test_a_card_keeps_its_attention_and_another_finds_out_anew(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"device": "cuda (NVIDIA H200)", "attention": "cudnn", "segments": "mask"}
    assert on_card(tiny_run, monkeypatch, "cuda (NVIDIA H200)", "sft", before) == ["cudnn", "mask"]
    messages = on_card(tiny_run, monkeypatch, "cuda (NVIDIA L4)", "sft", before)
    assert messages == ["flash", "flex", "device cuda (NVIDIA H200) -> cuda (NVIDIA L4)"]


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
    monkeypatch.setattr(hardware_choices, "describe_device", lambda _: "cuda (NVIDIA H200)")
    monkeypatch.setattr(hardware_choices, "pick_precision", lambda *_: "bf16")
    monkeypatch.setattr(hardware_choices, "race_attention", lambda *_: Race("flash"))
    monkeypatch.setattr(hardware_choices, "race_segments", race)
    train = dataclasses.replace(tiny_run.train, compile="off")
    picked, _ = pick_choices(train, phase, tiny_run.model, torch.device("cuda"), 8, {})
    picked, _ = pick_attention(train, phase, tiny_run.model, torch.device("cuda"), picked)
    assert (picked.attention, picked.segments) == ("flash", "flex")
    assert seen == [(True, False)]
    assert is_on.cudnn_sdp_enabled() == before  # the engine decides, after all ranks agreed


@pytest.mark.acceptance(118)
def test_a_card_that_is_nearly_full_after_the_first_step_is_warned_of_with_what_to_change() -> None:
    assert memory_warning(20 * 2**30, 24 * 2**30) == ""
    text = memory_warning(int(23.5 * 2**30), 24 * 2**30)
    assert "23.5 of 24.0 GiB" in text
    assert "micro_batch" in text


# -- deterministic -----------------------------------------------------------------------------------------------------


@pytest.mark.regression("deterministic-starts")
def test_a_deterministic_run_picks_its_attention_by_no_stop_watch(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts on one card, on which once the one and once the other kernel has a slow moment."""
    size = dataclasses.replace(tiny_run.model, context=64)
    plain_heads = attention_backends._heads
    monkeypatch.setattr(attention_backends, "_heads", lambda shape, _, dtype: plain_heads(shape, CPU, torch.float32))
    monkeypatch.setattr(attention_backends, "sdpa_kernel", lambda _: contextlib.nullcontext())  # all of them work
    monkeypatch.setattr(hardware_choices, "describe_device", lambda _: "cuda (NVIDIA H200)")
    monkeypatch.setattr(hardware_choices, "pick_precision", lambda *_: "fp32")
    train = dataclasses.replace(tiny_run.train, compile="off", is_deterministic=True)
    phase = dataclasses.replace(tiny_run.phases[0], kind="pretrain", data=None, micro_batch=4)
    found = []
    for seconds in ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]):
        laps = iter(seconds)
        monkeypatch.setattr(attention_backends, "_time", lambda *_, laps=laps: next(laps))
        picked, _ = pick_choices(train, phase, size, torch.device("cuda"), 8, {})
        found.append(pick_attention(train, phase, size, torch.device("cuda"), picked)[0].attention)
    assert found[0] == found[1]
    assert found[0] == "flash"


@pytest.mark.regression("deterministic-starts")
def test_a_deterministic_run_picks_its_micro_batch_by_the_size_of_the_card(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_choices, "describe_device", lambda _: "cuda (NVIDIA H200)")
    monkeypatch.setattr(hardware_choices, "pick_precision", lambda *_: "bf16")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    phase = dataclasses.replace(tiny_run.phases[0], micro_batch=0)
    shape = dataclasses.replace(tiny_run.model, context=1024, width=1024, num_layers=24, ffn_width=4096)
    found: dict[bool, list[int]] = {True: [], False: []}
    for is_deterministic in found:
        train = dataclasses.replace(tiny_run.train, compile="off", is_deterministic=is_deterministic)
        for free in (70 * 2**30, 12 * 2**30):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80 * 2**30))
            picked, _ = pick_choices(train, phase, shape, torch.device("cuda"), 512, {})
            found[is_deterministic].append(picked.micro_batch)
    assert found[False][0] > found[False][1]
    assert found[True][0] == found[True][1] > 1


# -- GPUs and ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.regression("gpu-probe")
@pytest.mark.parametrize("rank", [0, 3])
def test_more_ranks_than_gpus_are_refused_by_their_number(
    tiny_run: Run, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_device(device: torch.device) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    train = dataclasses.replace(tiny_run.train, device="cuda")
    with pytest.raises(UsageError, match="needs 4 ranks here, but this machine has 2 GPUs"):
        set_up_device(train, Ranks(rank, 4, rank, 4))
