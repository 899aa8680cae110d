"""Writes src/homing/requirements-instance.txt: every package that an instance installs, with its version and hashes.

    python tools/make_requirements.py [--uv PATH]

    pyproject.toml + constraints.txt -> uv pip compile, for Linux x86_64 and each Python that an instance may have
    -> one list of name==version with sha256 of all its files -> sections: lm, what each store adds, torch, uv

Sections are sets of names that are installed together. PyPI's torch (for the CUDA version `TORCH_CUDA` of
cloud/machine_setup/code_bundle.py) and its nvidia packages are in `torch`. Its builds for older drivers come from
PyTorch's own index and have no hashes here: see `UNHASHED_TORCH` in homing/instance/bootstrap.py. Needs a package
index, and uv (pip install uv); no address is written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/homing/requirements-instance.txt"
PLATFORM = "x86_64-manylinux_2_28"
PYTHONS = ("3.11", "3.12")
STORES = {"aws": "aws", "hub": "hub", "modal": "modal"}  # section -> extra
UV = "uv==0.13.8"
HEAD = """\
# What an instance installs, by version and sha256. Written by tools/make_requirements.py; do not edit.
# Linux x86_64, Python 3.11 and 3.12; installed with --require-hashes, each section only where it is needed.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv", help="the program")
    uv = parser.parse_args().uv
    everything = compiled(uv, ["--extra", "lm", *(word for extra in STORES.values() for word in ("--extra", extra))])
    plain = names_without_torch(uv)
    sections = {"lm": plain}
    for section, extra in STORES.items():
        sections[section] = set(compiled(uv, ["--extra", extra])) - plain
    taken = set().union(*sections.values())
    sections["torch"] = set(everything) - taken
    assert "torch" in sections["torch"], sorted(sections["torch"])
    text = HEAD
    for section, names in sections.items():
        text += f"\n# [{section}]\n" + "".join(everything[name] for name in sorted(names))
    text += "\n# [uv]\n" + "".join(compiled_lines(uv, f"{UV}\n").values())
    check(text)
    TARGET.write_text(text)
    print(f"{TARGET.relative_to(ROOT)}: {', '.join(f'{name} {len(names)}' for name, names in sections.items())}, uv 1")
    return 0


def names_without_torch(uv: str) -> set[str]:
    """The core and the extra lm, less torch and what only torch needs: an image may bring its own."""
    lines = (ROOT / "pyproject.toml").read_text()
    wanted = re.search(r"^dependencies = \[\n(.*?)^\]", lines, re.S | re.M)
    lm = re.search(r"^lm = \[\n(.*?)^\]", lines, re.S | re.M)
    assert wanted is not None
    assert lm is not None
    found = re.findall(r'^\s*"([^"]+)"', wanted[1] + lm[1], re.M)
    return set(compiled_lines(uv, "\n".join(line for line in found if not line.startswith("torch")) + "\n"))


def compiled(uv: str, extras: list[str]) -> dict[str, str]:
    return both(lambda python: run(uv, [str(ROOT / "pyproject.toml"), *extras], python))


def compiled_lines(uv: str, text: str) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write(text)
        file.flush()
        return both(lambda python: run(uv, [file.name], python))


def both(compile_for: Callable[[str], dict[str, str]]) -> dict[str, str]:
    """The union over each Python: a package that only the older one needs does no harm on the newer one."""
    found: dict[str, str] = {}
    for python in PYTHONS:
        for name, lines in compile_for(python).items():
            assert found.setdefault(name, lines) == lines, f"{name} has another version on Python {python}"
    return found


def run(uv: str, arguments: list[str], python: str) -> dict[str, str]:
    """Name -> its lines in a requirements file, hashes and all."""
    constraints = [
        "--constraint",
        str(ROOT / "constraints.txt"),
        "--python-platform",
        PLATFORM,
        "--python-version",
        python,
    ]
    quiet = ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-header", "--no-annotate", "-q"]
    # Without sources to build: what builds them would come without a hash.
    argv = [uv, "pip", "compile", *arguments, *constraints, *quiet, "--only-binary", ":all:", "--no-config"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    blocks = re.findall(
        r"^([a-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", done.stdout, re.M
    )
    assert len(blocks) == len(re.findall(r"^[a-z0-9]", done.stdout, re.M)), "a line without hashes, or with a marker"
    return {name: f"{name}=={version} \\\n{hashes}" for name, version, hashes in blocks}


def check(text: str) -> None:
    """No address of any index, and nothing but names, versions and hashes."""
    for line in text.splitlines():
        is_known = re.fullmatch(r"(#.*|[a-z0-9._-]+==[\w.+!]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?|)", line)
        assert is_known, line
    assert "://" not in text


if __name__ == "__main__":
    raise SystemExit(main())
