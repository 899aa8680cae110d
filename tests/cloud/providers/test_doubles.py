"""The simulated provider APIs in tests/doubles know states, billing, prices and ids by themselves.

If a double used the package's code for them, one misunderstanding of a provider's documentation would be on both sides
of the test and pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

DOUBLES = Path(__file__).parents[2] / "doubles"
# Formats, the clock and network, and names of GPUs: plain data, or nothing about providers.
FREE = ("homing.wire", "homing.world", "homing.gpus")
# A simulated machine runs the package's own startup script, and a test must be able to forget Modal's open clients.
LISTED = {
    "aws_server.py": {"homing.cloud.machine_setup.startup_script"},
    "machine.py": {
        "homing.cloud.machine_setup",
        "homing.cloud.machine_setup.startup_script",
        "homing.instance",
    },
    "modal.py": {"homing.store.modal"},
    "runpod_world.py": {"homing.cloud.machine_setup"},
}


@pytest.mark.parametrize("path", sorted(DOUBLES.glob("*.py")), ids=lambda path: path.name)
def test_a_double_imports_no_provider_code_of_the_package(path: Path) -> None:
    used = set(_imported(path))
    assert not [name for name in used if name.startswith("homing.cloud.providers")]
    others = {name for name in used if name.startswith("homing") and not name.startswith(FREE)}
    assert others == LISTED.get(path.name, set())


def test_the_check_also_finds_an_import_inside_a_function(tmp_path: Path) -> None:
    page = tmp_path / "double.py"
    page.write_text("def f():\n    from homing.cloud.providers.fake import cloud\n    import homing.errors\n")
    assert set(_imported(page)) == {"homing.cloud.providers.fake", "homing.errors"}


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere in it; for `from A import B` that is A."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module, f"{path.name}: a relative import"
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
