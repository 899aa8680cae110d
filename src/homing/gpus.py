"""One table of GPU facts: what plan, verify, offers and the MFU in the log read.

`bf16_tflops` is the dense tensor-core peak from the vendor's data sheet; cards before Ampere have no bf16, and
their fp16 peak stands there with `has_bf16` false. `fp32_tflops` is the peak of plain fp32, which those cards train in.
Memory is what the vendor prints, in GiB.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

__all__ = ["GPUS", "Gpu", "find_gpu", "nearest_gpus"]


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: int
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gb_s: int
    compute_capability: tuple[int, int]
    aliases: tuple[str, ...] = ()

    @property
    def has_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        return self.compute_capability >= (8, 9)

    def is_at_least(self, other: Gpu) -> bool:
        """Whether it is as good as the other in every figure of the data sheet, so that nothing runs slower on it."""
        return (
            self.memory_gib >= other.memory_gib
            and self.bf16_tflops >= other.bf16_tflops
            and self.fp32_tflops >= other.fp32_tflops
            and self.bandwidth_gb_s >= other.bandwidth_gb_s
            and self.compute_capability >= other.compute_capability
        )

    def peak_flops(self, precision: str = "auto") -> float:
        """FLOP/s at most in what a run computes in there; `auto` is bf16 where the card has it."""
        if precision == "fp32" or not self.has_bf16:
            return self.fp32_tflops * 1e12
        return self.bf16_tflops * 1e12 * (2 if precision == "fp8" and self.has_fp8 else 1)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 16, 65.0, 8.1, 320, (7, 5), ("tesla t4",)),
        Gpu("V100", 16, 125.0, 15.7, 900, (7, 0), ("tesla v100",)),
        Gpu("V100-32GB", 32, 125.0, 15.7, 900, (7, 0), ("v100-sxm2-32gb",)),
        Gpu("RTX3090", 24, 71.0, 35.6, 936, (8, 6), ("rtx 3090", "geforce rtx 3090")),
        Gpu("RTX4090", 24, 165.2, 82.6, 1008, (8, 9), ("rtx 4090", "geforce rtx 4090")),
        Gpu("RTX5090", 32, 209.5, 104.8, 1792, (12, 0), ("rtx 5090", "geforce rtx 5090")),
        Gpu("A10", 24, 125.0, 31.2, 600, (8, 6), ("nvidia a10",)),
        Gpu("A10G", 24, 70.0, 31.5, 600, (8, 6), ("nvidia a10g",)),
        Gpu("L4", 24, 121.0, 30.3, 300, (8, 9), ("nvidia l4",)),
        Gpu("A40", 48, 149.7, 37.4, 696, (8, 6), ("nvidia a40",)),
        Gpu("RTXA4000", 16, 76.7, 19.2, 448, (8, 6), ("rtx a4000",)),
        Gpu("RTXA5000", 24, 111.1, 27.8, 768, (8, 6), ("rtx a5000",)),
        Gpu("RTXA6000", 48, 154.8, 38.7, 768, (8, 6), ("rtx a6000",)),
        Gpu("L40", 48, 181.0, 90.5, 864, (8, 9), ("nvidia l40",)),
        Gpu("L40S", 48, 362.0, 91.6, 864, (8, 9), ("nvidia l40s",)),
        Gpu("RTX6000Ada", 48, 364.0, 91.1, 960, (8, 9), ("rtx 6000 ada",)),
        Gpu("A100", 80, 312.0, 19.5, 2039, (8, 0), ("a100-80gb", "a100-sxm4-80gb", "a100 80gb pcie")),
        Gpu("A100-40GB", 40, 312.0, 19.5, 1555, (8, 0), ("a100-sxm4-40gb", "a100-pcie-40gb")),
        Gpu("H100", 80, 989.0, 66.9, 3350, (9, 0), ("h100 80gb hbm3", "h100-sxm5-80gb")),
        Gpu("H100-PCIe", 80, 756.0, 51.2, 2000, (9, 0), ("h100 pcie",)),
        Gpu("H100-NVL", 94, 835.0, 60.0, 3938, (9, 0), ("h100 nvl",)),
        Gpu("H200", 141, 989.0, 66.9, 4800, (9, 0), ("nvidia h200", "h200 sxm")),
        Gpu("GH200", 96, 989.0, 66.9, 4000, (9, 0), ("gh200 480gb",)),
        Gpu("B200", 180, 2250.0, 75.0, 8000, (10, 0), ("nvidia b200",)),
        Gpu("B300", 270, 2250.0, 75.0, 8000, (10, 3), ("nvidia b300",)),
    )
}


def find_gpu(name: str) -> Gpu | None:
    """By our name, an alias, or what the driver calls it ("NVIDIA H100 80GB HBM3")."""
    wanted = _plain(name)
    known = {_plain(alias): gpu for gpu in GPUS.values() for alias in (gpu.name, *gpu.aliases)}
    if wanted in known:
        return known[wanted]
    # Driver names carry the maker and the memory around the name we know; the longest match is the card. A digit right
    # behind it is another card's number: a T400 is no T4, an RTX A1000 no A100.
    inside = [key for key in known if re.search("[^a-z0-9]*".join(key) + r"(?!\d)", name.lower())]
    return known[max(inside, key=len)] if inside else None


def nearest_gpus(name: str) -> list[str]:
    by_plain = {_plain(gpu): gpu for gpu in GPUS}
    return [by_plain[match] for match in difflib.get_close_matches(_plain(name), by_plain, n=3, cutoff=0.4)]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("nvidia")
