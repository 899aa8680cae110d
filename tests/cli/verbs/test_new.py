from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

from homing.cli import main as cli
from homing.config.load import load_run


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def homing(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["homing", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def lay(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")


def test_a_new_run_file_is_commented_named_and_has_its_size_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay("a b.txt", "books/one.txt")
    assert (
        homing(monkeypatch, "new", "faust", "--from", "goethe-75m", "--text", "a b.txt", "--text", "books/*.txt") == 0
    )
    text = Path("runs/faust.yaml").read_text()
    assert "75,547,776" not in text, "the number would be wrong after a change of the vocabulary"
    assert "# Parameters, memory and the GPUs that it fits on: homing verify faust" in text
    assert "{sizes}" not in text
    assert "name: faust" in text
    loaded = load_run("faust")
    assert loaded.prep.text == ["a b.txt", "books/*.txt"]
    said = capsys.readouterr()
    assert "runs/faust.yaml: 75,547,776 parameters" in said.out
    assert "homing prep faust" in said.err
    assert [path.name for path in Path("runs").iterdir()] == ["faust.yaml"]


@pytest.mark.parametrize("odd", ["*.txt", "a: b.txt", "#x", "it's.txt", "[x].txt", 'q"uote.txt', "-dash", "ümlaut.txt"])
def test_any_path_survives_the_way_into_the_file(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    lay(odd if odd != "*.txt" else "any.txt")
    assert homing(monkeypatch, "new", "odd", "--from", "cs336", f"--text={odd}", f"--validation={odd}") == 0
    assert load_run("odd").prep.text == [odd]
    assert load_run("odd").prep.validation == [odd]


def test_own_text_leaves_the_presets_held_out_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    lay("my.txt")
    assert homing(monkeypatch, "new", "mine", "--from", "cs336", "--text", "my.txt") == 0
    assert load_run("mine").prep.validation == []


@pytest.mark.parametrize(
    ("flag", "named", "said"),
    [
        ("--text", "foust.txt", "--text Faust.TXT"),
        ("--validation", "books/on.txt", "--validation books/one.txt"),
        ("--text", "books/*.tex", "no file matches"),
        ("--text", "bocks/one.txt", "does not exist"),
        ("--text", "zzz", "which contains Faust.TXT, books"),
    ],
)
def test_missing_text_exits_2_with_the_nearest_name_before_writing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, named: str, said: str
) -> None:
    lay("Faust.TXT", "books/one.txt")
    assert homing(monkeypatch, "new", "a", "--from", "tiny", flag, named) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_presets_own_text_may_come_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "new", "a", "--from", "tiny") == 0
    assert "put your text there" in capsys.readouterr().err


def test_an_existing_file_is_written_over_only_with_force(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "new", "a", "--from", "tiny") == 0
    Path("runs/a.yaml").write_text("precious")
    assert homing(monkeypatch, "new", "a", "--from", "tiny") == 2
    assert Path("runs/a.yaml").read_text() == "precious"
    assert "--force" in capsys.readouterr().err
    assert homing(monkeypatch, "new", "a", "--from", "tiny", "--force") == 0
    Path("runs/b.toml").write_text("x")
    assert homing(monkeypatch, "new", "b", "--from", "tiny", "--force") == 2


def test_an_unknown_preset_is_answered_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "new", "a", "--from", "goethe") == 2
    said = capsys.readouterr().err
    assert "Did you mean goethe-75m?" in said
    assert "shakespeare" in said
    assert homing(monkeypatch, "new", "a") == 2
    assert homing(monkeypatch, "new") == 2
    assert homing(monkeypatch, "new", "Bad_Name", "--from", "tiny") == 2
    assert "homing new bad-name" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.acceptance(144)
def test_the_list_of_presets_has_computed_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "new", "--list", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "homing.presets/1"
    sizes = {row["preset"]: row["num_params"] for row in document["presets"]}
    assert {"tiny", "shakespeare", "goethe-75m", "cs336", "gpt-124m", "medium-22m", "1b", "2b", "4b"} == set(sizes)
    assert sizes["goethe-75m"] == 75_547_776
    assert homing(monkeypatch, "new", "--list") == 0
    assert "75,547,776" in capsys.readouterr().out


def test_json_says_what_was_written_and_what_comes_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert homing(monkeypatch, "new", "a", "--from", "tiny", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == "runs/a.yaml"
    assert document["next"] == "homing prep a"


def test_a_folder_that_cannot_be_written_is_an_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs").write_text("a file, not a folder")
    assert homing(monkeypatch, "new", "a", "--from", "tiny") == 2
    assert "Cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["empty.txt", "nothing", "empt*.txt"])
def test_text_without_a_single_byte_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    assert homing(monkeypatch, "new", "a", "--from", "tiny", "--text", named) == 2
    said = capsys.readouterr().err
    assert f"--text: {named!r} is empty" in said
    assert not Path("runs/a.yaml").exists()


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (["--from", "tiny", "--text", "a b.txt"], "homing new first --from tiny --text 'a b.txt'"),
        (["My Book", "--from", "cs336", "--text", "a b.txt"], "homing new my-book --from cs336 --text 'a b.txt'"),
        (["Ä", "--from", "./w", "--chat", "c.jsonl"], "homing new ae --from ./w --chat c.jsonl"),
        (["\u6f22", "--from", "./w", "--chat", "c.jsonl"], "homing new first --from ./w --chat c.jsonl"),
        ([], "homing new first --from tiny"),
    ],
)
def test_a_missing_or_invalid_name_is_answered_with_the_whole_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: list[str], fix: str
) -> None:
    lay("a b.txt")
    assert homing(monkeypatch, "new", *typed) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  fix {fix}"


def test_without_a_preset_the_command_to_type_is_the_fix_and_keeps_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay("notes/a.txt")
    assert homing(monkeypatch, "new", "notes2", "--text", "notes/", "--json") == 2
    error = json.loads(capsys.readouterr().out)
    assert not error["why"].startswith("homing")
    assert error["fix"].startswith("homing new notes2 --from tiny --text notes/")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n * * *\n\nUnd es begab sich, dass", "Und es begab"),
        ("a.jsonl", '{"text": "\\"So\\" said: he #1"}\n', '"So" said: he'),
        ("a.txt", "x" * 200, "x" * 40),
        ("a.txt", b"caf\xe9 und so", ""),  # prep says what is wrong with it
    ],
)
def test_samples_begin_with_the_first_words_of_the_text_that_was_named(
    monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, words: str
) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert homing(monkeypatch, "new", "own", "--from", "tiny", "--text", name) == 0
    assert load_run("own").run.sampling.prompts == ([words] if words else [])


def test_packed_text_gives_its_first_words_and_a_preset_without_text_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("a.txt.xz").write_bytes(lzma.compress("Es war einmal ein König".encode()))
    assert homing(monkeypatch, "new", "own", "--from", "tiny", "--text", "a.txt.xz") == 0
    assert load_run("own").run.sampling.prompts == ["Es war einmal"]
    assert homing(monkeypatch, "new", "preset", "--from", "tiny") == 0
    assert load_run("preset").run.sampling.prompts == ["ROMEO:"]


@pytest.mark.parametrize("address", ["hf:datasets/OWNER/NAME/data/*.parquet", "s3://bucket/books/all.jsonl"])
def test_text_in_a_store_is_not_looked_for_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert homing(monkeypatch, "new", "far", "--from", "tiny", "--text", address, "--validation", address) == 0
    assert "No text found" not in capsys.readouterr().err
    loaded = load_run("far")
    assert (loaded.prep.text, loaded.prep.validation) == ([address], [address])
    assert [warning for warning in loaded.warnings if "data.text" in warning] == []


@pytest.mark.regression("refused-fixes")
def test_a_folder_of_the_system_is_not_offered_as_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for named in ("/hom", "/op", "/nope"):
        assert homing(monkeypatch, "new", "x", "--from", "tiny", "--text", named) == 2
        said = capsys.readouterr().err
        assert "Did you mean" not in said
        assert "--text YOUR_TEXT.txt" in said


# --- conversations after the text -------------------------------------------------------------------------------------


def lay_chats(num: int, words: int) -> None:
    answer = "the cat sat on the mat " * (words // 6)
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": answer}] for n in range(num)]
    Path("me.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("books").mkdir(exist_ok=True)
    Path("books/one.txt").write_text("A line of a book about a cat.\n" * 4000)


@pytest.mark.regression("new-text-and-chat")
def test_text_and_conversations_give_a_run_with_enough_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_chats(300, 240)
    assert homing(monkeypatch, "new", "bot", "--from", "tiny", "--text", "books/", "--chat", "me.jsonl") == 0
    run = load_run("bot", is_for_prep=True).run
    assert [phase.kind for phase in run.phases] == ["pretrain", "sft"]
    # 960 bytes are at most 370 tokens in a vocabulary of 2,048.
    assert run.model.context == 512
    pretrain, sft = run.phases
    assert pretrain.batch_tokens == 2048, "the tokens a step of the preset, in rows of another length"
    assert pretrain.num_steps < 600, "a short text is not read again and again"
    assert sft.batch_tokens // run.model.context > 1
    assert 50 <= sft.num_steps <= 500
    said = capsys.readouterr()
    assert f"sft: {sft.num_steps:,} steps of {sft.batch_tokens:,} tokens, in rows of 512" in said.err
    assert "Prepare the text: homing prep bot" in said.err
    assert "Note: model.context is 512 tokens instead of the preset's 128, so that 95% of your" in said.err
    assert f"Note: phases.0.steps is {pretrain.num_steps:,} instead of 600, because your text is short." in said.err
    text = Path("runs/bot.yaml").read_text()
    assert "fits 95% of your conversations; the preset has 128" in text
    assert text.index("kind: sft") < text.index("eval:")


def test_one_step_is_not_called_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lay_chats(30, 24)
    assert homing(monkeypatch, "new", "one", "--from", "1b", "--text", "books/", "--chat", "me.jsonl") == 0
    assert ": 1 step of " in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["shakespeare", "cs336", "medium-22m", "goethe-75m", "gpt-124m", "1b"])
def test_every_preset_takes_conversations(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    lay_chats(40, 1200)
    assert homing(monkeypatch, "new", "bot", "--from", preset, "--text", "books/", "--chat", "me.jsonl") == 0
    run = load_run("bot", is_for_prep=True).run
    assert [phase.kind for phase in run.phases] == ["pretrain", "sft"]
    assert run.model.context >= 1024


def test_short_conversations_leave_the_presets_context(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_chats(40, 12)
    assert homing(monkeypatch, "new", "bot", "--from", "tiny", "--text", "books/", "--chat", "me.jsonl") == 0
    assert load_run("bot", is_for_prep=True).run.model.context == 128


def test_conversations_in_a_store_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_chats(1, 12)
    far = "s3://bucket/chats.jsonl"
    assert homing(monkeypatch, "new", "bot", "--from", "tiny", "--text", "books/", "--chat", far) == 0
    run = load_run("bot", is_for_prep=True).run
    assert (run.model.context, run.phases[1].kind) == (128, "sft")


def test_a_file_without_a_conversation_is_refused_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_chats(1, 12)
    Path("me.jsonl").write_text('{"text": "no chat"}\n')
    assert homing(monkeypatch, "new", "bot", "--from", "tiny", "--text", "books/", "--chat", "me.jsonl") == 2
    said = capsys.readouterr().err
    assert "no conversations found in me.jsonl" in said
    assert "homing data check me.jsonl" in said
    assert not Path("runs/bot.yaml").exists()
