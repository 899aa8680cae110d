"""The first five minutes, measured: `homing quickstart` in an empty folder, from the command to the receipt.

    python benchmarks/quickstart.py            the figures that the README shows
    python benchmarks/quickstart.py --quick    the trip with a shorter training, under a minute: no figures kept

Passes when it ends inside five minutes on this machine, the validation loss is clearly under the bigram entropy of the
same tokens, and nothing is left running or billing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _result import RESULTS, write_result

MEASURES = (("validation", "val_loss", "val_bits_per_byte"), ("bigram", "bigram_nats", "bigram_bits_per_byte"))
MAX_SECONDS = 300
MAX_OF_BIGRAM = 0.95  # "clearly under"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short training; nothing is kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, left = trip(Path(folder), is_quick=arguments.quick)
    print(f"seconds        {figures['seconds']:8.1f}   at most {MAX_SECONDS}")
    for name, nats, bits in MEASURES:
        print(f"{name:<14} {figures[nats]:8.3f}   nats per token; {figures[bits]:.3f} bits per byte")
    print(f"left billing   {left:8d}")
    is_learned = arguments.quick or figures["val_loss"] < MAX_OF_BIGRAM * figures["bigram_nats"]
    passed = figures["seconds"] <= MAX_SECONDS and is_learned and left == 0
    if not arguments.quick:
        write_result("quickstart", figures, passed=passed)
        show_in_readme(figures)
    verdict = "PASS" if passed else "FAIL"
    learned = f"loss {figures['val_loss']:.3f} against bigram {figures['bigram_nats']:.3f}"
    print(f"{verdict} {figures['seconds']:.0f} s, {learned}")
    return 0 if passed else 1


def show_in_readme(figures: dict[str, Any]) -> None:
    """The README shows these figures and no others; tests/docs checks that they are those of the file."""
    page = RESULTS.parents[1] / "README.md"
    head, rest = page.read_text(encoding="utf-8").split("<!-- figures: quickstart -->\n")
    tail = rest.split("<!-- end of figures -->")[1]
    sample = "\n".join(figures["sample"].strip().splitlines()[:8])
    block = (
        f"- {figures['seconds']:.0f} s from the command to the receipt, on {os.cpu_count()} CPU cores; "
        f"{figures['tokens']:,} tokens in {figures['steps']} steps.\n"
        f"- Validation loss {figures['val_loss']:.3f} nats per token, {figures['val_bits_per_byte']:.3f} bits per byte."
        f" A model that sees only the previous token can reach {figures['bigram_nats']:.3f} nats at best.\n"
        f"- A sample after a minute or two of training:\n\n```text\n{sample}\n```\n"
    )
    page.write_text(f"{head}<!-- figures: quickstart -->\n{block}<!-- end of figures -->{tail}", encoding="utf-8")


def trip(folder: Path, *, is_quick: bool) -> tuple[dict[str, Any], int]:
    environment = {**os.environ, "HOMING_HOME": str(folder / "home")}
    homing = [sys.executable, "-m", "homing.cli"]
    argv = [*homing, "quickstart", "--yes", "--json", *(["--steps", "60"] if is_quick else [])]
    done = subprocess.run(argv, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    runs = subprocess.run([*homing, "runs", "--json"], cwd=folder, env=environment, capture_output=True, check=True)
    return json.loads(done.stdout), len(json.loads(runs.stdout)["billing"])


if __name__ == "__main__":
    sys.exit(main())
