"""The page on adding a provider, followed to the letter: its files written as printed, and the contract suite run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_commands import ROOT, blocks

PAGE = ROOT / "docs/development/adding-a-provider.md"
# The files would go into the tree. Here they are in a folder next to it, added to the package path and the registry.
CONFTEST = """
from pathlib import Path
import homing.cloud.providers as package
from homing.cloud.providers import registry
from tests.conftest import *

package.__path__.append(str(Path(__file__).parent))
registry.PROVIDERS.update({%s})
"""


@pytest.mark.slow
def test_the_page_builds_a_provider_that_passes_the_contract(tmp_path: Path) -> None:
    written = {body.splitlines()[0]: body for language, body in blocks(PAGE) if language == "python"}
    module, line, test = (next(body for head, body in written.items() if name in head) for name in NAMES)
    (tmp_path / "nimbus.py").write_text(module)
    (tmp_path / "test_nimbus.py").write_text(test)
    (tmp_path / "conftest.py").write_text(CONFTEST % "".join(line.splitlines()[1:]))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "test_nimbus.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20


NAMES = ("providers/nimbus.py", "in PROVIDERS", "test_nimbus.py")


def test_the_module_on_the_page_has_our_manners(tmp_path: Path) -> None:
    module = next(body for language, body in blocks(PAGE) if language == "python" and NAMES[0] in body.splitlines()[0])
    path = tmp_path / "nimbus.py"
    path.write_text(module)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), str(path)]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
