"""The comparison with llama.cpp is run manually; without llama.cpp it prints how to install it and is skipped."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gguf_in_llama_cpp.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is here: run the script itself")
def test_without_llama_cpp_it_says_what_to_install_and_is_skipped() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    assert "pip install llama-cpp-python" in done.stdout
