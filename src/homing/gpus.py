"""Table of GPU data: memory, peak FLOP/s, bandwidth and names, used by plan, verify, offers and the logged MFU.

`bf16_tflops` is the dense tensor-core peak from the vendor's data sheet. GPUs before Ampere have no bf16: for them it
holds the fp16 peak, and `has_bf16` is false. `fp32_tflops` is the plain fp32 peak; those older GPUs train in fp32.
Memory is the vendor's nominal figure in GiB. Aliases are the names that provider catalogues and the driver use. The
name that the driver reports must contain one of them; otherwise the instance is rejected, because it is not what was
rented.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

__all__ = ["GPUS", "MIN_CAPABILITY", "Gpu", "find_gpu", "nearest_gpus"]

# The lowest compute capability for which the installed torch has kernels. CUDA 13 dropped everything before Turing, and
# the open kernel modules in the cloud images also start with Turing.
MIN_CAPABILITY = (7, 5)


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
        """Return True if this GPU matches or exceeds the other in every figure on the data sheet."""
        return (
            self.memory_gib >= other.memory_gib
            and self.bf16_tflops >= other.bf16_tflops
            and self.fp32_tflops >= other.fp32_tflops
            and self.bandwidth_gb_s >= other.bandwidth_gb_s
            and self.compute_capability >= other.compute_capability
        )

    def peak_flops(self, precision: str = "auto") -> float:
        """Return the peak FLOP/s at the precision that a run uses on this GPU; `auto` is bf16 if available."""
        if precision == "fp32" or not self.has_bf16:
            return self.fp32_tflops * 1e12
        return self.bf16_tflops * 1e12 * (2 if precision == "fp8" and self.has_fp8 else 1)


GPUS: dict[str, Gpu] = {
    # Volta and Turing
    "V100": Gpu("V100", 16, 125.0, 15.7, 900, (7, 0), ("tesla v100",)),
    "V100-32GB": Gpu("V100-32GB", 32, 125.0, 15.7, 900, (7, 0), ("v100-sxm2-32gb", "v100-pcie-32gb", "v100 32g")),
    "T4": Gpu("T4", 16, 65.0, 8.1, 320, (7, 5), ("tesla t4",)),
    "QuadroRTX4000": Gpu("QuadroRTX4000", 8, 57.0, 7.1, 416, (7, 5), ("rtx 4000",)),
    "QuadroRTX5000": Gpu("QuadroRTX5000", 16, 89.2, 11.2, 448, (7, 5), ("rtx 5000",)),
    "QuadroRTX6000": Gpu("QuadroRTX6000", 24, 130.5, 16.3, 672, (7, 5), ("rtx 6000",)),
    # Ampere
    "RTX3070": Gpu("RTX3070", 8, 40.6, 20.3, 448, (8, 6), ("geforce rtx 3070",)),
    "RTX3080": Gpu("RTX3080", 10, 59.5, 29.8, 760, (8, 6), ("geforce rtx 3080",)),
    "RTX3080Ti": Gpu("RTX3080Ti", 12, 68.2, 34.1, 912, (8, 6), ("geforce rtx 3080 ti",)),
    "RTX3090": Gpu("RTX3090", 24, 71.0, 35.6, 936, (8, 6), ("geforce rtx 3090",)),
    "RTX3090Ti": Gpu("RTX3090Ti", 24, 80.0, 40.0, 1008, (8, 6), ("geforce rtx 3090 ti",)),
    "RTXA4000": Gpu("RTXA4000", 16, 76.7, 19.2, 448, (8, 6), ("a4000",)),
    "RTXA4500": Gpu("RTXA4500", 20, 94.6, 23.7, 640, (8, 6), ("a4500",)),
    "RTXA5000": Gpu("RTXA5000", 24, 111.1, 27.8, 768, (8, 6), ("a5000",)),
    "RTXA6000": Gpu("RTXA6000", 48, 154.8, 38.7, 768, (8, 6), ("a6000",)),
    "A10": Gpu("A10", 24, 125.0, 31.2, 600, (8, 6)),
    "A10G": Gpu("A10G", 24, 70.0, 31.5, 600, (8, 6)),
    "A16": Gpu("A16", 16, 17.9, 4.5, 200, (8, 6)),  # one of the four GPUs on an A16 board
    "A30": Gpu("A30", 24, 165.0, 10.3, 933, (8, 0)),
    "A40": Gpu("A40", 48, 149.7, 37.4, 696, (8, 6)),
    "A100": Gpu("A100", 80, 312.0, 19.5, 2039, (8, 0), ("a100-80gb", "a100-sxm4-80gb", "a100 80gb pcie", "a100 80g")),
    "A100-40GB": Gpu("A100-40GB", 40, 312.0, 19.5, 1555, (8, 0), ("a100-sxm4-40gb", "a100-pcie-40gb", "a100 40g")),
    # Ada
    "RTX4070Ti": Gpu("RTX4070Ti", 12, 80.2, 40.1, 504, (8, 9), ("geforce rtx 4070 ti",)),
    "RTX4080": Gpu("RTX4080", 16, 97.5, 48.7, 717, (8, 9), ("geforce rtx 4080",)),
    "RTX4080Super": Gpu("RTX4080Super", 16, 104.4, 52.2, 736, (8, 9), ("geforce rtx 4080 super",)),
    "RTX4090": Gpu("RTX4090", 24, 165.2, 82.6, 1008, (8, 9), ("geforce rtx 4090",)),
    "RTX2000Ada": Gpu("RTX2000Ada", 16, 48.0, 12.0, 224, (8, 9), ("rtx 2000 ada generation",)),
    "RTX4000Ada": Gpu("RTX4000Ada", 20, 106.9, 26.7, 360, (8, 9), ("rtx 4000 ada generation",)),
    "RTX4000Ada-SFF": Gpu("RTX4000Ada-SFF", 20, 76.7, 19.2, 280, (8, 9), ("rtx 4000 sff ada",)),
    "RTX5000Ada": Gpu("RTX5000Ada", 32, 261.1, 65.3, 576, (8, 9), ("rtx 5000 ada generation",)),
    "RTX6000Ada": Gpu("RTX6000Ada", 48, 364.0, 91.1, 960, (8, 9), ("rtx 6000 ada generation", "6000ada")),
    "L4": Gpu("L4", 24, 121.0, 30.3, 300, (8, 9)),
    "L40": Gpu("L40", 48, 181.0, 90.5, 864, (8, 9)),
    "L40S": Gpu("L40S", 48, 362.0, 91.6, 864, (8, 9)),
    # Hopper
    "H100": Gpu("H100", 80, 989.0, 66.9, 3350, (9, 0), ("h100 80gb hbm3", "h100-sxm5-80gb", "h100 sxm")),
    "H100-PCIe": Gpu("H100-PCIe", 80, 756.0, 51.2, 2000, (9, 0), ("h100 pcie",)),
    "H100-NVL": Gpu("H100-NVL", 94, 835.0, 60.0, 3938, (9, 0), ("h100 nvl",)),
    "H200": Gpu("H200", 141, 989.0, 66.9, 4800, (9, 0), ("h200 sxm",)),
    "H200-NVL": Gpu("H200-NVL", 141, 835.0, 60.0, 4800, (9, 0), ("h200 nvl",)),
    "GH200": Gpu("GH200", 96, 989.0, 66.9, 4000, (9, 0), ("gh200 480gb",)),
    # Blackwell
    "RTX5080": Gpu("RTX5080", 16, 112.6, 56.3, 960, (12, 0), ("geforce rtx 5080",)),
    "RTX5090": Gpu("RTX5090", 32, 209.5, 104.8, 1792, (12, 0), ("geforce rtx 5090",)),
    "RTXPRO4500": Gpu("RTXPRO4500", 32, 210.9, 54.9, 896, (12, 0), ("rtx pro 4500", "pro 4500")),
    "RTXPRO6000": Gpu("RTXPRO6000", 96, 480.0, 120.0, 1597, (12, 0), ("rtx pro server 6000", "pro 6000")),
    "RTXPRO6000-MaxQ": Gpu("RTXPRO6000-MaxQ", 96, 438.9, 110.0, 1792, (12, 0), ("rtx pro 6000 blackwell max-q",)),
    "RTXPRO6000-WK": Gpu("RTXPRO6000-WK", 96, 503.8, 125.0, 1792, (12, 0), ("rtx pro 6000 blackwell workstation",)),
    "B200": Gpu("B200", 180, 2250.0, 75.0, 8000, (10, 0)),
    "B300": Gpu("B300", 270, 2250.0, 75.0, 8000, (10, 3), ("b300 sxm6",)),
}


def find_gpu(name: str) -> Gpu | None:
    """Find a GPU by our name, an alias, or the driver's name ("NVIDIA H100 80GB HBM3"); return None if unknown."""
    wanted = _plain(name)
    known = {_plain(alias): gpu for gpu in GPUS.values() for alias in (gpu.name, *gpu.aliases)}
    if wanted in known:
        return known[wanted]
    # The driver adds vendor and memory size to the name we know, so the longest match wins. A digit right after the
    # match belongs to a different model: a T400 is not a T4, and an RTX A1000 is not an A100.
    inside = [key for key in known if re.search("[^a-z0-9]*".join(key) + r"(?!\d)", name.lower())]
    return known[max(inside, key=len)] if inside else None


def nearest_gpus(name: str) -> list[str]:
    by_plain = {_plain(gpu): gpu for gpu in GPUS}
    if len(_plain(name)) >= 4 and (containing := [gpu for plain, gpu in by_plain.items() if _plain(name) in plain]):
        return containing[:3]  # 4090: a name without its RTX
    return [by_plain[match] for match in difflib.get_close_matches(_plain(name), by_plain, n=3, cutoff=0.4)]


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("nvidia")
