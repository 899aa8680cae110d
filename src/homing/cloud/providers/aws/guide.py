"""Guide: which EC2 types can train a model, computed from the memory that each phase needs on the type's GPU. Offline.

For a first look without an account; `homing plan RUN` queries AWS itself. Rates come from the dated price table, if it
has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from homing.cloud.providers.fixed_prices import Price, find_price
from homing.config.estimate.memory import Fit, fits
from homing.gpus import GPUS
from homing.wire.run_json import Run

__all__ = ["TYPES", "Row", "guide"]

# Type -> GPU, number of GPUs, vCPUs, GiB of host memory, from AWS's pages. p3 is hardly sold any more.
TYPES: dict[str, tuple[str, int, int, int]] = {
    "g4dn.xlarge": ("T4", 1, 4, 16),
    "g4dn.2xlarge": ("T4", 1, 8, 32),
    "g5.xlarge": ("A10G", 1, 4, 16),
    "g6.xlarge": ("L4", 1, 4, 16),
    "g6e.xlarge": ("L40S", 1, 4, 32),
    "p3.2xlarge": ("V100", 1, 8, 61),
    "p3.8xlarge": ("V100", 4, 32, 244),
    "p4d.24xlarge": ("A100-40GB", 8, 96, 1152),
    "p4de.24xlarge": ("A100", 8, 96, 1152),
    "p5.4xlarge": ("H100", 1, 16, 256),
    "p5.48xlarge": ("H100", 8, 192, 2048),
}


@dataclass(frozen=True)
class Row:
    type: str
    card: str
    num_gpus: int
    num_cores: int
    memory_gib: int
    fit: Fit  # of the phase that needs the most memory
    price: Price | None  # on demand in us-east-1, with its date

    @property
    def is_fitting(self) -> bool:
        return self.fit.is_fitting


def guide(run: Run) -> list[Row]:
    """Return a row for every type, in table order. For one GPU: sharding over several is not taken into account."""
    rows = []
    for name, (card, num_gpus, num_cores, memory_gib) in TYPES.items():
        each = [fits(run, phase, {card: GPUS[card]})[0] for phase in run.phases]
        worst = next((fit for fit in each if not fit.is_fitting), max(each, key=lambda fit: fit.peak_bytes))
        rows.append(Row(name, card, num_gpus, num_cores, memory_gib, worst, find_price("aws", name)))
    return rows
