"""Errors for unknown verbs and options that suggest what the user probably meant. A suggestion is never run.

verb    an unknown verb: another tool's name for it, a typo, a run typed before the verb, a provider's name
usage   an unknown option or value: misspelled, typed before the verb, valid for another verb, or a run file key

The verb always accepts the suggested command line. Unknown options are left out of it, and the error lists them.
Only `homing help VERB`, `homing version` and `homing --help VERB` are answered directly, without an error.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homing.errors import UsageError
from homing.gpus import find_gpu

__all__ = ["usage", "verb"]

_PROVIDERS = ("aws", "local", "modal", "runpod", "shadeform", "ssh")

# Our verb -> other tools' verbs for it. Only names that users know from other tools, not every synonym; typos are
# handled separately.
_WORDS = {
    "runs": "list ls ps jobs queue show",
    "new": "init create",
    "new --list": "presets models recipes",
    "prep": "prepare preprocess tokenize tokenise tokenizer",
    "verify": "validate check test",
    "explain": "settings options",
    "plan": "cost costs price estimate preview dryrun dry-run",
    "offers": "gpus prices pricing machines instances catalog",
    "launch": "start up submit rent deploy go",
    "launch --resume": "resume continue restart",
    "train --phase sft": "sft",
    "train --phase pretrain": "pretrain",
    "train --phase rl": "rl grpo",
    "status": "info describe state",
    "watch": "follow monitor attach top progress",
    "logs": "log tail output",
    "stop": "cancel halt pause abort",
    "destroy": "kill rm remove delete down terminate teardown",
    "fetch": "pull get sync cp scp copy",
    "generate": "gen sample complete infer predict prompt",
    "chat": "talk ask speak",
    "serve": "server api openai webui",
    "eval": "evaluate benchmark bench score perplexity",
    "export": "convert merge",
    "export --to gguf": "gguf",
    "export --to gguf --type q8_0": "quantize quantise",
    "publish": "upload push share",
    "ledger": "bill bills billing spend spent receipt history usage invoice balance credits",
    "dashboard": "ui web gui browser board",
    "tensorboard": "plot curves graph tb metrics loss",
    "doctor": "keys key accounts diagnose health whoami env",
    "ssh": "shell exec connect",
    "report": "summary card",
    "quickstart": "demo tutorial example hello",
}
_MEANT = {word: ours for ours, words in _WORDS.items() for word in words.split()}
# Words that mean different verbs, depending on what follows them. `_answer` handles each.
_BY_CONTEXT = {
    "completion": "completions autocomplete install-completion",
    "config": "configuration edit",
    "download": "",
    "finetune": "fine-tune tune lora",
    "login": "auth configure signin",
    "run": "",
    "set": "unset",
}
_CONTEXT_OF = {word: first for first, others in _BY_CONTEXT.items() for word in (first, *others.split())}

# Our option -> the options that other tools use for it. Only options of the typed verb are suggested. Keys of the run
# file are found through the table of `homing explain`.
_OPTIONS = {
    "--spend-limit": "--limit --budget --max-cost --max-spend --max-price --cost --dollars",
    "--from": "--preset --template --base --model",
    "--text": "--data --input --file --corpus --train-path",
    "--validation": "--val --val-path --valid-path",
    "--val-fraction": "--val-ratio --val-split",
    "--name": "--experiment",
    "--json": "--format --output-format",
    "--gpu": "--gpu-type --card --accelerator",
    "--num-gpus": "--gpus --count",
    "--cloud": "--provider --backend",
    "--provider": "--cloud --backend",
    "--tokens": "--max-tokens --length --n-predict --max-new-tokens",
    "--temperature": "--temp -t",
    "--prompt": "--input --message -m",
    "--out": "--output -o --dir --output-dir --out-dir",
    "--to": "--output -o --out --dir --format --local-path --local-dir",
    "--yes": "--force -f --no-confirm --non-interactive",
    "--force": "--overwrite -f",
    "--dry-run": "--dryrun --plan",
    "--smoke": "--test --quick --debug",
    "--checkpoint": "--step --ckpt",
    "--follow": "--tail --watch",
    "--every": "--interval --poll",
}
# Our positional argument, by its name in the help -> the options that other tools use for it.
_WORDS_OF = {
    "KEY": "--key --remote-name --remote-path --name",
    "PATH": "--path --file --local-path --local-dir --to --out --output -o --dest",
}
# Our verbs that are options in other tools, such as deploy.py --destroy.
_AS_OPTION = ("destroy", "fetch", "logs", "status", "stop")
# Another tool's option with a certain value -> our option.
_BY_VALUE = {("--mode", "smoke"): "--smoke"}
# Other tools pass the run file as an option; here it is the argument after the verb.
_RUN_FILE = ("--config", "--config-path", "--config-file", "--run-file")
_EVERYWHERE = ("--help", "--quiet", "--verbose", "--version")

# Our subcommand of a group such as `homing store` -> other tools' names for it.
_INNER = {"get": "download pull cat", "ls": "list dir", "put": "upload push", "rm": "delete remove del"}


def verb(word: str, typed: list[str], verbs: Collection[str]) -> UsageError:
    """Return the error for a first word that is not a verb."""
    what, behind = f"Unknown verb: {word!r}.", typed[typed.index(word) + 1 :] if word in typed else []
    if word in _CONTEXT_OF:
        return UsageError(what, *_answer(_CONTEXT_OF[word], word, behind, typed))
    if word in _MEANT:
        fix = (
            "homing runs" if _MEANT[word] == "runs" and _takes_too_much(behind) else _retyped(word, _MEANT[word], typed)
        )
        return UsageError(what, f"In homing it is called {_MEANT[word]}.", fix)
    if word in _PROVIDERS:
        return UsageError(
            what, f"{word} is a provider.", f"homing setup {word}   List its offers: homing offers --provider {word}"
        )
    swapped = next((other for other in behind if other in verbs), None)
    if swapped is not None:
        rest = list(typed)
        rest.remove(swapped)
        return UsageError(what, f"The verb comes first: {swapped}.", f"homing {shlex.join([swapped, *rest])}")
    if _is_run(word):
        return UsageError(what, f"{word} is a run; the verb comes first.", f"homing plan {shlex.quote(word)}")
    near = difflib.get_close_matches(word, verbs, n=1) or difflib.get_close_matches(
        word, [*_MEANT, *_CONTEXT_OF], n=1, cutoff=0.8
    )
    if near and near[0] in _CONTEXT_OF:
        return UsageError(what, *_answer(_CONTEXT_OF[near[0]], word, behind, typed))
    if near:
        ours = _MEANT.get(near[0], near[0])
        return UsageError(what, f"Did you mean {ours}?", _retyped(word, ours, typed))
    return UsageError(what, "`homing --help` lists all verbs.", "homing --help")


def _takes_too_much(behind: list[str]) -> bool:
    """Return whether a RUN follows. `homing runs` lists all runs and takes none."""
    return any(not word.startswith("-") for word in behind)


def _answer(meant: str, word: str, behind: list[str], typed: list[str]) -> tuple[str, str]:
    """Return why a word of `_BY_CONTEXT` is not a verb, and the command for what follows it."""
    plain = [each for each in behind if not each.startswith("-")]
    first = plain[0] if plain else ""
    run = shlex.quote(first) if first and "=" not in first else "RUN"
    if meant == "completion":
        return "Shell completion is an option of homing.", "homing --install-completion"
    if meant == "login":
        provider = next((each for each in plain if each in _PROVIDERS), "runpod")
        others = "" if plain else "   or: shadeform, aws, modal"
        why = "homing has no account of its own. `homing setup` stores a provider's API key and checks it."
        return why, f"homing setup {provider}{others}"
    if meant == "set":
        key = next((each for each in behind if "=" in each), "KEY=VALUE")
        run = next((shlex.quote(each) for each in plain if "=" not in each and _is_run(each)), "RUN")
        why = "To change a key for good, edit runs/NAME.yaml. To change it for one command, add --set."
        return why, f"homing plan {run} --set {shlex.quote(key)}   Describe all keys: homing explain"
    if meant == "config":
        if first and _is_run(first):
            return f"The settings of {first} are in runs/{first}.yaml.", f"homing plan {run} --resolved"
        return (
            "The settings of a run are in its run file, runs/NAME.yaml.",
            "homing explain   Show a run's: homing plan RUN --resolved",
        )
    if meant == "download" and first.startswith("hf:"):
        why = "homing downloads open weights when a run needs them. A run file names them."
        return why, f"homing new tune --from {run} --chat YOUR_CHATS.jsonl"
    if meant == "download":
        return "In homing it is called fetch.", _retyped(word, "fetch", typed)
    if meant == "finetune":
        if first and _is_run(first):
            why = "Fine-tuning is a phase of kind sft in the run file."
            return (
                why,
                f"{_retyped(word, 'train --phase sft', typed)}   On a rented GPU: homing launch {run} --phase sft",
            )
        weights = shlex.quote(first) if first.startswith("hf:") else "hf:OWNER/NAME"
        chats = shlex.quote(next((each for each in plain if _is_chat(each, [])), "YOUR_CHATS.jsonl"))
        return "Fine-tuning starts with a run file.", f"homing new tune --from {weights} --chat {chats}"
    launched = _retyped(word, "launch", typed)
    if "--spend-limit" in " ".join(behind):
        return "In homing it is called launch.", launched
    return (
        "`launch` rents a GPU, and `train` uses this computer.",
        f"{launched}   Here: {_retyped(word, 'train', typed)}",
    )


def usage(error: Any, typed: list[str], verbs: Collection[str], load: Callable[[str], Any]) -> UsageError:
    """Return our error for a command line that click rejected; `load` returns a verb's click command."""
    name = next((word for word in typed if word in verbs), "")
    path = getattr(error.ctx, "command_path", "") or "homing"
    path = path if " " in path else f"homing {name}".strip()
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _option(error, path, name, typed, verbs, load)
    if kind == "MissingParameter":
        missing = _shown(error.param)
        which = "   List runs: homing runs" if missing == "RUN" else ""
        return UsageError(f"`{path}` needs {missing}.", _about(error.param), f"{_line(typed)} {missing}{which}")
    if kind == "BadParameter" and error.param is not None:
        return UsageError(f"{_shown(error.param)}: {_plain(error.message)}.", _about(error.param), f"{path} --help")
    if error.message.startswith("Got unexpected extra argument"):
        if (spread := _spread_by_the_shell(typed, error.ctx.command.params)) is not None:
            return spread
        return _extra(error, path, typed)
    if error.message.startswith("No such command"):
        return _inner(error, path, typed)
    if kind == "BadOptionUsage" and error.option_name == "--compare":
        return UsageError(what=error.format_message(), fix=f"{path} --compare A B")
    return UsageError(what=error.format_message(), fix=f"{path} --help")


def _extra(error: Any, path: str, typed: list[str]) -> UsageError:
    """Return the error for an extra argument, such as a file without its option: `homing new my --from tiny a.txt`."""
    extra = error.message.partition("(s) ")[2].strip("()")
    what = f"`{path}` got an unexpected argument: {extra!r}."
    taken = " ".join(_shown(each) for each in error.ctx.command.params if not each.opts[0].startswith("-"))
    own = _options(error.ctx.command)
    is_model = "--compare" in own and not Path(extra).is_file()  # a folder may be a model or text: assume a model
    if "--text" in own and extra in typed and Path(extra).exists() and not is_model:
        flag = "--chat" if "--chat" in own and _is_chat(extra, typed) else "--text"
        place = typed.index(extra)
        why = f"It takes {taken}; pass {'conversations' if flag == '--chat' else 'text'} with {flag}."
        return UsageError(what, why, _line([*typed[:place], flag, *typed[place:]]))
    if is_model and extra in typed[1:]:  # `homing eval A B`
        place = len(typed) - 1 - typed[::-1].index(extra)
        others = [*typed[1:place], *typed[place + 1 :]]
        is_plain = bool(others) and not others[0].startswith("-")
        both = _line([typed[0], "--compare", others[0], extra, *others[1:]]) if is_plain else f"{path} --compare A B"
        return UsageError(what, "It takes one RUN; use --compare A B for two.", both)
    if extra in _PROVIDERS and (named := _by_option(("--provider", "--cloud"), "cloud.provider", extra, own, typed)):
        return UsageError(what, f"{extra} is a provider.", named)
    if find_gpu(extra) is not None and (named := _by_option(("--gpu",), "cloud.gpu", extra, own, typed)):
        return UsageError(what, f"{extra} is a GPU.", named)
    return UsageError(what, f"It takes {taken}." if taken else "It takes options only.", f"{path} --help")


def _by_option(flags: Iterable[str], key: str, word: str, own: Collection[str], typed: list[str]) -> str:
    """Return the command line with this word moved to its option, or to --set; "" if the verb has neither."""
    flag = next((each for each in flags if each in own), "")
    if word not in typed or not (flag or "--set" in own):
        return ""
    place = typed.index(word)
    named = [flag, word] if flag else ["--set", f"{key}={word}"]
    return _line([*typed[:place], *named, *typed[place + 1 :]])


def _is_chat(file: str, typed: list[str]) -> bool:
    """Return whether the file probably contains conversations. With a preset, files of any format count as text."""
    from homing.api.data.new_run_data import is_open_weights

    begins_with = typed[typed.index("--from") + 1] if "--from" in typed[:-1] else ""
    return file.endswith((".jsonl", ".json")) and (not begins_with or is_open_weights(begins_with))


def _spread_by_the_shell(typed: list[str], params: Iterable[Any]) -> UsageError | None:
    """Return the error for an unquoted glob such as `--text books/*.txt`, which the shell expands to many arguments."""
    takes_a_word = {name for each in params if not getattr(each, "is_flag", False) for name in each.opts}
    place = next((n for n, word in enumerate(typed) if word in takes_a_word and n + 2 < len(typed)
                  and all(Path(each).exists() for each in typed[n + 1 : n + 3])), None)  # fmt: skip
    if place is None:
        return None
    behind = typed[place + 1 :]
    files = list(itertools.takewhile(lambda word: Path(word).exists(), behind))
    first, each_by_itself = Path(files[0]), [word for file in files for word in (typed[place], file)][1:]
    patterns = [str(first.parent / f"*{first.suffix}"), str(first.parent / "*")]
    meant = next((each for each in patterns if sorted(glob.glob(each)) == sorted(files)), None)
    replacement = [meant] if meant else each_by_itself
    return UsageError(
        what=f"{typed[place]} takes one value, but got {len(files)}.",
        why="Your shell expanded the *; put the pattern in quotes.",
        fix=_line([*typed[: place + 1], *replacement, *behind[len(files) :]]),
    )


def _inner(error: Any, path: str, typed: list[str]) -> UsageError:
    """Return the error for an unknown subcommand: `homing data chek`."""
    there, wrong = list(error.ctx.command.commands), error.message.split("'")[1]
    what = f"`{path}` has no verb {wrong!r}."
    if ours := next((each for each, words in _INNER.items() if each in there and wrong in words.split()), None):
        return UsageError(what, f"In homing it is called {ours}.", _retyped(wrong, ours, typed))
    near = difflib.get_close_matches(wrong, there, n=1)
    return UsageError(
        what=what,
        why=f"Available: {', '.join(there)}.",
        fix=_retyped(wrong, near[0], typed) if near else f"{path} --help",
    )


def _option(
    error: Any, path: str, name: str, typed: list[str], verbs: Collection[str], load: Callable[[str], Any]
) -> UsageError:
    wrong = error.option_name
    if error.ctx.parent is None:
        return _in_front(wrong, name, typed, load)
    command = error.ctx.command
    own, what = _options(command), f"`{path}` has no option {wrong}."
    again = _corrected(typed, path, command)
    fix = _line(again.words) if again.words else f"{path} --help"
    left_out = f" Dropped, because homing has no such option: {', '.join(again.left_out)}." if again.left_out else ""
    if wrong in _RUN_FILE and _takes_run(command):
        return UsageError(what, f"The run or run file is an argument after the verb.{left_out}", fix)
    if other := next((each for each in _unknown(typed, own) if each.lstrip("-") in _AS_OPTION), None):
        names_run = [word for word in again.words[len(path.split()) - 1 :] if not word.startswith("-")][:1]
        return UsageError(what, f"{other.lstrip('-')} is a verb.", _line([other.lstrip("-"), *names_run]))
    near = _elsewhere(wrong, own) or _by_value(wrong, typed, own)
    if near is None and (word := _word_of(wrong, command)):
        return UsageError(what, f"{word} is an argument after the verb, not an option.{left_out}", fix)
    if near is None and "--set" in own and (found := _key(wrong, _value_of(wrong, typed)))[0]:
        if name == "train" and found[0].startswith(("cloud.", "limits.")):
            return UsageError(what, "`train` runs on this computer and rents nothing.", "homing launch --help")
        keys = again.keys or [" ".join(part for part in found if part)]
        explanation = (
            f"It is a key of the run file: {keys[0]}."
            if len(keys) == 1
            else f"Keys of the run file: {'; '.join(keys)}."
        )
        return UsageError(what, f"{explanation} --set overrides any key for one command.{left_out}", fix)
    # Do not treat --set as a misspelling of an option such as --list or --seed.
    if near := near or (None if wrong == "--set" else _spelled_like(wrong, own)):
        return UsageError(what, f"Did you mean {near}? {_about(own[near])}".rstrip() + left_out, fix)
    if again.words and again.has_ours:
        return UsageError(what, left_out.strip(), fix)
    if others := _verbs_with(wrong, verbs, load):
        return UsageError(what, f"It is an option of: {', '.join(others)}.", f"homing {others[0]} --help")
    return UsageError(what, f"Available options: {', '.join(own)}.", f"{path} --help")


def _elsewhere(wrong: str, own: Collection[str]) -> str | None:
    """Return the verb's option that other tools call `wrong`, or None."""
    return next((each for each, others in _OPTIONS.items() if each in own and wrong in others.split()), None)


def _spelled_like(wrong: str, own: Collection[str]) -> str | None:
    # Compare the names without the dashes, which would make --step look like --set and --mode like --smoke.
    bare = {each.lstrip("-"): each for each in own}
    return bare.get(next(iter(difflib.get_close_matches(wrong.lstrip("-"), list(bare), n=1, cutoff=0.75)), ""))


def _by_value(wrong: str, typed: list[str], own: Collection[str]) -> str | None:
    ours = _BY_VALUE.get((wrong, _value_of(wrong, typed)))
    return ours if ours in own else None


def _value_of(option: str, typed: list[str]) -> str:
    """Return the value given to the option, as in `--mode smoke` or `--mode=smoke`; "" if none was given."""
    for place, word in enumerate(typed):
        name, equals, value = word.partition("=")
        if name == option:
            behind = typed[place + 1] if place + 1 < len(typed) else ""
            return value if equals else "" if behind.startswith("-") else behind
    return ""


def _word_of(wrong: str, command: Any) -> str:
    """Return KEY or PATH if the verb has that argument and other tools use this option for it; else ""."""
    taken = [_shown(each) for each in command.params if not each.opts[0].startswith("-")]
    return next((word for word, others in _WORDS_OF.items() if word in taken and wrong in others.split()), "")


def _unknown(typed: list[str], own: Collection[str]) -> list[str]:
    options = [word.partition("=")[0] for word in typed if word.startswith("--") and not _is_ours(word, own)]
    return [each for each in options if not _elsewhere(each, own)]


def _is_ours(word: str, own: Collection[str]) -> bool:
    name = word.partition("=")[0]
    return name in own or name in _EVERYWHERE


def _in_front(wrong: str, name: str, typed: list[str], load: Callable[[str], Any]) -> UsageError:
    """Return the error for an option before the verb, suggesting a command line with the option after it."""
    if not name:
        near = difflib.get_close_matches(wrong, ["--help", "--version", "--json", "--quiet", "--verbose"], n=1)
        why = f"Did you mean {near[0]}?" if near else "Options come after the verb: homing VERB [RUN] [OPTIONS]."
        return UsageError(f"`homing` has no option {wrong}.", why, f"homing {near[0] if near else '--help'}")
    cut, own = typed.index(name), _options(load(name))
    again = [name, *typed[cut + 1 :], *typed[:cut]]
    meant = None if wrong in own else _elsewhere(wrong, own) or _spelled_like(wrong, own)
    return UsageError(
        what=f"{wrong} must come after the verb.",
        why="The verb comes first, then its options: homing VERB [RUN] [OPTIONS].",
        fix=_retyped(wrong, meant, again) if meant else _line(again),
    )


@dataclass(frozen=True)
class _Corrected:
    words: list[str]  # a command line that the verb accepts; empty if none was found
    left_out: list[str]
    keys: list[str]  # run file keys that replace unknown options, each with a remark
    has_ours: bool  # whether at least one unknown option was translated


def _corrected(typed: list[str], path: str, command: Any) -> _Corrected:
    """Rewrite the command line, translating unknown options into options of the verb.

    Options that cannot be translated are left out.
    """
    own, said, rest = _options(command), list[str](), list(typed)
    left_out, keys, by_word = list[str](), list[str](), dict[str, str]()
    while rest:
        word = rest.pop(0)
        wrong, equals, value = word.partition("=")
        if not wrong.startswith("--") or _is_ours(word, own):
            said.append(word)
            continue
        if not equals and rest and not rest[0].startswith("-") and not _is_run(rest[0]):
            value = rest.pop(0)
        if wrong in _RUN_FILE and _takes_run(command):
            said += [value] if value else []
        elif (near := _elsewhere(wrong, own) or _by_value(wrong, [wrong, value], own)) or (
            not (_word_of(wrong, command) or _key_of(wrong, value, own)[0]) and (near := _spelled_like(wrong, own))
        ):
            # the other tool's option may take a value even if ours does not: --format json
            takes_none = getattr(own[near], "is_flag", False)
            behind = [] if not value or (takes_none and (equals or near in ("--json", "--smoke"))) else [value]
            said += [f"{near}={value}"] if equals and behind else [near, *behind]
        elif named := _word_of(wrong, command):
            by_word[named] = value
        elif (found := _key_of(wrong, value, own))[0]:
            # A remark means that the key differs slightly from the option, so the option's value is not used.
            said += ["--set", f"{found[0]}={'VALUE' if found[1] or not value else value}"]
            keys.append(" ".join(part for part in found if part))
        else:
            left_out.append(word if equals or not value else f"{wrong} {value}")
    said += [by_word[_shown(each)] for each in command.params if _shown(each) in by_word]
    num_wrong = sum(1 for word in typed if word.startswith("--") and not _is_ours(word, own))
    has_ours = num_wrong > len(left_out)
    return _Corrected(said if _is_taken(said, path, command) else [], left_out, keys, has_ours)


def _is_taken(words: list[str], path: str, command: Any) -> bool:
    """Return whether the verb accepts this command line, ignoring invalid values."""
    rest = list(words)
    for part in path.split()[1:]:
        if part in rest:
            rest.remove(part)
    rest = [word for word in rest if word not in ("-q", "-v", "--quiet", "--verbose")]
    try:
        with command.make_context(path, rest):
            return True
    except Exception as exc:  # a click error, recognized by its name because click is not imported here
        return type(exc).__name__ == "BadParameter"


def _key_of(wrong: str, value: str, own: Collection[str]) -> tuple[str, str]:
    return _key(wrong, value) if "--set" in own else ("", "")


def _takes_run(command: Any) -> bool:
    return any(_shown(each) == "RUN" for each in command.params)


def _is_run(word: str) -> bool:
    return "/" not in word and any(Path("runs").glob(f"{_literal(word)}.*"))


def _key(option: str, value: str = "") -> tuple[str, str]:
    """Return the run file key to which an option such as --learning-rate or --depth refers, and a remark on the key.

    Both are empty if no key matches or the key does not allow this value: --split train does not mean tokenizer.split.
    """
    # Imported only after a mistake, because loading the schema takes a tenth of a second.
    from homing.config.parse.key_suggestions import FOREIGN
    from homing.config.schema.keys import all_keys, find_keys

    plain = option.lstrip("-").replace("-", "_").lower()
    ours, _, about = FOREIGN.get(plain, "").partition(" ")
    ours = ours or next((key.path for key in find_keys(plain)), "")
    if ours not in all_keys() or (value and not about and not _could_be(ours, value)):
        return "", ""
    return ours.replace(".N", ".0"), about.replace(".N", ".0")


def _could_be(key: str, value: str) -> bool:
    """Return False if the key allows only a fixed set of values that does not include this one."""
    from homing.config.schema.keys import all_keys

    kind = all_keys()[key].kind
    return not kind.startswith("one of ") or value.lower() in kind.removeprefix("one of ").split(", ")


def _verbs_with(option: str, verbs: Iterable[str], load: Callable[[str], Any]) -> list[str]:
    found = []
    for name in verbs:
        command = load(name)
        inner = getattr(command, "commands", None)
        here = {f"{name} {each}": sub for each, sub in inner.items()} if inner else {name: command}
        found += [path for path, each in here.items() if option in _options(each)]
    return found


def _options(command: Any) -> dict[str, Any]:
    return {flag: each for each in command.params for flag in each.opts if flag.startswith("-")}


def _shown(parameter: Any) -> str:
    """Return the parameter as the help shows it: --tokens, RUN."""
    flag = str(parameter.opts[0])
    return flag if flag.startswith("-") else str(parameter.metavar or flag.upper())


def _about(parameter: Any) -> str:
    return getattr(parameter, "help", None) or ""


def _plain(message: str) -> str:
    """Rewrite the validator's message in our style, leaving out the word `Input` and remarks about parsing."""
    kinds = {"a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false"}
    said = message.partition(", unable to parse")[0].replace("Input should be", "it must be")
    for upstream, ours in kinds.items():
        said = said.replace(upstream, ours)
    return said.rstrip(".")


def _literal(word: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in word)


def _line(typed: list[str]) -> str:
    return f"homing {shlex.join(typed)}"


def _retyped(wrong: str, right: str, typed: list[str]) -> str:
    """Return the whole command line with the wrong word corrected."""
    if wrong in typed:
        place = typed.index(wrong)
        first, *options = right.split(" ")
        return _line([*typed[:place], first, *typed[place + 1 :], *options])
    # The wrong word may be an option with a value attached, as in --mode=smoke.
    whole = next((word for word in typed if word.partition("=")[0] == wrong), None)
    return _line([right + word[len(wrong) :] if word == whole else word for word in typed]) if whole else _line([right])
