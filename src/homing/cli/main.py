"""The command line begins here: the one list of verbs, and `main`, which loads what it needs to call one.

    main -> Ctrl-C is quiet from here on -> cli/call.py (typer) -> the verb's module -> exit code
    main --help -> the table of verbs, by nothing but this module

A verb is one module `homing/cli/VERB.py` with a function `command` (or a typer app `app` for a group such as `store`).
It parses, calls the library and prints; the library never prompts, prints or exits.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

__all__ = ["HELP", "STORIES", "VERBS", "main", "verb_table"]

HELP = ("--help", "-h")

# One list of verbs: story -> verb -> what it does. A verb is listed when it works, not before.
STORIES: dict[str, dict[str, str]] = {
    "Start here": {
        "quickstart": "The whole trip on this computer, in minutes, with no account anywhere.",
        "new": "Write a run file from a preset.",
        "explain": "What a key of the run file means.",
    },
    "The way of the data": {
        "prep": "Text to tokenizer to token shards.",
        "data": "Chat data: check every line, show what is learned from.",
        "verify": "Build the model, count it, take one step, check what it needs.",
        "train": "Train here, with the same trainer that runs on a rented machine.",
        "generate": "Complete a prompt with a trained model.",
        "chat": "Talk to a trained model.",
        "serve": "The same for programs, as OpenAI's API, and for people, as a page.",
        "export": "Safetensors or GGUF for transformers, peft and llama.cpp, checked before it is called done.",
        "publish": "An export to the Hugging Face Hub, private unless told otherwise.",
        "eval": "How good a model is, with intervals; of two, whether one is better.",
    },
    "The life of a run": {
        "plan": "Hours and dollars per offer, cheapest to finish first.",
        "offers": "What every provider would rent now, lowest rate first.",
        "launch": "Rent, boot, train, push, end billing.",
        "status": "One run, now.",
        "watch": "Steps, loss, speed, samples and dollars, as they come.",
        "logs": "What trainer and agent wrote.",
        "ssh": "A shell on the run's instance.",
        "forward": "A port of the run's instance, here.",
        "limit": "Change the limit of a live run, everywhere it is guarded.",
        "stop": "End training at the next step, with a checkpoint.",
        "fetch": "Bring the model home, verified by hash.",
        "destroy": "End billing, confirmed by the provider.",
    },
    "Safety": {
        "guard": "End what reached its limit, go on with what was taken away; for cron and servers.",
        "runs": "Every run, and whatever may still cost money.",
        "ledger": "Every instance ever asked for, with its dollars.",
        "reconcile": "Everything that carries our mark, anywhere, against the ledger.",
        "adopt": "Go on with a run from another machine.",
        "rehearse": "The whole trip on a fake cloud, with faults on the way, for nothing.",
    },
    "Around": {
        "store": "Look into a store; get, put, remove.",
        "dashboard": "All runs and what bills, live in the browser; it only shows.",
        "tensorboard": "A run's curves in TensorBoard, live or after the end.",
        "report": "One page about a run: what, on what, how it went, samples, cost.",
        "image": "A container image with all that training needs, by your own Docker.",
        "setup": "The first-time steps of a provider; safe to repeat.",
        "doctor": "Keys, clients, disk, clock, store: what would go wrong, each with its fix.",
    },
}
VERBS = {verb: text for story in STORIES.values() for verb, text in story.items()}


def main() -> None:
    # Importing takes longer than a person who has just seen a typing error, and KeyboardInterrupt in the middle of it
    # is a traceback at best, swallowed at worst. Nothing is begun yet, so there is nothing to undo.
    _open_closed()
    is_ours = _may_interrupt()
    if is_ours:
        signal.signal(signal.SIGINT, _end_now)
    if len(sys.argv) == 2 and sys.argv[1] in HELP and _is_help_printed():
        sys.exit(0)
    from homing.cli.call import call

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Taking torch down may last longer than the verb did; all is said by then.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    sys.exit(call(sys.argv[1:]))


def verb_table() -> str:
    """What `homing --help` prints."""
    import homing

    lines = [
        f"homing {homing.__version__}: raw text out, a trained model home, inside a money limit.\n",
        "Usage: homing VERB [RUN] [OPTIONS]        homing VERB --help tells the options of a verb",
    ]
    for story, verbs in STORIES.items():
        lines += ["", story, *(f"  {verb:<11} {text}" for verb, text in verbs.items())]
    return "\n".join(
        [
            *lines,
            "",
            "Everywhere: --json  -q, --quiet  -v, --verbose  -h, --help  -V, --version",
            "Completion of verbs, run names and keys in your shell: homing --install-completion",
            "",
        ]
    )


def _is_help_printed() -> bool:
    """Without the parser: loading it takes longer than all the rest of this."""
    try:
        print(verb_table(), end="", flush=True)
    except OSError:  # a reader that left, a full disk: `call` tells it, as after every verb
        return False
    return True


def _open_closed() -> None:
    """`homing ... <&- >&-`, as some schedulers start programs: Python has None there, and every verb would stumble."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open for as long as the program


def _may_interrupt() -> bool:
    """Where Ctrl-C would raise KeyboardInterrupt. One that is ignored (nohup) or somebody else's stays as it is."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not the main thread, and only that one may
        return False
    return True


def _end_now(number: int, frame: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
