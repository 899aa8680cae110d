"""Open weights with a chat template in a file of its own, as transformers writes it: trained by adapters, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

from homing.wire import file_names

pytestmark = pytest.mark.slow

# Not the ChatML of homing's own tokenizers: what is written in another format is seen.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}\n"
)
RUN_FILE = """
name: ll
model: {from: upstream, context: 64}
phases:
  - {kind: sft, method: lora, steps: 2, batch_tokens: 128, data: {chat: [chats.jsonl]}, lora: {rank: 2}}
train: {device: cpu, threads: 1}
"""


def homing(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "homing.cli", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, input=stdin)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was prepared and trained: upstream/, runs/ll.yaml, and its home."""
    folder = tmp_path_factory.mktemp("project")
    write_base(folder / "upstream")
    (folder / "runs").mkdir()
    (folder / "runs/ll.yaml").write_text(RUN_FILE)
    chats = [[{"role": "user", "content": f"cat {n}"}, {"role": "assistant", "content": "sat"}] for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOMING_HOME", str(folder / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        homing("prep", "ll")
        homing("train", "ll")
    return folder


@pytest.fixture
def project(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("HOMING_HOME", str(trained / "home"))
    return trained


def write_base(folder: Path) -> None:
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    write_reference(folder, "llama", vocab_size=400)
    path = write_their_tokenizer(folder, "qwen", "the cat sat on the mat, and the dog ran home. " * 30)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file(), "transformers keeps it in a file of its own"
    assert "chat_template" not in json.loads((folder / file_names.TOKENIZER_CONFIG).read_text())
    ends = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    GenerationConfig(eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.9).save_pretrained(folder)


def checkpoint() -> Path:
    return next(Path(os.environ["HOMING_HOME"]).glob("runs/*/checkpoints/sft/step-00000002"))


@pytest.mark.acceptance("X16")
@pytest.mark.parametrize("kind", ["hf", "merged", "adapter"])
def test_template_and_generation_settings_of_the_base_travel_into_every_export(project: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    exported = homing("export", "ll", "--to", kind)
    out = project / "exports" / f"ll-{kind}"
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    assert "random chats to the same ids" in exported.stderr
    assert "It is a chat model." in (out / "README.md").read_text()
    if kind != "adapter":  # an adapter uses the base's weights and sampling settings
        base = json.loads((project / "upstream/generation_config.json").read_text())
        assert json.loads((out / "generation_config.json").read_text()) == base
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == base["eos_token_id"]


def test_template_and_generation_settings_lie_in_the_checkpoint_and_its_manifest(project: Path) -> None:
    listed = {file["name"] for file in json.loads((checkpoint() / file_names.MANIFEST).read_text())["files"]}
    for name in (file_names.CHAT_TEMPLATE, file_names.GENERATION):
        assert (checkpoint() / name).read_bytes() == (project / "upstream" / name).read_bytes()
        assert name in listed


def test_chat_uses_the_trained_format_and_warns_of_another(project: Path) -> None:
    asked = ("--tokens", "3", "--seed", "1", "--json")
    assert "chat template" not in homing("chat", "ll", *asked, stdin="cat\n").stderr
    hidden = (checkpoint() / file_names.CHAT_TEMPLATE).rename(project / "hidden.jinja")
    try:
        said = homing("chat", "ll", *asked, stdin="cat\n/new\ncat\n").stderr
        assert said.count("has no chat template") == 1
        assert "ChatML" in said
        assert str(project / "upstream") in said, "the source of the template"
        command = [sys.executable, "-m", "homing.cli", "export", "ll", "--to", "merged", "--out", "bare"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert refused.returncode == 7, refused.stderr
        assert "chat template" in refused.stderr
        assert not (project / "bare").exists()
    finally:
        hidden.rename(checkpoint() / file_names.CHAT_TEMPLATE)
