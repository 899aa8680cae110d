"""`homing prep` as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homing.cli import output, prep_report
from homing.cli.verbs.new import command as make_run_file
from homing.cli.verbs.prep import command
from homing.config.load import load_run
from homing.errors import DataError, HomingError, RunFileError, StoreError, UsageError
from homing.lm.data.prep import Progress
from homing.lm.tokenizer import load_tokenizer
from homing.lm.try_first_step import verify

RUN_FILE = """\
data:
  text: [a.txt]
  val_fraction: 0.1
tokenizer:
  vocab_size: 300
model:
  layers: 2
  width: 32
  heads: 2
  context: 16
phases:
  - kind: pretrain
    steps: 400
    batch_tokens: 64
"""

ON_OPEN_WEIGHTS = """\
data: {text: [a.txt], val_fraction: 0.1}
model: {from: upstream, context: 16}
phases:
  - {kind: pretrain, steps: 2, batch_tokens: 64}
  - {kind: mid, steps: 2, batch_tokens: 64, data: {text: [more.txt]}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    output.configure(loudness=0, is_json=False)  # whatever the command line of a test before was
    lines = [f"Line {n}: the cat sat on the mat, and the {n % 7} hats were flat.\n" for n in range(60)]
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(lines), encoding="utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny-cat.yaml").write_text(RUN_FILE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def as_json() -> Any:
    output.configure(loudness=0, is_json=True)
    yield
    output.configure(loudness=0, is_json=False)


@pytest.mark.acceptance(17)
def test_without_a_run_file_the_report_is_the_known_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.txt").write_text("<|endoftext|>".join([(here / "a.txt").read_text()] * 40))
    command(text=["a.txt"], out="data/x", vocab_size="300", specials="one")
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[:7] == [
        "=" * 80,
        "Training BPE Tokenizer",
        "=" * 80,
        "Training data: a.txt",
        "Vocab size: 300",
        "Special tokens: ['<|endoftext|>']",
        "",
    ]
    for line in (
        *("✓ Training complete!", "  Vocabulary size: 300", "  Number of merges: 43"),
        *("✓ Tokenizer saved to data/x/", "  - tokenizer.json", "  - vocab.json", "  - merges.txt"),
        *("Tokenizing Training Data", "Tokenizing a.txt...", "✓ Tokenization complete!"),
        *("✓ Saved to data/x/train-00000.bin", "Tokenizing Validation Data", "✓ Saved to data/x/val-00000.bin"),
    ):
        assert line in lines, line
    # Every figure is that of the files.
    train = json.loads(Path("data/x/manifest.json").read_text())["splits"]["train"]
    text, num_bytes = train["num_text_bytes"], Path("data/x/train-00000.bin").stat().st_size
    assert num_bytes == 2 * train["num_tokens"] > 50_000
    for line in (
        f"File size: {Path('a.txt').stat().st_size / 1e6:.2f} MB",
        f"  Total tokens: {train['num_tokens']:,}",
        f"  Output size: {num_bytes / 1e6:.2f} MB",
        f"  Compression ratio: {text / num_bytes:.2f}x",
        f"  Bytes per token: {text / train['num_tokens']:.2f}",
    ):
        assert line in lines, line
    assert "Next: homing verify NAME" in said.err


@pytest.mark.regression("held-out-share")
def test_few_long_documents_hold_out_the_requested_share_and_print_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chapter = "\n\n".join(f"Paragraph {n} tells of {n * n % 97} cats and {n % 13} hats." * 4 for n in range(800))
    (here / "a.txt").write_text("<|endoftext|>".join(f"Book {n}. {chapter[n * 1000 :]}" for n in range(4)))
    command("tiny-cat", val_fraction="5%")
    splits = json.loads(Path("data/tiny-cat/manifest.json").read_text())["splits"]
    share = splits["val"]["num_tokens"] / (splits["val"]["num_tokens"] + splits["train"]["num_tokens"])
    assert 0.04 <= share <= 0.06
    assert f"{splits['val']['num_tokens']:,} tokens held out ({100 * share:.1f}%)" in capsys.readouterr().out


@pytest.mark.acceptance(22)
def test_a_run_gives_steps_and_epochs_and_the_warning_past_four(capsys: pytest.CaptureFixture[str]) -> None:
    command("tiny-cat")
    said = capsys.readouterr()
    assert "pretrain: 400 steps of 64 tokens = 25,600 tokens = " in said.out
    assert "After about 4 passes" in said.err
    assert said.err.splitlines()[-1] == "Next: homing verify tiny-cat"
    assert Path("data/tiny-cat/manifest.json").exists()


def test_prep_prints_a_few_lines_one_if_nothing_changed_none_with_q_all_with_v(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command("tiny-cat")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 8
    assert lines[0] == "Tokenizer: vocabulary 300, 28 merges; trained on a.txt"
    assert [line.split(":")[0].split(" ", 1)[1] for line in lines[1:3]] == [
        "tokens to train on",
        "tokens held out (10.1%)",
    ]
    command("tiny-cat")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Already up to date: ")
    output.configure(loudness=1, is_json=False)
    command("tiny-cat", force=True)
    assert "  Number of merges: 28" in capsys.readouterr().out.splitlines()
    output.configure(loudness=-1, is_json=False)
    command("tiny-cat", force=True)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    output.configure(loudness=0, is_json=False)


@pytest.mark.regression("sft-few-rows")
def test_an_sft_phase_that_sees_few_of_its_conversations_is_a_warning(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "the cat"}] for n in range(400)]
    (here / "c.jsonl").write_text("\n".join(map(json.dumps, chat)), encoding="utf-8")
    wide = RUN_FILE.replace("context: 16", "context: 64")
    (here / "runs/chat.yaml").write_text(wide + "  - {kind: sft, steps: 4, data: {chat: [c.jsonl]}}\n")
    command("chat")
    run = load_run("chat").run
    sft = run.phases[1]
    assert sft.data is not None
    warnings = [line for line in capsys.readouterr().err.splitlines() if "of its conversations" in line]
    assert len(warnings) == 1
    warning = warnings[0]
    share = 100 * 4 * sft.batch_tokens / sft.data.num_train_tokens
    assert warning.startswith(f"warning: phases.1 trains on {share:.2g}% of its conversations: 4 steps of")
    assert sft.batch_tokens == 8 * run.model.context, "eight rows a step, unless the run file says otherwise"
    steps = int(warning.split("would take ")[1].split()[0].replace(",", ""))
    assert not [one for one in load_run("chat", [f"phases.1.steps={steps}"]).warnings if "of its conv" in one]
    assert not [one for one in load_run("chat", is_smoke=True).warnings if "of its conv" in one], "meant to be short"


LONG_CHAT = RUN_FILE.replace("context: 16", "context: 32") + (
    "  - {kind: sft, steps: 2, batch_tokens: 64, data: {chat: [c.jsonl], val_fraction: 0}}\n"
)


def test_too_long_conversations_warn_with_a_context_that_fits_most(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "the cat sat " * (n % 5)}]
        for n in range(1, 101)
        if n % 5
    ]
    (here / "c.jsonl").write_text("\n".join(map(json.dumps, chat)), encoding="utf-8")
    (here / "runs/chat.yaml").write_text(LONG_CHAT.replace("vocab_size: 300", "vocab_size: 290"), encoding="utf-8")
    command("chat")
    said = capsys.readouterr().err
    (warning,) = [line for line in said.splitlines() if line.startswith("warning: sft")]
    assert "80 conversations are longer than model.context (32 tokens)" in warning
    assert "homing data check chat" in said, "the run, because lengths need its tokenizer"
    context = int(warning.rsplit("model.context: ", 1)[1])
    assert context in (64, 128)
    needed = int(warning.split("fit in ")[1].split()[0])
    for tried, is_warned in ((needed - 1, True), (needed, False), (context, False)):
        command(
            "chat", sets=[f"model.context={tried}", f"phases.0.batch_tokens={tried}", f"phases.1.batch_tokens={tried}"]
        )
        assert ("warning: sft" in capsys.readouterr().err) == is_warned, tried
    assert load_run("chat").run.phases[1].sample_prompts == []
    command("chat")
    assert load_run("chat").run.phases[1].sample_prompts == ["1?"], "samples ask what it learns to answer"
    own = load_run("chat", ['phases.1.sample.prompts=["Who?"]']).run
    assert own.phases[1].sample_prompts == ["Who?"]
    assert own.phases[0].sample_prompts == []
    with (here / "runs/chat.yaml").open("a") as file:
        file.write("  - {kind: rl, steps: 1, rl: {tasks: [{kind: arithmetic}]}}\n")
    assert load_run("chat").run.phases[2].sample_prompts == ["1?"], "and so does rl after it"


@pytest.mark.acceptance(17)
def test_progress_tells_stage_amount_tokens_and_eta_at_least_every_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(prep_report.time, "monotonic", lambda: now)
    with prep_report.Meter() as meter:
        for _ in range(8):
            now += 10.0
            meter.show(Progress("encode", 50_000_000, 200_000_000, 12_000_000, now, eta_s=90.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["encoding | 50 of 200 MB | 12M tokens | eta 1m30s"] * 2


@pytest.mark.acceptance(18)
def test_a_long_prep_says_once_what_makes_it_shorter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(prep_report.time, "monotonic", lambda: now)
    with prep_report.Meter() as meter:
        for _ in range(6):
            now += 31.0
            meter.show(Progress("encode", 50, 200, 12, now, eta_s=7200.0))
        said = capsys.readouterr().err
        assert said.count("tokenizer.vocab_size") == 1
        assert "You can stop at any time" in said
    with prep_report.Meter() as meter:
        now += 31.0
        meter.show(Progress("encode", 50, 200, 12, now, eta_s=7200.0, is_tokenizer_given=True))
    said = capsys.readouterr().err
    assert "This will take a while. To speed it up, use more memory and cores" in said, (
        "another tokenizer cannot be had"
    )


def test_the_newest_run_is_taken_when_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command()
    assert "homing verify tiny-cat" in capsys.readouterr().err


def test_flags_override_the_run_file(capsys: pytest.CaptureFixture[str], as_json: None) -> None:
    Path("b.txt").write_text("Other text, other words. " * 50, encoding="utf-8")
    command("tiny-cat", text=["b.txt"], validation=["a.txt"], out="data/y", vocab_size="280")
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "homing.prep/1"
    assert (result["vocab_size"], result["text"], result["validation"]) == (280, ["b.txt"], ["a.txt"])
    assert result["splits"]["val"]["num_documents"] == 60
    assert result["splits"]["train"]["num_file_bytes"] == Path("b.txt").stat().st_size
    assert result["phases"][0]["num_steps"] == 400
    assert Path("data/y/train-00000.bin").exists()
    assert result["next"] == "homing verify tiny-cat"


@pytest.mark.regression("prep-options")
def test_later_verbs_use_the_flags_of_prep(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("tiny-cat", vocab_size="290", val_fraction="20%", out="data/y")
    said = capsys.readouterr().err
    loaded = load_run("tiny-cat")
    assert loaded.is_prepared
    assert (loaded.run.model.vocab_size, loaded.prep.val_fraction) == (290, 0.2)
    assert loaded.prep.dir == here / "data/y"
    assert said.splitlines()[-1] == "Next: homing verify tiny-cat"
    assert (
        "Saved in runs/tiny-cat.yaml for later commands: data.dir: data/y, data.val_fraction: 20%,"
        " tokenizer.vocab_size: 290"
    ) in said
    expected = RUN_FILE.replace("0.1", "20%").replace("300", "290").replace("data:\n", "data:\n  dir: data/y\n")
    assert Path("runs/tiny-cat.yaml").read_text() == expected


def test_what_changes_one_command_only_is_not_written_into_the_run_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("tiny-cat", vocab_size="290", sets=["data.dir=data/y"])
    assert (
        "Next: homing verify tiny-cat --set data.dir=data/y --set tokenizer.vocab_size=290" in capsys.readouterr().err
    )
    command("tiny-cat", vocab_size="290", is_smoke=True)
    with pytest.raises(HomingError):
        command("tiny-cat", text=["absent.txt"])
    assert Path("runs/tiny-cat.yaml").read_text() == RUN_FILE


def test_prep_reports_a_read_only_run_file_and_suggests_the_complete_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs/t.toml").write_text(
        'data = {text = ["a.txt"], val_fraction = 0.1}\ntokenizer = {vocab_size = 300}\n'
        'model = {layers = 2, width = 32, heads = 2, context = 16}\n[[phases]]\nkind = "pretrain"\nsteps = 4\n'
        "batch_tokens = 64\n"
    )
    command("t", vocab_size="290")
    said = capsys.readouterr().err
    assert "warning: could not write tokenizer.vocab_size: 290 to runs/t.toml: homing does not write TOML" in said
    assert said.splitlines()[-1] == "Next: homing verify t --set tokenizer.vocab_size=290"


def test_a_second_time_nothing_is_done_again(capsys: pytest.CaptureFixture[str], as_json: None) -> None:
    command("tiny-cat")
    first = json.loads(capsys.readouterr().out)
    command("tiny-cat")
    second = json.loads(capsys.readouterr().out)
    assert (first["is_reused"], second["is_reused"]) == (False, True)
    assert first["splits"] == second["splits"]
    command("tiny-cat", force=True)
    assert not json.loads(capsys.readouterr().out)["is_reused"]


def test_an_existing_tokenizer_is_used_or_its_absence_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"[Nn]o tokenizer (found )?at"):
        command("tiny-cat", use_existing_tokenizer=True)
    with pytest.raises(DataError, match=r"[Nn]o tokenizer (found )?at"):
        command(text=["a.txt"], out="data/z", use_existing_tokenizer=True)
    command("tiny-cat")
    made = Path("data/tiny-cat/tokenizer.json").read_bytes()
    Path("new.txt").write_text("New text with the old tokenizer. " * 20, encoding="utf-8")
    command("tiny-cat", text=["new.txt"], use_existing_tokenizer=True)
    assert Path("data/tiny-cat/tokenizer.json").read_bytes() == made
    assert "tiny-cat/tokenizer.json" in capsys.readouterr().out
    command(text=["new.txt"], out="data/z", tokenizer="data/tiny-cat/tokenizer.json")
    assert Path("data/z/tokenizer.json").read_bytes() == made
    with pytest.raises(HomingError) as caught:
        command("tiny-cat", vocab_size="400", use_existing_tokenizer=True)
    assert caught.value.exit_code == 2
    assert "400" in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_open_weights_go_on_with_plain_text_in_their_own_tokenizer(
    here: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

    text = (here / "a.txt").read_text(encoding="utf-8")
    write_reference(here / "upstream", family, vocab_size=330)  # more rows than the tokenizer has ids
    write_their_tokenizer(here / "upstream", family, text, num_merges=40)
    (here / "upstream" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (here / "more.txt").write_text(text.replace("cat", "dog"), encoding="utf-8")
    (here / "runs" / "on.yaml").write_text(ON_OPEN_WEIGHTS, encoding="utf-8")
    command("on")
    said = capsys.readouterr()
    assert "The fast encoder does not support" in said.err
    assert said.out.splitlines()[0].endswith("merges; upstream/tokenizer.json"), said.out
    assert (here / "data/on/tokenizer_config.json").is_file()
    assert not (here / "data/on/vocab.json").exists()
    loaded = load_run("on")
    assert loaded.is_prepared
    assert loaded.run.base is not None
    assert Path(loaded.run.base.dir).is_absolute(), "the trainer reads it from another folder"
    config = (here / "data" / "on" / "tokenizer_config.json").read_text()
    assert config == (here / "upstream" / "tokenizer_config.json").read_text()
    tokenizer = load_tokenizer(here / "upstream")
    first = {name: np.fromfile(here / "data/on" / name / "train-00000.bin", dtype="uint16") for name in ("", "mid")}
    assert tokenizer.decode(first[""][1:60].tolist()).startswith("Line 0: the cat sat")
    assert tokenizer.decode(first["mid"][1:60].tolist()).startswith("Line 0: the dog sat")
    assert first[""][0] == first["mid"][0] == tokenizer.end_of_text_id
    assert verify(loaded.run, here).problems == []
    # Other weights have other ids: the data prepared before does not fit them.
    write_their_tokenizer(here / "upstream", family, text, num_merges=41)
    changed = load_run("on")
    assert not changed.is_prepared
    assert (changed.run.data.manifest_sha256, changed.run.phases[1].data.manifest_sha256) == ("", "")
    assert "not prepared with the tokenizer of model.from" in "\n".join(changed.warnings)
    assert "phases.1.data: the tokenizer has changed" in "\n".join(changed.warnings)
    command("on")
    assert load_run("on").is_prepared


CHAT_ON_OPEN_WEIGHTS = """\
model: {from: upstream, context: CONTEXT}
phases:
  - {kind: sft, steps: 2, batch_tokens: 64, data: {chat: [c.jsonl], val_fraction: 0}}
"""


@pytest.mark.parametrize(("context", "said"), [(32, "in the run file: model.context: 64, the maximum"), (64, "larger")])
def test_of_open_weights_no_longer_context_is_named_than_they_were_made_for(
    here: Path, capsys: pytest.CaptureFixture[str], context: int, said: str
) -> None:
    from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

    write_reference(here / "upstream", "qwen2", vocab_size=330)  # reads 64 tokens at most
    write_their_tokenizer(here / "upstream", "qwen2", (here / "a.txt").read_text(encoding="utf-8"), num_merges=40)
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
    (here / "upstream" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    turns = [[("user", f"{n}?"), ("assistant", "ja"), ("user", "more"), ("assistant", "zqx " * 60)] for n in range(20)]
    chats = [[{"role": role, "content": words} for role, words in chat] for chat in turns]
    (here / "c.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    (here / "runs/chat.yaml").write_text(CHAT_ON_OPEN_WEIGHTS.replace("CONTEXT", str(context)), encoding="utf-8")
    command("chat")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: sft")]
    assert said in warning
    assert "model.context: 256" not in warning


def test_weights_that_homing_exported_are_asked_in_turns_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.lm.model.open_weights.foreign_models import write_reference, write_their_tokenizer

    from homing.lm.tokenizer.tokenizer import CHAT_TEMPLATE

    write_reference(here / "upstream", "qwen3", vocab_size=330)
    write_their_tokenizer(here / "upstream", "qwen2", (here / "a.txt").read_text(encoding="utf-8"), num_merges=40)
    config = {"bos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (here / "upstream" / "tokenizer_config.json").write_text(json.dumps(config))
    rl = "{prompts_per_step: 1, samples_per_prompt: 2, answer_tokens: 8, tasks: [{kind: arithmetic}]}"
    file = f"model: {{from: upstream, context: 64}}\nphases: [{{kind: rl, method: lora, steps: 1, rl: {rl}}}]\n"
    (here / "runs/sums.yaml").write_text(file, encoding="utf-8")
    command("sums")
    assert "Next: homing verify sums" in capsys.readouterr().err
    assert load_run("sums").run.phases[0].rl is not None


def test_the_smoke_profile_prepares_its_own_folder(capsys: pytest.CaptureFixture[str]) -> None:
    command("tiny-cat", is_smoke=True)
    assert Path("data/tiny-cat-smoke/manifest.json").exists()
    assert not Path("data/tiny-cat").exists()
    assert "homing verify tiny-cat --smoke" in capsys.readouterr().err


@pytest.mark.acceptance(23, "X17")
def test_text_in_a_store_is_brought_by_its_hash_and_a_missing_one_stops_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "store").mkdir()
    (here / "a.txt").rename(here / "store" / "a.txt")
    address = f"file:{here}/store/a.txt"
    (here / "runs/tiny-cat.yaml").write_text(RUN_FILE.replace("[a.txt]", f"['{address}']"), encoding="utf-8")
    command("tiny-cat")
    assert f"Fetched {address}" in capsys.readouterr().err
    assert load_run("tiny-cat").is_prepared
    command("tiny-cat")
    said = capsys.readouterr()
    assert "Fetched" not in said.err
    assert "Already up to date" in said.out
    (here / "store" / "a.txt").unlink()
    with pytest.raises(StoreError, match=r"a\.txt is not in"):
        command("tiny-cat")


@pytest.mark.parametrize("how", ["run", "flags"])
def test_a_part_of_the_text_is_prepared_when_asked(capsys: pytest.CaptureFixture[str], how: str) -> None:
    if how == "run":
        command("tiny-cat", take="2kB", sets=["tokenizer.vocab_size=290"])
    else:
        command(text=["a.txt"], out="data/tiny-cat", vocab_size="290", take="2kB")
    said = capsys.readouterr()
    assert re.search(r"Note: Using 2\.\d+ kB out of 4\.\d+ kB of text, in proportion from each file", said.err)
    assert json.loads(Path("data/tiny-cat/manifest.json").read_text())["settings"]["take_bytes"] == 2000


@pytest.mark.acceptance(5)
def test_the_smoke_profile_takes_little_of_much_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.config.resolve.smoke_profile._TAKE_BYTES", 3000)
    command("tiny-cat", is_smoke=True, vocab_size="290")
    assert "Note: Using 3." in capsys.readouterr().err
    # What is then verified and trained is the same profile, and finds it prepared.
    assert load_run("tiny-cat", ["tokenizer.vocab_size=290"], is_smoke=True).is_prepared


@pytest.mark.acceptance(12)
@pytest.mark.parametrize(
    "flags",
    [
        {"text": ["gone.txt"], "out": "data/x"},
        {"text": ["a.txt"], "out": "data/x", "take": "some"},
        {"text": ["a.txt"]},
        {"text": ["a.txt"], "out": "data/x", "vocab_size": "many"},
        {"text": ["a.txt"], "out": "data/x", "vocab_size": "100"},
        {"text": ["a.txt"], "out": "data/x", "is_smoke": True},
        {"text": ["a.txt"], "out": "a.txt/x", "vocab_size": "300"},
        {"run": "gone"},
    ],
)
def test_mistakes_exit_2_with_a_fix_and_leave_nothing(flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        command(**flags)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert not Path("data").exists()


def test_the_command_line_itself_ends_with_2_and_three_lines() -> None:
    Path("bad.txt").write_bytes(b"caf\xe9")
    done = subprocess.run(
        [sys.executable, "-m", "homing.cli", "prep", "--text", "bad.txt", "--out", "data/x"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: bad.txt is not UTF-8 text: byte 0xe9 at offset 3.")
    assert "Traceback" not in done.stderr
    assert not Path("data/x").exists()


def test_too_little_text_for_a_presets_vocabulary_shrinks_it_with_a_message(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run_file("cat", preset="tiny", text=["a.txt"], validation=None, is_listing=False, force=False)
    command("cat")
    said = capsys.readouterr()
    assert "too small for a vocabulary of 2,048" in said.err
    loaded = load_run("cat")
    there = load_tokenizer(here / "data/cat/tokenizer.json").vocab_size
    assert f"vocabulary {there:,}, {there - 256 - 16:,} merges" in said.out, "what was learned, not what was asked for"
    assert loaded.run.model.vocab_size == there < 2048
    assert verify(loaded.run, here).problems == []
    made = (here / "data/cat/manifest.json").read_bytes()
    command("cat")
    assert (here / "data/cat/manifest.json").read_bytes() == made
    assert "Next: homing verify cat" in capsys.readouterr().err
    with pytest.raises(RunFileError, match="vocab_size mismatch"):
        load_run("cat", ["tokenizer.vocab_size=2048"])


def test_a_default_vocabulary_is_as_large_as_the_text_allows(here: Path) -> None:
    (here / "runs/own.yaml").write_text(RUN_FILE.replace("tokenizer:\n  vocab_size: 300\n", ""))
    command("own")
    assert 272 < load_run("own").run.model.vocab_size < 2048
    command(text=["a.txt"], out="data/flags")
    assert load_tokenizer(here / "data/flags/tokenizer.json").vocab_size < 2048


@pytest.mark.parametrize("asked", [{"vocab_size": "2048"}, {"sets": ["tokenizer.vocab_size=2048"]}, {}])
def test_a_vocabulary_that_was_asked_for_is_not_changed(here: Path, asked: dict[str, Any]) -> None:
    if not asked:
        (here / "runs/tiny-cat.yaml").write_text(RUN_FILE.replace("vocab_size: 300", "vocab_size: 2048"))
    with pytest.raises(DataError, match=r"too small for a vocabulary of 2,048"):
        command("tiny-cat", **asked)


def test_a_phase_with_text_of_its_own_is_read_with_the_smaller_vocabulary(here: Path) -> None:
    more = RUN_FILE.replace("tokenizer:\n  vocab_size: 300\n", "")
    (here / "more.txt").write_text("The dog sat too.<|endoftext|>" * 40)
    (here / "runs/own.yaml").write_text(more + "  - {kind: mid, steps: 2, data: {text: [more.txt]}}\n")
    command("own")
    assert load_run("own").is_prepared
