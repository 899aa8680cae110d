"""Bundles the exact code for the instance: a wheel of the files on disk, and the locked versions of its dependencies.

    wheel_bytes   the package as it is on disk, uncommitted changes included -> one wheel, reproducible bytes
    lock          requirements-instance.txt -> the packages for homing[lm] and the run's store, with hashes; torch is
                  listed separately

A wheel is a zip with three metadata files, so writing one needs no build tool on the user's machine. Any pip installs
it, and an instance only unpacks it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import os
import re
import zipfile
from dataclasses import dataclass
from importlib import resources

import homing
from homing.errors import UsageError
from homing.world import World

__all__ = [
    "DATA_FILES",
    "OLDER_CUDA",
    "TORCH_CUDA",
    "TORCH_INDEX",
    "TORCH_RANGE",
    "WHEEL",
    "Lock",
    "check_committed",
    "lock",
    "tree_state",
    "wheel_bytes",
]

WHEEL = f"homing-{homing.__version__}-py3-none-any.whl"
TORCH_RANGE = ("2.11", "2.14")  # must match the range in pyproject.toml; a test checks this
# The CUDA version for which PyPI's wheels in that range are built (2.10 had 12.8, 2.14 will have 13.2). A host with an
# older driver cannot run them. Update this together with the range.
TORCH_CUDA = "13.0"
# For hosts with older drivers, PyTorch's own index has builds of the same torch versions for these CUDA versions. Any
# CUDA 12 driver can run either build (minor version compatibility). The newer CUDA version comes first, because builds
# for 12.6 have no kernels for Blackwell. Both builds exist for torch 2.11.0, 2.12.1 and 2.13.0. Update this together
# with the range.
OLDER_CUDA = ("12.9", "12.6")
TORCH_INDEX = "https://download.pytorch.org/whl"
_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same source gives the same bytes; zip files have no earlier date
_INFO = f"homing-{homing.__version__}.dist-info"
_STORE_EXTRAS = {"s3": "aws", "hf": "hub", "modal": "modal"}
_GIT_S = 20.0
REQUIREMENTS = "requirements-instance.txt"  # written by tools/make_requirements.py
# The package's files that are not modules. A file that is not listed here is never sent to an instance.
DATA_FILES = frozenset(
    (
        REQUIREMENTS,
        "__init__.pyi",
        "py.typed",
        "cloud/plan/measured.json",
        "cloud/providers/aws/prepare.sh",
        "cloud/machine_setup/startup.sh",
        "page_assets/shared.js",
        "page_assets/style.css",
        "presets/1b.yaml",
        "presets/2b.yaml",
        "presets/4b.yaml",
        "presets/cs336.yaml",
        "presets/goethe-75m.yaml",
        "presets/gpt-124m.yaml",
        "presets/medium-22m.yaml",
        "presets/shakespeare.yaml",
        "presets/tiny.yaml",
        "presets/texts/README.md",
        "presets/texts/shakespeare.txt.xz",
        "web/chat/conversations.js",
        "web/chat/markdown.js",
        "web/chat/page.css",
        "web/chat/page.html",
        "web/chat/page.js",
        "web/chat/server.js",
        "web/chat/settings.js",
        "web/chat/side_list.js",
        "web/chat/thread.js",
        "web/dashboard/charts.js",
        "web/dashboard/compare.js",
        "web/dashboard/figures.js",
        "web/dashboard/one_run.js",
        "web/dashboard/page.css",
        "web/dashboard/page.html",
        "web/dashboard/page.js",
        "web/dashboard/runs_table.js",
        "web/dashboard/uplot.LICENSE",
        "web/dashboard/uplot.css",
        "web/dashboard/uplot.js",
    )
)


@dataclass(frozen=True)
class Lock:
    """Requirements file lines: name==version, with a --hash=sha256:... for each of the package's files in the index."""

    lines: tuple[str, ...]  # all packages except torch and those that only torch needs
    torch: tuple[str, ...]  # PyPI's build of torch for TORCH_CUDA, with all its dependencies
    uv: str

    @property
    def torch_version(self) -> str:
        """The pinned requirement, such as torch==2.13.0."""
        return next(line.split()[0] for line in self.torch if line.startswith("torch=="))


def wheel_bytes(world: World) -> bytes:
    package = os.path.dirname(os.path.abspath(homing.__file__))
    names = [name for name in world.walk(package) if _is_ours(name)]
    files = [(f"homing/{name}", world.read(os.path.join(package, name))) for name in names]
    files += [(f"{_INFO}/METADATA", _metadata().encode()), (f"{_INFO}/WHEEL", _WHEEL_TEXT.encode())]
    files += [(f"{_INFO}/entry_points.txt", b"[console_scripts]\nhoming = homing.cli.main:main\n")]
    rows = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files]
    files.append((f"{_INFO}/RECORD", "\n".join([*rows, f"{_INFO}/RECORD,,", ""]).encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name, date_time=_TIME)
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return buffer.getvalue()


def _is_ours(name: str) -> bool:
    """Return True if this file belongs to the package: a module, or one of the data files above.

    The folder may also contain a person's own files, such as .env or a key. Those must not be sent, because the rented
    machine belongs to someone else.
    """
    *folders, last = name.split("/")
    is_module = last.endswith(".py") and all(part.isidentifier() for part in (*folders, last.removesuffix(".py")))
    return is_module or name in DATA_FILES


def tree_state(world: World) -> tuple[str, list[str]]:
    """Return the commit and the package files that differ from it, or ("", []) for an installed package."""
    package = os.path.dirname(os.path.abspath(homing.__file__))
    commit = world.run(["git", "-C", package, "rev-parse", "HEAD"], _GIT_S)
    changed = world.run(["git", "-C", package, "status", "--porcelain", "--", "."], _GIT_S)
    # An installed package may be inside an unrelated repository that ignores it. In that case, that repository's
    # commit says nothing about the package.
    known = world.run(["git", "-C", package, "ls-files", "--error-unmatch", "__init__.py"], _GIT_S)
    if commit.code or changed.code or known.code:
        return "", []
    return commit.out.strip(), [line[3:] for line in changed.out.splitlines()]


def check_committed(world: World) -> None:
    commit, changed = tree_state(world)
    if changed:
        raise UsageError(
            what=f"homing's source tree has {len(changed)} uncommitted changes.",
            why=f"--committed-only is set, and these files differ from {commit[:12]}: {', '.join(changed[:5])}",
            fix="Commit them, or drop --committed-only to send them too.",
        )


def lock(store: str) -> Lock:
    """Return the tested versions, with hashes, of all packages that training on the instance needs."""
    sections = _sections()
    extra = _STORE_EXTRAS.get(store.partition(":")[0], "")
    lines = sorted({*sections["lm"], *(sections[extra] if extra else ())})
    return Lock(tuple(lines), tuple(sections["torch"]), sections["uv"][0])


@functools.cache
def _sections() -> dict[str, list[str]]:
    text = resources.files("homing").joinpath(REQUIREMENTS).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    section: list[str] = []
    for line in text.splitlines():
        if titled := re.fullmatch(r"# \[(\w+)\]", line):
            section = found[titled[1]] = []
        elif line and not line.startswith("#"):
            section.append(" ".join(line.split()))
    return found


def _metadata() -> str:
    """Return the metadata of the installed homing package, or a minimal version of it if homing is not installed."""
    try:
        text = importlib.metadata.distribution("homing").read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        text = None
    return text or f"Metadata-Version: 2.1\nName: homing\nVersion: {homing.__version__}\n"


_WHEEL_TEXT = "Wheel-Version: 1.0\nGenerator: homing\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
