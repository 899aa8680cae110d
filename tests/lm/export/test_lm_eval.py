"""What lm-eval computes on an export: its own rules for the begin-of-text token, without the package."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.cli.typed import typed
from tests.lm.export.folders import make_checkpoint
from tests.lm.export.test_hf import order, reference_of

from homing.lm.export import export

TEXT = "the cat sat on a mat and the dog ran home to eat red fish at night, don't it? 12345"


def rolling_nats(folder: Path, *, add_bos_token: bool | None) -> tuple[float, list[int]]:
    """As `HFLM.loglikelihood_rolling` of lm-eval 0.4.13: a prefix token, then what the tokenizer gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    messages = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
    ids = [prefix, *tokenizer.encode(TEXT, **messages)]
    with torch.no_grad():
        logits_TV = reference_of(folder)(torch.tensor([ids[:-1]])).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits_TV, torch.tensor(ids[1:]), reduction="sum")
    return float(nats), ids


@pytest.mark.regression("export-bos")
def test_the_card_has_the_setting_with_which_lm_eval_agrees_with_homing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "c", "qwen3", phase="pretrain")
    export(order(tmp_path / "c", tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.txt").write_text(TEXT)
    code, out, said = typed(capsys, monkeypatch)("eval", str(tmp_path / "c"), "--text", "test.txt", "--json")
    assert code == 0, said
    ours = _find(json.loads(out), "bits_per_byte")
    doubled, ids = rolling_nats(tmp_path / "out", add_bos_token=None)
    assert ids[0] == ids[1], "the condition that lm-eval's default meets"
    nats, ids = rolling_nats(tmp_path / "out", add_bos_token=False)
    assert ids[0] != ids[1]
    bits = nats / math.log(2) / len(TEXT.encode())
    assert bits == pytest.approx(ours, abs=2e-4)
    assert doubled / math.log(2) / len(TEXT.encode()) > bits
    assert "pretrained=.,add_bos_token=False" in (tmp_path / "out/README.md").read_text()


def _find(value: object, name: str) -> float:
    """The value of the first score of that name anywhere in the document."""
    if isinstance(value, dict):
        if value.get("name") == name:
            return float(value["value"])
        value = list(value.values())
    for inner in value if isinstance(value, list) else []:
        found = _find(inner, name)
        if not math.isnan(found):
            return found
    return math.nan
