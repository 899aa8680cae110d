"""Benchmarks a rented machine's GPUs: matmul, attention, copy and disk. Usage: python -m homing.lm.benchmark_gpu FOLDER

Prints one line of JSON. The instance's bootstrap runs it in the trainer's environment, with a deadline, and rejects a
machine whose figures are far below what its GPU model should reach. The real training speed is
known only from the first training steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from homing.errors import RunFailed

__all__ = ["measure"]

_SECONDS = 1.0  # time per measurement, divided among the GPUs, after one warm-up call on each
_DISK_BYTES = 64 << 20


def measure(folder: str, *, size: int = 8192, seconds: float = _SECONDS) -> dict[str, float | str]:
    """Benchmark every GPU and return the worst value of each figure: training waits for the slowest GPU.

    `size` is the number of rows and columns of each matrix; a GPU reaches its full speed only with large matrices.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", number) for number in range(num_gpus)] or [torch.device("cpu")]
    found = []
    for device in devices:
        try:
            found.append(_measure_device(device, size, seconds / len(devices)))
        except RuntimeError as exc:
            if num_gpus == 0:
                raise
            problem = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
            raise RunFailed(
                what=f"GPU {device.index} of {num_gpus} does not work.",
                why=problem,
                fix="Destroy this instance and launch another.",
            ) from exc
    kinds = sorted({torch.cuda.get_device_name(device) for device in devices}) if num_gpus else ["cpu"]
    return {
        "device": ", ".join(kinds),
        "num_gpus": num_gpus,
        "torch": torch.__version__,
        "matmul_tflops": min(figures.matmul_tflops for figures in found),
        "copy_gb_s": min(figures.copy_gb_s for figures in found),
        "attention_ms": max(figures.attention_ms for figures in found),
        "disk_mb_s": round(_DISK_BYTES / _disk_s(folder) / 1e6, 1),
    }


@dataclass(frozen=True)
class _Figures:
    matmul_tflops: float
    copy_gb_s: float  # read and written
    attention_ms: float


def _measure_device(device: torch.device, size: int, seconds: float) -> _Figures:
    is_cuda = device.type == "cuda"
    has_bf16 = is_cuda and torch.cuda.get_device_capability(device)[0] >= 8
    dtype = (torch.bfloat16 if has_bf16 else torch.float16) if is_cuda else torch.float32
    size = size if is_cuda else min(size, 512)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    matmul_s = _time(lambda: a @ b, seconds, device)
    copy_s = _time(lambda: b.copy_(a), seconds, device)
    q = torch.randn(4, 16, min(size, 2048), 64, device=device, dtype=dtype)
    attention_s = _time(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), seconds, device)
    return _Figures(
        matmul_tflops=round(2 * size**3 / matmul_s / 1e12, 3),
        copy_gb_s=round(2 * a.numel() * a.element_size() / copy_s / 1e9, 2),
        attention_ms=round(attention_s * 1e3, 3),
    )


def _time(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Return the mean duration of a call in seconds."""
    call()
    _wait(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not count:
        call()
        count += 1
        if count % 10 == 0:
            _wait(device)  # wait for the GPU, because CUDA calls are asynchronous
    _wait(device)
    return (time.perf_counter() - began) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _disk_s(folder: str) -> float:
    path, data = os.path.join(folder, ".probe"), os.urandom(1 << 20)
    began = time.perf_counter()
    try:
        with open(path, "wb") as file:
            for _ in range(_DISK_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - began
    finally:
        os.unlink(path)


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(measure(sys.argv[1])) + "\n")
    except RunFailed as error:
        sys.exit(str(error))
