"""A device is what was asked for, or an error that says why not; only `auto` chooses."""

from __future__ import annotations

import pytest
import torch

from homing.errors import UsageError
from homing.lm.device import describe_device, is_compile_worthwhile, peak_flops, pick_device, pick_precision

CPU = torch.device("cpu")


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    return torch.device("cuda")


@pytest.mark.acceptance(2)
@pytest.mark.usefixtures("bare_machine")
def test_auto_takes_the_cpu_where_there_is_nothing_else() -> None:
    assert pick_device("auto") == CPU
    assert pick_device("cpu") == CPU


@pytest.mark.acceptance(2)
@pytest.mark.usefixtures("bare_machine")
def test_auto_takes_the_gpu_of_a_mac_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("mps")
    assert describe_device(torch.device("mps")) == "mps (Apple GPU)"


@pytest.mark.acceptance(2)
@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", "mps"])
def test_a_device_that_was_asked_for_and_is_absent_is_an_error_never_the_cpu(wanted: str) -> None:
    with pytest.raises(UsageError, match="is not available") as caught:
        pick_device(wanted)
    assert caught.value.why
    assert "auto" in caught.value.fix


def test_an_unknown_device_is_refused() -> None:
    for wanted in ("tpu", "auto:1", "cpu:x", ""):
        with pytest.raises(UsageError, match=f"Unknown device: '{wanted}'"):
            pick_device(wanted)


def test_auto_takes_the_gpu_and_bf16_where_it_has_it(hopper: torch.device) -> None:
    assert pick_device("auto") == hopper
    assert pick_precision("auto", hopper) == "bf16"
    assert pick_precision("fp32", hopper) == "fp32"
    assert is_compile_worthwhile(hopper)
    assert peak_flops(hopper) == 989e12
    assert describe_device(hopper) == "cuda (NVIDIA H100 80GB HBM3)"


@pytest.mark.acceptance(8, 97)
def test_a_card_without_bf16_computes_in_fp32_and_refuses_bf16(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    assert pick_precision("auto", hopper) == "fp32"
    with pytest.raises(UsageError, match="does not support bf16"):
        pick_precision("bf16", hopper)


def test_an_unknown_card_has_no_peak_rather_than_a_made_up_one(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Graphics Device")
    assert peak_flops(hopper) is None


def test_the_cpu_is_fp32_uncompiled_and_has_no_mfu() -> None:
    assert pick_precision("auto", CPU) == "fp32"
    assert pick_precision("bf16", CPU) == "bf16"
    assert not is_compile_worthwhile(CPU)
    assert peak_flops(CPU) is None
    with pytest.raises(UsageError, match="Unknown precision: 'fp4'"):
        pick_precision("fp4", CPU)
    with pytest.raises(UsageError, match="does not support fp8"):
        pick_precision("fp8", CPU)


def test_fp8_without_triton_is_refused_with_what_to_install(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="fp8 needs Triton"):
        pick_precision("fp8", hopper)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_seed_gives_one_model_on_cpu_and_gpu() -> None:
    from homing.lm.model import Decoder
    from homing.wire.run_json import Model

    shape = Model("stock", "qwen3", 2, 64, 4, 2, 32, 128, 64, 1000, False)
    ids = torch.randint(1000, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for device in ("cpu", "cuda"):
        model = Decoder(shape).to(device)
        model.init_weights(0)
        losses.append(model.loss(ids.to(device), ids.roll(-1, 1).to(device)).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
