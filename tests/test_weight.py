"""The core stays light: at most 25 packages and 60 MB, and none of them is torch."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

MAX_PACKAGES = 25
MAX_BYTES = 60_000_000


def core_distributions() -> set[str]:
    """What `pip install homing` alone brings, walked through the metadata of what is installed here."""
    todo, found = ["homing"], set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in distribution(name).requires or []:
            wanted, _, marker = requirement.partition(";")
            is_for_us = not re.search(r"extra\s*==|python_version\s*<|sys_platform|platform_system", marker)
            if is_for_us:
                todo.append(re.split(r"[\s\[<>=!~(]", wanted.strip())[0].lower().replace("_", "-"))
    return found


def installed_bytes(name: str) -> int:
    files = distribution(name).files or []
    paths = [Path(str(file.locate())) for file in files]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_the_core_has_few_packages() -> None:
    core = core_distributions()
    assert {"typer", "rich", "pydantic", "ruamel-yaml", "httpx"} <= {n.replace(".", "-") for n in core}
    assert "torch" not in core
    assert len(core) <= MAX_PACKAGES, sorted(core)


def test_the_core_is_small() -> None:
    sizes = {name: installed_bytes(name) for name in core_distributions()}
    assert sum(sizes.values()) <= MAX_BYTES, sizes
