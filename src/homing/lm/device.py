"""Which device computes, in which precision, and how fast it could be.

    pick_device("auto")  ->  cuda, else mps, else cpu; a device that was asked for by name and is absent is an error
    pick_precision       ->  bf16 where the card has it, fp32 elsewhere; the master weights are fp32 in both
    peak_flops           ->  the dense bf16 peak of the card, or None where MFU would be a made-up number

Nothing here falls back in silence: only `auto` chooses.
"""

from __future__ import annotations

import gc
import importlib.util

import torch

from homing.errors import UsageError
from homing.gpus import find_gpu

__all__ = [
    "DEVICES",
    "describe_device",
    "free_memory",
    "has_fp8",
    "is_compile_worthwhile",
    "peak_flops",
    "pick_device",
    "pick_precision",
    "use_device",
]

DEVICES = ("auto", "cpu", "cuda", "mps")


def pick_device(wanted: str = "auto") -> torch.device:
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        return torch.device("cuda" if has_cuda else "mps" if has_mps else "cpu")
    kind = wanted.split(":")[0]
    device = _named(wanted)
    if kind not in DEVICES or device is None:
        raise UsageError(
            what=f"There is no device called {wanted!r}.",
            why=f"homing knows {', '.join(DEVICES)}.",
            fix="Use --device auto, or set train.device: auto in the run file.",
        )
    if kind == "cuda" and not has_cuda:
        raise UsageError(what="The device cuda was asked for and is not here.", why=_why_no_cuda(), fix=_NO_GPU_FIX)
    if kind == "mps" and not has_mps:
        why = "This is not a Mac with Apple silicon, or its torch was built without MPS."
        raise UsageError(what="The device mps was asked for and is not here.", why=why, fix=_NO_GPU_FIX)
    if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = f"This machine has {torch.cuda.device_count()}, counted from 0."
        raise UsageError(what=f"The device {wanted} was asked for and is not here.", why=why, fix=_NO_GPU_FIX)
    return device


def use_device(device: torch.device) -> None:
    """Makes it the current GPU of this process: kernels, streams and graphs go to the current one, wherever the tensors
    are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def free_memory() -> None:
    """Gives unused GPU memory back. Cycles of Python objects that hold tensors go first: while training, the garbage
    collector is off."""
    gc.collect()
    torch.cuda.empty_cache()


def _named(wanted: str) -> torch.device | None:
    try:
        return torch.device(wanted)  # also refuses what is no number after the colon
    except RuntimeError:
        return None


_NO_GPU_FIX = "Use --device auto (or train.device: auto) to compute on what this machine has."


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA."
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no working GPU and driver."


def pick_precision(wanted: str, device: torch.device) -> str:
    """`auto | fp32 | bf16 | fp8` -> what the matrix products are computed in."""
    if wanted not in ("auto", "fp32", "bf16", "fp8"):
        raise UsageError(
            what=f"There is no precision called {wanted!r}.",
            why="homing computes in fp32, bf16 or fp8.",
            fix="Set train.precision to auto, fp32, bf16 or fp8.",
        )
    if wanted == "fp8" and not has_fp8(device):
        raise UsageError(
            what=f"{describe_device(device)} cannot compute in fp8.",
            why="fp8 came with the Ada and Hopper cards (compute capability 8.9).",
            fix="Set train.precision: auto, or rent such a card.",
        )
    if wanted == "fp8" and importlib.util.find_spec("triton") is None:
        raise UsageError(
            what="fp8 needs Triton, which is not installed here.",
            why="A Triton kernel rounds to 8 bits.",
            fix="Install triton, or set train.precision: auto.",
        )
    has_bf16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted == "bf16" and not has_bf16:
        raise UsageError(
            what=f"{describe_device(device)} cannot compute in bf16.",
            why="bf16 came with the Ampere cards (compute capability 8.0).",
            fix="Set train.precision: fp32, or rent a newer card.",
        )
    if wanted == "auto":
        # On CPU and MPS bf16 works, but was never seen to be faster at the sizes one trains there.
        return "bf16" if device.type == "cuda" and has_bf16 else "fp32"
    return wanted


def has_fp8(device: torch.device) -> bool:
    """Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of one card. None for CPU, MPS and unknown cards: then there is no MFU."""
    if device.type != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return gpu.bf16_tflops * 1e12 if gpu else None


def is_compile_worthwhile(device: torch.device) -> bool:
    """On the CPU a compiled step was no faster than an eager one and cost half a minute to build."""
    return device.type == "cuda"


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device.type} ({torch.cuda.get_device_name(device)})"
    return "mps (Apple GPU)" if device.type == "mps" else "cpu"
