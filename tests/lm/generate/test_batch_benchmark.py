"""The benchmark of many texts at once runs on any machine, as a toy."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "serve_batch.py"


def test_the_benchmark_compares_a_batch_with_one_text_and_with_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny"])
    spec = spec_from_file_location("serve_batch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)

    def kept(*_: object, **__: object) -> None:
        raise AssertionError("the figures of a toy are not kept")

    monkeypatch.setattr(script, "write_result", kept)
    assert script.main() == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line)
    assert float(shown["batch_tok_s"]) > 0
    assert float(shown["transformers_tok_s"]) > 0
    assert shown["same_first_tokens"] == shown["batch"] == "8"
