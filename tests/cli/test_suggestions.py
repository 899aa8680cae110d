"""What people type and is not there: help and version are given, everything else is answered with what was meant."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import Said, homing

from homing.cli import suggestions
from homing.cli.run_verb import LazyVerbs
from homing.cli.verb_list import VERBS
from homing.cloud.providers.registry import PROVIDERS

Say = Callable[[str], Said]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMING_HOME", str(tmp_path / "home"))

    def run(line: str) -> Said:
        return homing(capsys, monkeypatch, *shlex.split(line))

    return run


def fix_of(said: Said) -> str:
    assert said.code == 2, said
    assert "Traceback" not in said.err
    (line,) = [line for line in said.err.splitlines() if line.startswith("  fix ")]
    return line.removeprefix("  fix ")


@pytest.mark.parametrize("line", ["-h", "help", "--help", "-h -q"])
def test_help_is_given_however_it_is_asked_for(say: Say, line: str) -> None:
    said = say(line)
    assert (said.code, said.err) == (0, "")
    assert said.out.strip() == say("").out.strip()


@pytest.mark.parametrize("line", ["help runs", "--help runs", "-h runs", "runs -h"])
def test_the_help_of_a_verb_is_given_before_and_behind_it(say: Say, line: str) -> None:
    said = say(line)
    assert (said.code, said.err) == (0, "")
    assert said.out == say("runs --help").out
    assert "Usage: homing runs" in said.out


def test_the_help_of_a_verb_in_a_group_is_given_too(say: Say) -> None:
    assert "Usage: homing store ls" in say("help store ls").out
    assert "Usage: homing store ls" in say("store ls -h").out


@pytest.mark.parametrize("line", ["-V", "version", "--version"])
def test_every_spelling_of_the_version_command_prints_it(say: Say, line: str) -> None:
    said = say(line)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("homing ")
    assert len(said.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("list", "homing runs"),
        ("ls", "homing runs"),
        ("ps", "homing runs"),
        ("help ps", "homing help runs"),
        ("kill moss", "homing destroy moss"),
        ("rm moss --yes", "homing destroy moss --yes"),
        ("resume moss", "homing launch moss --resume"),
        ("download moss", "homing fetch moss"),
        ("run moss --spend-limit 5", "homing launch moss --spend-limit 5"),
        ("presets", "homing new --list"),
        ("lunch moss", "homing launch moss"),
        ("statsu", "homing status"),
        ("moss launch --spend-limit 5", "homing launch moss --spend-limit 5"),
        ("'my file' plan", "homing plan 'my file'"),
        ("runpod", "homing setup runpod   List its offers: homing offers --provider runpod"),
        ("qwertz", "homing --help"),
        ("-q list", "homing -q runs"),
    ],
)
def test_a_word_that_is_no_verb_is_answered_with_the_whole_line_again(say: Say, line: str, fix: str) -> None:
    assert fix_of(say(line)) == fix


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("set model.depth=8", "homing plan RUN --set model.depth=8   Describe all keys: homing explain"),
        ("set moss model.depth=8", "homing plan moss --set model.depth=8   Describe all keys: homing explain"),
        ("completion bash", "homing --install-completion"),
        ("run moss", "homing launch moss   Here: homing train moss"),
        ("ls moss", "homing runs"),
        ("cancel moss", "homing stop moss"),
        ("download hf:a/b", "homing new tune --from hf:a/b --chat YOUR_CHATS.jsonl"),
        ("finetune", "homing new tune --from hf:OWNER/NAME --chat YOUR_CHATS.jsonl"),
        ("finetunes hf:a/b c.jsonl", "homing new tune --from hf:a/b --chat c.jsonl"),
        ("fine-tune moss", "homing train moss --phase sft   On a rented GPU: homing launch moss --phase sft"),
        ("login", "homing setup runpod   or: shadeform, aws, modal"),
        ("login modal", "homing setup modal"),
        ("config", "homing explain   Show a run's: homing plan RUN --resolved"),
        ("config moss", "homing plan moss --resolved"),
        ("quantize moss", "homing export moss --to gguf --type q8_0"),
    ],
)
def test_a_word_whose_verb_depends_on_what_follows_is_answered_with_a_command_that_works(
    say: Say, line: str, fix: str
) -> None:
    Path("runs").mkdir()
    Path("runs/moss.yaml").touch()
    assert fix_of(say(line)) == fix


def test_a_run_without_a_verb_is_distinguished_from_a_typing_error(say: Say) -> None:
    assert fix_of(say("play")) == "homing plan"  # a typing error, as far as can be known
    Path("runs").mkdir()
    Path("runs/play.yaml").touch()
    said = say("play")
    assert fix_of(said) == "homing plan play"
    assert "play is a run" in said.err


@pytest.mark.acceptance(98)
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("--spend-limit 5 launch moss", "homing launch moss --spend-limit 5"),
        ("--limit 5 launch moss", "homing launch moss --spend-limit 5"),
        ("--limit=5 launch moss", "homing launch moss --spend-limit=5"),
        ("launch moss --budget 5", "homing launch moss --spend-limit 5"),
        ("launch moss --spend-limt=5", "homing launch moss --spend-limit=5"),
        ("new moss --preset tiny", "homing new moss --from tiny"),
        ("runs --format json", "homing runs --json"),
        ("launch moss --learning-rate 3e-4", "homing launch moss --set phases.0.lr=3e-4"),
        ("launch moss --depth=8 --yes", "homing launch moss --set model.depth=8 --yes"),
        ("plan --seed", "homing plan --set seed=VALUE"),
        (
            "prep --train-path a.txt --val-path=b.txt --vocab-size 10000 --output-dir data",
            "homing prep --text a.txt --validation=b.txt --vocab-size 10000 --out data",
        ),
        (
            "launch moss --gpu H100 --num-gpus 8 --spend-limit 100 --no-spt",
            "homing launch moss --gpu H100 --set cloud.num_gpus=8 --spend-limit 100 --no-spot",
        ),
        ("prep moss --val-ratio 0.01 --gzip", "homing prep moss --val-fraction 0.01"),  # and the line before it says so
        ("launch moss --train-shard-lines 250000", "homing launch moss --set data.shard_tokens=VALUE"),
        ("train --config runs/moss.yaml", "homing train runs/moss.yaml"),
        ("launch --config-path=runs/moss.yaml --yes", "homing launch runs/moss.yaml --yes"),
        ("train moss --provider runpod", "homing launch --help"),
        ("new moss --from tiny --set model.depth=2", "homing prep --help"),  # and not --list, which is spelled like it
        ("eval moss --set seed=1", "homing prep --help"),
        ("watch --follow", "homing logs --help"),
        ("plan --frobnicate", "homing plan --help"),
        ("--verbos", "homing --verbose"),
        ("-x", "homing --help"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_the_one_that_was_meant(say: Say, line: str, fix: str) -> None:
    assert fix_of(say(line)) == fix


# Lines of other tools as people paste them behind one of our verbs.
_PASTED = [
    "prep moss --mode cloud --input /workspace/raw_corpus.txt --experiment runpod-2b --train-shard-lines 250000",
    "prep moss --mode smoke --split train --lines-per-shard 50000 --take 100000",
    "prep moss --train-path a.txt --val-path b.txt --vocab-size 10000 --output-dir data --tokenizer-dir tokenizer",
    "store put --action upload --local-path data/train.bin --remote-name train.bin --data-type data",
    "store get --action download --remote-name final.pt --local-path checkpoints/final.pt --data-type checkpoint",
    "store get runs/moss --to here",
    "store ls --action list --data-type data",
    "store rm --action delete --remote-name checkpoint_iter_5000.pt",
    "launch moss --config-path config.yaml --wandb --run-name my-experiment",
    "launch moss --bucket B --instance-type g4dn.xlarge --region us-east-1 --key-name K",
    "launch moss --bucket B --destroy",
    "launch moss --learning-rate 1e-4 --frobnicate 7",
    "train moss --batch-size 8 --wibble --gpu H100",
    "train moss --step 5",
    "fetch moss --include logs/*.log --local-dir ./logs",
    "offers runpod",
    "offers H100",
    "plan moss runpod",
    "logs moss --number 5",
]


def _takes(line: str) -> str:
    """Why the verb would refuse this line as it is typed; "" where it takes it."""
    words = shlex.split(line)[1:]
    command: Any = LazyVerbs().get_command(None, words[0])
    rest = words[1:]
    if "--help" in rest:
        return ""
    if inner := getattr(command, "commands", None):
        command, rest = inner[rest[0]], rest[1:]
    try:
        command.make_context(line, rest).close()
    except Exception as exc:
        return "" if type(exc).__name__ == "BadParameter" else f"{type(exc).__name__}: {exc}"
    return ""


@pytest.mark.acceptance(98)
@pytest.mark.parametrize("line", _PASTED)
def test_a_line_that_is_offered_as_the_fix_is_one_that_its_verb_takes(say: Say, line: str) -> None:
    fix = fix_of(say(line)).partition("   ")[0]
    assert fix.startswith("homing "), fix
    assert _takes(fix) == "", fix


@pytest.mark.parametrize("name", sorted(VERBS))
def test_no_option_of_another_tool_leads_to_a_line_that_the_verb_refuses(say: Say, name: str) -> None:
    for options in ("--output o --step 5 --nope x --learning-rate 1", "--mode smoke --split train --local-path p"):
        said = say(f"{name} moss {options}")
        assert said.code == 2
        fix = fix_of(said).partition("   ")[0]
        assert not fix.startswith("homing ") or _takes(fix) == "", f"{name} moss {options} -> {fix}"


@pytest.mark.regression("refused-fixes")
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("offers runpod", "homing offers --provider runpod"),
        ("offers H100 --json", "homing offers --gpu H100 --json"),
        ("plan moss shadeform", "homing plan moss --set cloud.provider=shadeform"),
        ("store get runs/moss --to here", "homing store get runs/moss here"),
        ("store put --remote-name t.bin --local-path data/t.bin", "homing store put data/t.bin t.bin"),
        ("prep moss --mode smoke --split train", "homing prep moss --smoke"),
        ("train moss --step 5", "homing generate --help"),
        ("launch moss --bucket B --destroy", "homing destroy moss"),
        ("status --watch 0", "For example: --watch 30"),
    ],
)
def test_a_mistake_that_was_answered_wrongly_is_answered_with_what_was_meant(say: Say, line: str, fix: str) -> None:
    assert fix_of(say(line)) == fix


@pytest.mark.regression("refused-fixes")
def test_what_is_left_out_of_a_fix_is_said(say: Say) -> None:
    said = say("prep moss --val-ratio 0.01 --gzip fast")
    assert "Dropped, because homing has no such option: --gzip fast." in said.err
    assert fix_of(said) == "homing prep moss --val-fraction 0.01"


@pytest.mark.parametrize(
    ("line", "what", "why", "fix"),
    [
        ("stop", "`homing stop` needs RUN.", "Run or run file.", "homing stop RUN   List runs: homing runs"),
        ("adopt", "`homing adopt` needs STORE.", "s3://bucket", "homing adopt STORE"),
        ("prep moss fern", "got an unexpected argument: 'fern'", "It takes RUN.", "homing prep --help"),
        ("runs moss", "got an unexpected argument: 'moss'", "It takes options only.", "homing runs --help"),
        ("generate moss --tokens many", "--tokens: it must be a whole number.", "tokens", "homing generate --help"),
        ("generate moss --tokens 0", "--tokens: it must be greater than or equal to 1.", "", "homing generate --help"),
        ("data chek", "`homing data` has no verb 'chek'.", "Available: check, show.", "homing data check"),
        ("store zzz", "`homing store` has no verb 'zzz'.", "Available: ls, get, put, rm.", "homing store --help"),
        ("store list", "`homing store` has no verb 'list'.", "In homing it is called ls.", "homing store ls"),
        ("store upload a b", "has no verb 'upload'.", "In homing it is called put.", "homing store put a b"),
        ("store download a", "has no verb 'download'.", "In homing it is called get.", "homing store get a"),
        ("store delete a --yes", "has no verb 'delete'.", "In homing it is called rm.", "homing store rm a --yes"),
        (
            "launch moss --train-shard-lines 9",
            "has no option --train-shard-lines.",
            "data.shard_tokens (in tokens, not lines)",
            "homing launch moss --set data.shard_tokens=VALUE",
        ),
        ("eval --compare moss", "--compare", "", "homing eval --compare A B"),
    ],
)
def test_what_is_missing_too_much_or_out_of_range_is_said_in_plain_words(
    say: Say, line: str, what: str, why: str, fix: str
) -> None:
    said = say(line)
    assert what in said.err.splitlines()[0]
    assert why in said.err
    assert fix_of(said) == fix


def test_every_word_and_option_in_the_tables_leads_to_something_that_is_there() -> None:
    options = {flag for verb in VERBS for flag in suggestions._options(LazyVerbs().get_command(None, verb))}
    for word, ours in suggestions._MEANT.items():
        assert word not in VERBS
        verb, *more = ours.split()
        flags = suggestions._options(LazyVerbs().get_command(None, verb))
        assert all(flag in flags for flag in more if flag.startswith("-")), ours
    assert set(suggestions._OPTIONS) <= options
    assert set(suggestions._PROVIDERS) == set(PROVIDERS) - {"fake"}


def test_no_word_is_promised_to_two_verbs() -> None:
    words = [word for each in suggestions._WORDS.values() for word in each.split()]
    assert len(words) == len(set(words))


def test_the_module_of_every_verb_is_there() -> None:
    assert all(importlib.util.find_spec(f"homing.cli.verbs.{verb}") for verb in VERBS)


def test_a_provider_in_the_place_of_a_run_is_answered_with_its_option(say: Say) -> None:
    assert fix_of(say("doctor runpod")) == "homing doctor --provider runpod"


def test_a_limit_that_is_no_sum_is_answered_with_one_that_is(say: Say) -> None:
    assert fix_of(say("limit moss '$5'")) == "homing limit moss --spend 5"
    assert fix_of(say("limit moss plenty")) == "homing limit moss --spend 20"


def test_a_provider_that_is_not_there_is_answered_where_it_was_named(say: Say) -> None:
    said = say("offers --provider runpd")
    assert "Did you mean runpod?" in said.err
    assert "--provider" in fix_of(said)


@pytest.mark.parametrize("verb", ["status", "watch", "fetch", "logs"])
def test_the_first_command_of_all_is_one_that_works(say: Say, verb: str) -> None:
    fix = fix_of(say(verb)).split("   ")[0]
    assert fix == "homing new first --from tiny"
    assert say(fix.removeprefix("homing ")).code == 0
    # From then on there is something to plan.
    assert fix_of(say(verb)).endswith("homing plan")


def test_a_smoke_run_is_not_warned_of_the_name_that_it_was_just_given(say: Say) -> None:
    assert say("new moss --from tiny").code == 0
    said = say("verify moss --smoke --no-run")
    assert "because it sets name:" not in said.err


def test_a_star_that_the_shell_spread_is_answered_with_its_quotes(say: Say, tmp_path: Path) -> None:
    (tmp_path / "my books").mkdir()
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / "my books" / name).write_text("Once upon a time.")
    said = say("new mine --from tiny --text 'my books/a.txt' 'my books/b.txt'")
    assert "--text takes one value, but got 2." in said.err
    assert fix_of(said) == "homing new mine --from tiny --text 'my books/*.txt'"
    said = say("new mine --text 'my books/a.txt' 'my books/c.md' --from tiny")  # not all files of the folder
    assert fix_of(said) == "homing new mine --text 'my books/a.txt' --text 'my books/c.md' --from tiny"
    assert say(fix_of(said).removeprefix("homing ")).code == 0
    said = say("destroy --yes 'my books/a.txt' 'my books/c.md'")  # which takes no word at all
    assert "got an unexpected argument: 'my books/c.md'" in said.err


def test_a_file_without_its_option_is_answered_with_it(say: Say, tmp_path: Path) -> None:
    (tmp_path / "my book.txt").write_text("Once upon a time.")
    (tmp_path / "chats.jsonl").write_text("{}")
    said = say("new mine --from tiny 'my book.txt'")
    assert "It takes NAME; pass text with --text." in said.err
    assert fix_of(said) == "homing new mine --from tiny --text 'my book.txt'"
    assert say(fix_of(said).removeprefix("homing ")).code == 0
    said = say("new tune --from hf:a/b chats.jsonl")
    assert fix_of(said) == "homing new tune --from hf:a/b --chat chats.jsonl"
    assert fix_of(say("new mine 'my book.txt' other.txt --from tiny")) == "homing new --help"


def test_other_words_for_a_server_suggest_serve(say: Say) -> None:
    said = say("openai moss")
    assert "In homing it is called serve." in said.err
    assert fix_of(said) == "homing serve moss"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("eval moss fern", "homing eval --compare moss fern"),
        ("eval moss fern --chat 'my chats.jsonl'", "homing eval --compare moss fern --chat 'my chats.jsonl'"),
        ("eval --at-most 9 moss fern", "homing eval --compare A B"),
        ("eval moss moss", "homing eval --compare moss moss"),
        ("eval moss moss --at-most 9", "homing eval --compare moss moss --at-most 9"),
    ],
)
def test_two_models_to_measure_are_answered_with_the_option_that_compares_them(say: Say, line: str, fix: str) -> None:
    assert fix_of(say(line)) == fix


def test_a_text_behind_the_model_to_measure_is_answered_with_its_option(say: Say, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once upon a time.")
    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "merged").mkdir()
    assert fix_of(say("eval moss book.txt")) == "homing eval moss --text book.txt"
    assert fix_of(say("eval moss chats.jsonl")) == "homing eval moss --chat chats.jsonl"
    assert fix_of(say("eval moss ./merged")) == "homing eval --compare moss ./merged"
