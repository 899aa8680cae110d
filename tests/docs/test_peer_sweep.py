"""benchmarks/gpu/quality.py shows a peer at its best: how its batch is chosen, and what its rows say. No GPU needed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("gpu/quality.py", monkeypatch)


def load(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks/gpu"), str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("script", ROOT / "benchmarks" / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


ASKED = [65536, 131072, 262144, 524288]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (131072, ASKED),
        (65536, [32768, *ASKED]),  # one more at that end shows that it is the best
        (32768, [16384, 32768, *ASKED]),
        (16384, [16384, 32768, *ASKED]),  # the least that is tried
        (524288, [*ASKED, 1048576]),
        (2097152, [*ASKED, 1048576, 2097152]),  # the most
    ],
)
def test_the_sweep_goes_on_until_the_best_batch_is_not_at_an_end(
    best: int, tried: list[int], quality: ModuleType
) -> None:
    found, bits = quality.best_batch(lambda batch: abs(math.log2(batch / best)), [*ASKED, 65536])
    assert (found, sorted(bits)) == (best, tried)
    assert quality.is_at_end(found, bits) == (best in (quality.LEAST_BATCH, quality.MOST_BATCH))


def test_a_batch_that_diverged_is_never_the_best(quality: ModuleType) -> None:
    found, _ = quality.best_batch(lambda batch: math.nan if batch < 200_000 else float(batch), ASKED)
    assert found == 262144


def test_the_seed_that_chooses_is_not_one_that_is_reported(quality: ModuleType) -> None:
    asked = []

    def work(name: str, run: str, seed: int) -> dict[str, Any]:
        asked.append((name, run, seed))
        return {"val_bits_per_byte": abs(int(run.split("=")[1]) - 131072)}

    with pytest.raises(SystemExit, match="must not be reported"):
        quality.sweep_peer(work, ASKED, 1, [0, 1, 2])
    assert asked == []
    assert quality.sweep_peer(work, ASKED, 100, [0, 1, 2]) == 131072
    assert asked == [("peer_sweep", f"nanochat batch={batch}", 100) for batch in ASKED]


def test_transformers_runs_with_several_rows_and_modes_at_the_same_tokens_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = load("engine.py", monkeypatch)
    for case in (case for case in engine.CASES.values() if case.has_peer):
        settings = engine.peer_settings(case)
        assert {engine.tokens_of(setting.case) for setting in settings} == {engine.tokens_of(case)}
        assert {setting.case.rows for setting in settings} == {case.rows // 2, case.rows, 2 * case.rows}
        assert {setting.mode for setting in settings} == {"default", "max-autotune-no-cudagraphs"}


def test_tiktoken_is_tried_with_fewer_and_with_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    prep = load("prep.py", monkeypatch)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert prep.thread_counts() == [2, 4, 8, 16]


class GPT(nn.Module):
    """What `quality` calls of nanochat's model, at its smallest."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def setup_optimizer(self, **settings: float) -> torch.optim.Optimizer:
        self.settings = settings
        optimizer = torch.optim.SGD(self.parameters(), lr=settings["matrix_lr"] * 50)
        for group in optimizer.param_groups:
            group |= {"initial_lr": group["lr"], "kind": "muon", "momentum": 0.9}
        return optimizer

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, loss_reduction: str = "mean") -> torch.Tensor:
        logits = self.head(self.embedding(ids))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction
        )


class GPTConfig:
    def __init__(self, **sizes: Any) -> None:
        self.__dict__.update(sizes)


@pytest.mark.slow
def test_a_row_of_the_peer_has_its_settings_and_is_not_measured_twice(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = ModuleType("nanochat.gpt")
    peer.__dict__.update(GPT=GPT, GPTConfig=GPTConfig)
    monkeypatch.setitem(sys.modules, "nanochat", ModuleType("nanochat"))
    monkeypatch.setitem(sys.modules, "nanochat.gpt", peer)
    results = tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(quality, "RESULTS", results)
    monkeypatch.setattr(sys.modules["_result"], "RESULTS", results)
    monkeypatch.setattr(sys.modules["_result"], "_git", lambda *arguments: "0" * 40 if "HEAD" in arguments else "")
    quality.write_recipes(tmp_path / "recipes.json")
    recipes = quality.read_recipes(tmp_path / "recipes.json")
    quality.prepare(tmp_path / "data", (str(ROOT / "docs"),), vocab_size=512, most_bytes=200_000)
    with quality.Bench(recipes, tmp_path / "data", peer_base="toy") as bench:
        row = quality.recall_or_measure(bench, "quality", "nanochat batch=2048", 0, seconds=0.5, out=tmp_path)
        assert row["settings"]["batch_tokens"] == row["batch_tokens"] == 2048
        assert row["settings"]["is_default_batch"] is False
        assert row["settings"]["rate_factor"] == pytest.approx((2048 / 2**19) ** 0.5, abs=1e-4)
        assert bench.model[0].settings["matrix_lr"] == pytest.approx(0.02 * (2048 / 2**19) ** 0.5)
        assert "'settings'" in capsys.readouterr().out, "printed with the figure"
        again = quality.recall_or_measure(bench, "quality", "nanochat batch=2048", 0, seconds=0.5)
        assert "there already" in capsys.readouterr().out
        other = quality.recall_or_measure(bench, "quality", "nanochat batch=2048", 1, seconds=0.5)
    assert again == json.loads(json.dumps(row))
    kept = json.loads((tmp_path / "quality.json").read_text())["figures"]["rows"]
    assert [each["seed"] for each in kept] == [0], "the copy that was asked for, as it was then"
    assert [each["seed"] for each in quality.kept_rows("quality")] == [0, other["seed"]]
