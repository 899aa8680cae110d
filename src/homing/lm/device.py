"""Selects the device and the precision, looks up the peak speed of the device, and measures free host memory.

    pick_device("auto")  ->  cuda, else mps, else cpu; an error if a specific device was requested but is not available
    pick_precision       ->  bf16 if the GPU supports it, else fp32; master weights are fp32 in either case
    peak_flops           ->  the dense bf16 peak of the GPU, or None if unknown (then there is no MFU)

    free_host_bytes      ->  host memory left for copies of GPU state and for offloaded optimizer state

Only `auto` chooses a device or precision; there is no silent fallback. Inside a container, the cgroup's memory limit
applies, because the figures for the whole machine are too high.
"""

from __future__ import annotations

import gc
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from homing.errors import UsageError
from homing.gpus import find_gpu

__all__ = [
    "DEVICES",
    "describe_device",
    "free_host_bytes",
    "free_memory",
    "has_fp8",
    "is_compile_worthwhile",
    "on_gpu",
    "peak_flops",
    "pick_device",
    "pick_precision",
    "use_device",
]

DEVICES = ("auto", "cpu", "cuda", "mps")
_MEMINFO = Path("/proc/meminfo")
# files with the memory limit and the memory usage of a container, for cgroups v2 and v1
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def pick_device(wanted: str = "auto") -> torch.device:
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        return torch.device("cuda" if has_cuda else "mps" if has_mps else "cpu")
    kind = wanted.split(":")[0]
    device = _named(wanted)
    if kind not in DEVICES or device is None:
        raise UsageError(
            what=f"Unknown device: {wanted!r}",
            why=f"Known devices: {', '.join(DEVICES)}.",
            fix="Use --device auto, or set train.device: auto in the run file.",
        )
    if kind == "cuda" and not has_cuda:
        raise UsageError(
            what="The device cuda was requested but is not available.", why=_why_no_cuda(), fix=_NO_GPU_FIX
        )
    if kind == "mps" and not has_mps:
        why = "This is not a Mac with Apple silicon, or its torch was built without MPS."
        raise UsageError(what="The device mps was requested but is not available.", why=why, fix=_NO_GPU_FIX)
    if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = f"This machine has {torch.cuda.device_count()} GPUs, numbered from 0."
        raise UsageError(what=f"The device {wanted} was requested but is not available.", why=why, fix=_NO_GPU_FIX)
    return device


def use_device(device: torch.device) -> None:
    """Make `device` the current GPU: kernels, streams and graphs run on the current GPU, wherever the tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current GPU inside a context, for code that may run in any thread.

    Each thread has its own current GPU, which is the first one unless it is changed, so `use_device` is not enough.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def free_memory() -> None:
    """Free unused GPU memory.

    Reference cycles that hold tensors are collected first, because the garbage collector is disabled during training.
    """
    gc.collect()
    torch.cuda.empty_cache()


def _named(wanted: str) -> torch.device | None:
    try:
        return torch.device(wanted)  # also rejects a device index that is not a number
    except RuntimeError:
        return None


_NO_GPU_FIX = "Use --device auto (or train.device: auto) to use what this machine has."


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA."
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no working GPU and driver."


def pick_precision(wanted: str, device: torch.device) -> str:
    """Resolve `auto | fp32 | bf16 | fp8` to the precision of matmuls; raise UsageError if it is unsupported."""
    if wanted not in ("auto", "fp32", "bf16", "fp8"):
        raise UsageError(
            what=f"Unknown precision: {wanted!r}",
            why="homing supports fp32, bf16 and fp8.",
            fix="Set train.precision to auto, fp32, bf16 or fp8.",
        )
    if wanted == "fp8" and not has_fp8(device):
        raise UsageError(
            what=f"{describe_device(device)} does not support fp8.",
            why="fp8 needs an Ada or Hopper GPU or newer (compute capability 8.9 or higher).",
            fix="Set train.precision: auto, or use such a GPU.",
        )
    if wanted == "fp8" and importlib.util.find_spec("triton") is None:
        raise UsageError(
            what="fp8 needs Triton, which is not installed.",
            why="homing rounds to 8 bits in a Triton kernel.",
            fix="Install triton, or set train.precision: auto.",
        )
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted == "bf16" and not has_bf16:
        raise UsageError(
            what=f"{describe_device(device)} does not support bf16.",
            why="bf16 needs an Ampere GPU or newer (compute capability 8.0 or higher).",
            fix="Set train.precision: fp32, or rent a newer GPU.",
        )
    if wanted == "auto":
        # bf16 works on CPU and MPS, but was never faster at the model sizes trained there.
        return "bf16" if device.type == "cuda" and has_bf16 else "fp32"
    return wanted


def has_fp8(device: torch.device) -> bool:
    """Return whether the GPU supports FP8, as Ada, Hopper and newer GPUs do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak dense bf16 FLOP/s of one GPU, or None for CPU, MPS and unknown GPUs (no MFU is computed)."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return gpu.bf16_tflops * 1e12 if gpu else None


def is_compile_worthwhile(device: torch.device) -> bool:
    """Return whether to compile.

    On a CPU a compiled step was no faster than an eager one and took half a minute to build.
    """
    return device.type == "cuda"


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return "mps (Apple GPU)" if device.type == "mps" else "cpu"


def free_host_bytes() -> int | None:
    """Return how many bytes of host memory are free, or None if that cannot be determined."""
    found = [_of_machine(), *(_of_container(limit, used) for limit, used in _CGROUPS)]
    return min((free for free in found if free is not None), default=None)


def _of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _of_container(limit: Path, used: Path) -> int | None:
    """Return the memory left under the cgroup limit.

    The cgroup's usage includes the file page cache, which the kernel can reclaim; memory.stat contains its size.
    """
    try:
        most = int(limit.read_text(encoding="ascii"))  # `max` (no limit) raises ValueError
        given_up = [line.split()[1] for line in (used.parent / "memory.stat").read_text(encoding="ascii").splitlines()
                    if line.split()[0] in ("inactive_file", "total_inactive_file")]  # fmt: skip
        return most - int(used.read_text(encoding="ascii")) + max((int(number) for number in given_up), default=0)
    except (OSError, ValueError, IndexError):
        return None
