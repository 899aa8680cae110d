"""Output of `homing prep`: progress during the work, and a report at the end.

With a run file, the report is only a few lines long, because the rest is in that file. Without a run file, or with -v,
the full report is printed, as in the CS336 course. If there was nothing to do, the report is a single line. With -q,
nothing is printed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from homing import progress as work
from homing.cli import output
from homing.units import counted, format_count, format_duration

if TYPE_CHECKING:
    from homing.lm.data.prep import Progress

__all__ = ["Meter", "print_report"]

_RULE = "=" * 80
_SIDES = {"train": "to train on", "val": "held out"}
_STAGES = {
    "scan": "reading the text",
    "train": "reading the text, counting words",
    "merge": "learning merges",
    "encode": "encoding",
    "publish": "moving shards into place",
}
_TERMINAL_EVERY_S = 0.2
_OTHERWISE_EVERY_S = 30.0


_LONG_S = 600.0


class Meter:
    """Show progress on stderr: a bar on a terminal (`homing.cli.run_verb`), otherwise an occasional line."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._begin()

    def _begin(self) -> None:
        """Reset the state before the next data set is prepared: the run's text, or one phase's data."""
        self._shown_at = time.monotonic()
        self._stage = ""
        self._has_advised = False

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def show(self, progress: Progress | None) -> None:
        if progress is None:
            self._clear()
            self._begin()
            return
        if progress.warning:
            self._clear()
            output.say(f"warning: {progress.warning}")
            return
        if progress.note:
            self._clear()
            output.say(f"Note: {progress.note}")
            return
        if progress.stage == "resumed":
            output.say("Resuming where the previous `homing prep` stopped.")
        if progress.stage not in _STAGES:
            return
        now = time.monotonic()
        is_new = progress.stage != self._stage
        self._stage = progress.stage
        every_s = _TERMINAL_EVERY_S if self._is_terminal else _OTHERWISE_EVERY_S
        if now - self._shown_at >= every_s or (is_new and self._is_terminal) or progress.stage == "merge":
            self._shown_at = now
            self._print(progress)
            self._advise(progress)

    def _advise(self, progress: Progress) -> None:
        """If the preparation will take long, print once how to speed it up."""
        if progress.eta_s is not None and progress.eta_s > _LONG_S and not self._has_advised:
            self._has_advised = True
            self._clear()
            chosen = (
                ""
                if progress.is_tokenizer_given
                else "fewer entries (tokenizer.vocab_size), a smaller tokenizer.sample, "
            )
            output.say(
                f"This will take a while. To speed it up, use {chosen}more memory and cores, or only part of the text"
                " for now (--take 100MB). You can stop at any time; run the same command to continue."
            )

    def _print(self, progress: Progress) -> None:
        if not self._is_terminal:
            output.say(" | ".join([_STAGES[progress.stage], *_parts(progress)]))
            return
        total = 0 if progress.stage == "merge" else progress.total_bytes
        stage = _STAGES[progress.stage].capitalize()
        work.report(stage, progress.done_bytes, total or 0, detail=" | ".join(_parts(progress)))

    def _clear(self) -> None:
        work.finished()


def _parts(progress: Progress) -> list[str]:
    parts = []
    if progress.total_bytes and progress.stage != "merge":
        parts.append(f"{progress.done_bytes / 1e6:,.0f} of {progress.total_bytes / 1e6:,.0f} MB")
    if progress.num_tokens:
        parts.append(f"{format_count(progress.num_tokens)} tokens")
    if progress.eta_s is not None:
        parts.append(f"eta {format_duration(progress.eta_s)}")
    return parts


def print_report(result: dict[str, Any], *, is_run: bool) -> None:
    """Print the report. If `is_run`, the report is short, because the run file already says what was requested."""
    if output.is_quiet():
        return
    if result["is_reused"] and not output.is_verbose():
        _unchanged(result)
    elif is_run and not output.is_verbose():
        _short_report(result)
    else:
        _tokenizer(result)
        _tokens(result, "train", "Tokenizing Training Data", result["text"])
        _tokens(result, "val", "Tokenizing Validation Data", result["validation"])
        print(f"\nOne epoch is {result['splits']['train']['num_tokens']:,} tokens.")
        _budget(result)
        print(f"✓ Done in {format_duration(result['elapsed_s'])}.")


def _unchanged(result: dict[str, Any]) -> None:
    counts = [f"{split['num_tokens']:,} tokens {_SIDES[name]}{_share(result, name)}" for name, split in _splits(result)]
    print(f"Already up to date: {', '.join(counts)}, vocabulary {result['vocab_size']:,}, in {_short(result['dir'])}/")


def _short_report(result: dict[str, Any]) -> None:
    is_trained = result["is_tokenizer_trained"]
    source = f"trained on {', '.join(result['text'])}" if is_trained else _short(result["tokenizer"])
    print(f"Tokenizer: vocabulary {result['vocab_size']:,}, {_shown(result['num_merges'])} merges; {source}")
    for name, split in _splits(result):
        print(
            f"{split['num_tokens']:,} tokens {_SIDES[name]}{_share(result, name)}:"
            f" {split['num_text_bytes'] / 1e6:.2f} MB of text in"
            f" {_counted(result, split)}, {split['bytes_per_token']:.2f} bytes per token"
        )
    num_bytes = sum(split["num_bytes"] for _, split in _splits(result))
    print(f"✓ Saved to {_short(result['dir'])}/ ({num_bytes / 1e6:.2f} MB) in {format_duration(result['elapsed_s'])}")
    _budget(result)


def _share(result: dict[str, Any], name: str) -> str:
    return f" ({100 * result['val_share']:.1f}%)" if name == "val" else ""


def _splits(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, split) for name, split in result["splits"].items() if split["num_documents"]]


def _counted(result: dict[str, Any], split: dict[str, Any]) -> str:
    """Return the number of documents, called passages if long documents were cut into them."""
    return counted(split["num_documents"], "passage" if result["is_cut"] else "document")


def _shown(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _tokenizer(result: dict[str, Any]) -> None:
    is_trained = result["is_tokenizer_trained"]
    _title("Training BPE Tokenizer" if is_trained else "Using an Existing Tokenizer")
    print(f"Training data: {', '.join(result['text'])}" if is_trained else f"Tokenizer: {result['tokenizer']}")
    print(f"Vocab size: {result['vocab_size']}")
    specials = result["specials"]
    shown = str(specials) if len(specials) <= 4 else f"{specials[:3]} and {len(specials) - 3} more"
    print(f"Special tokens: {shown}\n")
    if is_trained:
        print(
            "✓ Training complete!" if not result["is_reused"] else "✓ Already trained with the same text and settings."
        )
    print(f"  Vocabulary size: {result['vocab_size']}")
    print(f"  Number of merges: {result['num_merges']}\n")
    print(f"✓ Tokenizer saved to {_short(result['dir'])}/")
    for name in result["tokenizer_files"]:
        print(f"  - {name}")


def _tokens(result: dict[str, Any], name: str, title: str, paths: list[str]) -> None:
    split = result["splits"].get(name)
    if not split or not split["num_documents"]:
        return
    print()
    _title(title)
    if paths:
        print(f"Tokenizing {', '.join(paths)}...")
        print(f"File size: {split['num_file_bytes'] / 1e6:.2f} MB")
    else:
        print("Held out by the hash of each document or passage.")
    print(f"Text: {split['num_text_bytes'] / 1e6:.2f} MB in {_counted(result, split)}")
    print("✓ Tokenization complete!")
    print(f"  Total tokens: {split['num_tokens']:,}{_share(result, name)}")
    print(f"✓ Saved to {_short(result['dir'])}/{_range(split['shards'])}")
    print(f"  Output size: {split['num_bytes'] / 1e6:.2f} MB")
    print(f"  Compression ratio: {split['compression_ratio']:.2f}x")
    print(f"  Bytes per token: {split['bytes_per_token']:.2f}")


def _budget(result: dict[str, Any]) -> None:
    for phase in result.get("phases", []):
        epochs = f"{phase['epochs']:.2f} epochs" if phase["epochs"] is not None else "epochs unknown"
        print(
            f"  {phase['phase']}: {phase['num_steps']:,} steps of {phase['batch_tokens']:,} tokens"
            f" = {phase['num_tokens']:,} tokens = {epochs}"
        )


def _title(text: str) -> None:
    print(f"{_RULE}\n{text}\n{_RULE}")


def _range(shards: list[str]) -> str:
    return shards[0] if len(shards) == 1 else f"{shards[0]} to {shards[-1]} ({len(shards)} shards)"


def _short(folder: str) -> str:
    """Return the path relative to the working directory if the folder is inside it; otherwise return it unchanged."""
    try:
        return str(Path(folder).relative_to(Path.cwd()))
    except ValueError:
        return folder
