"""Open weights with a template of their own, through sft and rl by adapters: prepared, trained, measured, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

from homing.lm.generate.load_model import load_for_use
from homing.wire import file_names

pytestmark = pytest.mark.slow

# No mark of ChatML is in it: whoever asked so would be refused.
TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|end_of_text|>' + m.role + ': ' + m.content + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|end_of_text|>assistant: ' }}{%- endif %}"
)
RUN_FILE = """
name: ll
model: {from: upstream, context: 64}
phases:
  - {kind: sft, method: lora, steps: 2, batch_tokens: 128, data: {chat: [chats.jsonl]}, lora: {rank: 2}}
  - kind: rl
    method: qlora
    steps: 3
    rl: {tasks: [{kind: arithmetic}], prompts_per_step: 2, samples_per_prompt: 2, answer_tokens: 8, eval_prompts: 4,
         eval_samples: 2, kl: 0.1}
train: {device: cpu, threads: 1}
"""


def homing(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "homing.cli", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    reference = tmp_path / "upstream"
    write_reference(reference, "llama", vocab_size=400)
    write_their_tokenizer(reference, "llama", "what is 3 + 4? the cat sat on the mat. 0 1 2 3 4 5 6 7 8 9 " * 30)
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": TEMPLATE}
    (reference / file_names.TOKENIZER_CONFIG).write_text(json.dumps(config))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/ll.yaml").write_text(RUN_FILE)
    chats = [[{"role": "user", "content": f"cat {n}"}, {"role": "assistant", "content": "sat"}] for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.mark.acceptance(91)
def test_sft_and_rl_by_adapters_end_as_one_adapter_of_the_open_weights(project: Path) -> None:
    homing("prep", "ll")
    homing("verify", "ll")
    homing("train", "ll")
    folder = next(Path(os.environ["HOMING_HOME"]).glob("runs/*/checkpoints/rl/step-00000003"))
    assert not (folder / file_names.WEIGHTS).exists()
    assert "arithmetic:1" in homing("eval", "ll").stdout
    assert "peft on transformers" in homing("export", "ll", "--to", "adapter").stderr
    exported = json.loads((project / "exports/ll-adapter/adapter_config.json").read_text())
    assert exported["base_model_name_or_path"] == str(project / "upstream"), "and not what sft left"
    assert "reproduces the trainer's logits" in homing("export", "ll", "--to", "merged").stderr
    # By itself, without the run's folder around it, as a fetched one is.
    folder.rename(project / "ll")
    model, _ = load_for_use(project / "ll", "cpu")
    assert model.lora is None
