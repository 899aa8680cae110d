"""Whether every way to divide a model among ranks learns what one process learns, and what each rank holds.

    PYTHONPATH=src python benchmarks/parallel.py [--quick]

{pretrain, sft} x {Muon, AdamW} x {1, 2, 4 ranks} x {ddp, zero2, zero3, hsdp} with tiny models in fp32 on CPUs (gloo),
50 steps each, with the cells of tests/lm/parallel_cells.py. Passing means that no loss differs from that of one process
by more than 1e-5 of it. The bytes are those of the rank that holds most, in a model whose vocabulary is padded and
whose tensors are too small to be divided evenly: shares of a real model are closer to 1 / ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "lm"), str(ROOT / "benchmarks")]

from parallel_cells import EIGHT, EVERY, MOST_DIFFERENCE, Cell, Group  # noqa: E402

from _result import write_result  # noqa: E402

KINDS = ("weights", "gradients", "state")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight cells, ten steps")
    arguments = parser.parse_args()
    cells, num_steps, begun = EIGHT if arguments.quick else EVERY, 10 if arguments.quick else 50, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homing-parallel-") as folder:
        group = Group(Path(folder), num_steps)
        group.train_all(cells)
        rows = [row_of(group, cell) for cell in dict.fromkeys([cell.alone for cell in cells] + list(cells))]
    print(f"{'cell':28} {'difference':>10} " + " ".join(f"{kind:>10}" for kind in KINDS) + "   bytes per rank")
    for row in rows:
        print(f"{row['cell']:28} {row['difference']:10.1e} " + " ".join(f"{row[kind]:10,}" for kind in KINDS))
    most = max(row["difference"] for row in rows)
    passed = most <= MOST_DIFFERENCE
    print(f"{'passed' if passed else 'FAILED'}: largest relative difference {most:.1e} over {num_steps} steps")
    if not arguments.quick:
        figures = {"largest_difference": most, "must": MOST_DIFFERENCE, "num_steps": num_steps, "cells": rows,
                   "seconds": round(time.monotonic() - begun, 1)}  # fmt: skip
        write_result("parallel", figures, passed=passed)
    return 0 if passed else 1


def row_of(group: Group, cell: Cell) -> dict[str, Any]:
    held = [group.held(cell, rank) for rank in range(cell.num_ranks)]
    return {
        "cell": cell.name,
        "difference": group.difference(cell),
        "last_loss": group.losses(group.folder / cell.name)[-1],
        **{kind: max(rank[kind] for rank in held) for kind in KINDS},
    }


if __name__ == "__main__":
    sys.exit(main())
