"""Is this card what it should be? Matrix product, attention, copy and disk: python -m homing.lm.probe FOLDER

One line of JSON on stdout. The machine's bootstrap runs it in the trainer's environment, with a deadline, and sends a
machine back whose figures are far below its card's; the real speed is judged on the first steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["measure"]

_SECONDS = 1.0  # for each figure, after one call to warm up
_DISK_BYTES = 64 << 20


def measure(folder: str, *, size: int = 8192, seconds: float = _SECONDS) -> dict[str, float | str]:
    """`size` is the side of the matrices; a card needs large ones to show what it can do."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    has_bf16 = is_cuda and torch.cuda.get_device_capability()[0] >= 8
    dtype = (torch.bfloat16 if has_bf16 else torch.float16) if is_cuda else torch.float32
    size = size if is_cuda else min(size, 512)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    matmul_s = _time(lambda: a @ b, seconds, is_cuda)
    copy_s = _time(lambda: b.copy_(a), seconds, is_cuda)
    q = torch.randn(4, 16, min(size, 2048), 64, device=device, dtype=dtype)
    attention_s = _time(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), seconds, is_cuda)
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "matmul_tflops": round(2 * size**3 / matmul_s / 1e12, 3),
        "copy_gb_s": round(2 * a.numel() * a.element_size() / copy_s / 1e9, 2),  # read and written
        "attention_ms": round(attention_s * 1e3, 3),
        "disk_mb_s": round(_DISK_BYTES / _disk_s(folder) / 1e6, 1),
    }


def _time(call: Callable[[], object], seconds: float, is_cuda: bool) -> float:
    """Seconds of one call, as the mean over some time."""
    call()
    _wait(is_cuda)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        count += 1
        if count % 10 == 0:
            _wait(is_cuda)  # calls are queued: without waiting the clock would stop before the card does
    _wait(is_cuda)
    return (time.perf_counter() - began) / count


def _wait(is_cuda: bool) -> None:
    if is_cuda:
        torch.cuda.synchronize()


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
    sys.stdout.write(json.dumps(measure(sys.argv[1])) + "\n")
