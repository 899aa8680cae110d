"""The list of all verbs, and the table that `homing --help` prints. Importing it loads no parser and no verb."""

from __future__ import annotations

import homing

__all__ = ["HELP", "STORIES", "VERBS", "verb_table"]

HELP = ("--help", "-h")

# Section of the help -> verb -> its description. A verb is added only once it works.
STORIES: dict[str, dict[str, str]] = {
    "Get started": {
        "quickstart": "Train, evaluate and chat with a small model locally in minutes; no account needed.",
        "new": "Write a run file from a preset.",
        "explain": "Explain a key of the run file.",
    },
    "Data and models": {
        "prep": "Turn text into a tokenizer and token shards.",
        "data": "Check chat data and show which tokens the model learns from.",
        "verify": "Build the model, run one training step and check its requirements.",
        "train": "Train locally, with the same trainer that runs on a rented instance.",
        "generate": "Complete a prompt with a trained model.",
        "chat": "Chat with a trained model.",
        "serve": "Serve a trained model: an OpenAI-compatible API and a chat page.",
        "export": "Export and verify safetensors or GGUF for transformers, peft and llama.cpp.",
        "publish": "Upload an export to the Hugging Face Hub; private by default.",
        "eval": "Evaluate a model with confidence intervals, or compare two models.",
    },
    "Cloud runs": {
        "plan": "Show hours and dollars per offer, cheapest to finish first.",
        "offers": "List what you can rent now at every provider, lowest rate first.",
        "launch": "Rent an instance, train, push the model and end billing.",
        "status": "Show the current state of a run.",
        "watch": "Follow steps, loss, speed, samples and dollars live.",
        "logs": "Show the logs of the trainer and the agent.",
        "ssh": "Open a shell on the run's instance.",
        "forward": "Forward a port of the run's instance to this computer.",
        "limit": "Change the limits of a live run.",
        "stop": "Save a checkpoint and end training at the next step.",
        "fetch": "Download the model and verify its hashes.",
        "destroy": "Destroy a run's instances; the provider confirms the end of billing.",
    },
    "Safety": {
        "guard": "Enforce limits and resume preempted runs; for cron and servers.",
        "runs": "List all runs and everything that may still be billing.",
        "ledger": "List every instance ever requested and what it cost.",
        "reconcile": "Compare the ledger with everything homing created at any provider.",
        "adopt": "Take over a run that was launched from another computer.",
        "rehearse": "Rehearse a launch on a simulated cloud with injected faults; free.",
    },
    "Tools": {
        "store": "List, get, put and remove files in a store.",
        "dashboard": "Show all runs and their billing live in the browser; read-only.",
        "tensorboard": "Open the curves of a live or finished run in TensorBoard.",
        "report": "Write a one-page report of a run: setup, results, samples, cost.",
        "image": "Build a container image for training, with your local Docker.",
        "setup": "Run a provider's first-time setup; safe to repeat.",
        "doctor": "Check keys, clients, disk, clock and store, with a fix for each problem.",
    },
}
VERBS = {verb: text for story in STORIES.values() for verb, text in story.items()}


def verb_table() -> str:
    """Return the text that `homing --help` prints."""
    lines = [
        f"homing {homing.__version__}: train language models on rented GPUs within a spend limit.\n",
        "Usage: homing VERB [RUN] [OPTIONS]        homing VERB --help lists a verb's options",
    ]
    for story, verbs in STORIES.items():
        lines += ["", story, *(f"  {verb:<11} {text}" for verb, text in verbs.items())]
    return "\n".join(
        [
            *lines,
            "",
            "Options of every verb: --json  -q, --quiet  -v, --verbose  -h, --help  -V, --version",
            "Shell completion for verbs, run names and keys: homing --install-completion",
            "",
        ]
    )
