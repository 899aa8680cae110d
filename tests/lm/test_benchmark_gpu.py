"""The probe of a machine, in the trainer's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from homing.errors import RunFailed
from homing.lm import benchmark_gpu


def test_every_figure_is_a_number_above_nothing_and_the_disk_is_left_clean(tmp_path: Path) -> None:
    found = benchmark_gpu.measure(str(tmp_path), size=64, seconds=0.01)
    for name in ("matmul_tflops", "copy_gb_s", "attention_ms", "disk_mb_s"):
        value = found[name]
        assert isinstance(value, float)
        assert value >= 0
    assert found["device"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_as_a_program_its_last_line_is_the_figures(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "homing.lm.benchmark_gpu", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["disk_mb_s"] > 0


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulates two GPUs with tensors on the CPU; returns the devices that were requested."""
    asked: list[str] = []
    plain = torch.randn

    def randn(*sides: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        asked.append(str(device))
        return plain(*(min(side, 32) for side in sides))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch, "randn", randn)
    return asked


@pytest.mark.regression("gpu-probe")
def test_every_gpu_is_probed(two_gpus: list[str], tmp_path: Path) -> None:
    found = benchmark_gpu.measure(str(tmp_path), seconds=0.01)
    assert set(two_gpus) == {"cuda:0", "cuda:1"}
    assert found["device"] == "NVIDIA H200"


@pytest.mark.usefixtures("two_gpus")
def test_the_slowest_gpu_counts_and_a_broken_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [benchmark_gpu._Figures(700.0, 4000.0, 1.0), benchmark_gpu._Figures(90.0, 3000.0, 9.0)]
    monkeypatch.setattr(benchmark_gpu, "_measure_device", lambda device, *_: figures[device.index])
    found = benchmark_gpu.measure(str(tmp_path), seconds=0.01)
    assert (found["matmul_tflops"], found["copy_gb_s"], found["attention_ms"]) == (90.0, 3000.0, 9.0)
    assert found["num_gpus"] == 2

    def broken(device: torch.device, *_: object) -> benchmark_gpu._Figures:
        if device.index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
        return figures[0]

    monkeypatch.setattr(benchmark_gpu, "_measure_device", broken)
    with pytest.raises(RunFailed, match="GPU 1 of 2 does not work") as caught:
        benchmark_gpu.measure(str(tmp_path))
    assert caught.value.why == "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_machine_is_probed_on_all_its_gpus(tmp_path: Path) -> None:
    found = benchmark_gpu.measure(str(tmp_path))
    print(found)
    assert found["num_gpus"] == torch.cuda.device_count()
    assert float(found["matmul_tflops"]) > 10
