"""For each verb a request, as a person types it and as a program makes it. The tests in test_cli_equals_api run both.

A request that rents or asks a provider is tried on `local` and on `fake`. Where the verb prints a document, `--json` is
typed, and the document must be what the function returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.api.cli_and_api import Scenario, Trial
from tests.doubles import hub
from tests.doubles.docker import Docker

from homing.api.lookup.find_runs import open_home
from homing.api.runs.launch_run import Confirmed, LaunchOptions
from homing.api.tools.rehearse_run import for_real
from homing.cloud.providers.base import Connection

__all__ = ["SCENARIOS", "WITHOUT"]

BOTH = ("local", "fake")
SLOW = (pytest.mark.slow,)


def finished(steps: Any) -> Any:
    """Go through what a function returns piece by piece, to its end."""
    for _ in steps:
        pass
    return steps


def asked(session: Any, *lines: str) -> list[dict[str, object]]:
    """Ask each line in a chat, and return what `homing chat --json` prints of it."""
    return [
        {"seed": session.seed, "prompt": line, "text": "".join(session.reply(line)), "mode": session.mode}
        for line in lines
    ]


def store() -> str:
    """Return the address of the store of the set-ups, as `{store}` in what is typed."""
    return f"file:{Path.cwd()}/store"


def listed(entries: Any) -> dict[str, object]:
    return {"files": [{"key": each.key, "num_bytes": each.num_bytes} for each in entries]}


def removed(removal: Any) -> dict[str, object]:
    return {"keys": removal.keys, "num_bytes": removal.num_bytes}


def yes(question: str) -> bool:
    return True


def runs_at_home(runs: Any) -> object:
    """Return what `homing runs --json` prints, which asks the home for the guard and for the stored files."""
    with open_home() as home:
        return runs(home=home).to_dict(home)


def launched(launch: Any) -> Any:
    options = LaunchOptions(spend_limit_usd=Decimal(1), sets=(f"store={store()}",))
    return launch("moss", options, answers=Confirmed(confirm=True))


def rehearsed(rehearse: Any) -> Any:
    """Rehearse, and ask for the command of the real run, as the verb does at its end."""
    sets = ["data.dir=data/rehearsed"]
    done = rehearse("moss", seed=3, sets=sets)
    for_real("moss", sets)
    return done


def written(curves: Any) -> dict[str, object]:
    """Return what `homing tensorboard --no-serve --json` prints."""
    return {"run": curves.run, "folder": str(curves.folder), "url": None}


# --- doubles of what is not here ---


def with_hub(trial: Trial) -> None:
    """A Hugging Face Hub, empty before each side."""
    trial.monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    made = trial.doubles.enter_context(hub.running())
    trial.monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
    trial.monkeypatch.setenv("HF_TOKEN", hub.WRITE)
    trial.before_each = made.repos.clear
    trial.outside = lambda: {
        name: [repo.is_private, {file: hashlib.sha256(each.data).hexdigest() for file, each in repo.head.files.items()}]
        for (_, name), repo in made.repos.items()
    }


def with_docker(trial: Trial) -> None:
    """A Docker whose images and calls are forgotten before each side."""
    folder = trial.base / "docker"
    trial.monkeypatch.setenv("PATH", f"{Docker(folder).bin}:{os.environ['PATH']}")
    trial.monkeypatch.setattr("homing.cloud.launch.build_image._POLL_S", 0.02)

    def forget() -> None:
        shutil.rmtree(folder)
        Docker(folder)

    trial.before_each = forget
    trial.outside = lambda: json.loads((folder / "state.json").read_text())


def with_login(trial: Trial) -> None:
    """Instances of the fake cloud that can be reached by SSH, as those of a real one."""
    there = Connection("root", "127.0.0.1", 2222, known_hosts="[127.0.0.1]:2222 ssh-ed25519 AAAA")
    trial.monkeypatch.setattr("homing.cloud.providers.fake.provider.Fake.connection", lambda self, instance: there)


def without_torch(trial: Trial) -> None:
    """Doctor asks a child process for the version of torch, which takes seconds to load."""
    found = '{"version": "2.13.0", "cuda": null, "cards": 0}'
    trial.monkeypatch.setattr("homing.doctor.computer._TORCH", f"print({found!r})  # torch")


# Get started

SCENARIOS: dict[str, list[Scenario]] = {
    "quickstart": [
        Scenario(
            "--steps 10 --yes --json",
            lambda quickstart: quickstart(Path("homing-quickstart"), steps=10),
            "text",
            marks=(pytest.mark.prove, pytest.mark.timeout(900)),  # minutes: a model is trained twice
        )
    ],
    "new": [Scenario("first --from tiny --text moss.txt", lambda new: new("first", "tiny", text=["moss.txt"]), "text")],
    "explain": [
        Scenario("model.depth --json", lambda explain: explain("model.depth"), "text", is_reading=True),
        Scenario("limits --json", lambda explain: explain("limits"), "text", is_reading=True),
        Scenario("--json", lambda explain: explain(), "text", is_reading=True),
    ],
}

# Data and models

SCENARIOS |= {
    "prep": [Scenario("tiny --json", lambda prep: prep("tiny").document, "unprepared")],
    "data check": [
        Scenario(
            "chats.jsonl --tokenizer tokenizer --json",
            lambda check: {**check(["chats.jsonl"], tokenizer=Path("tokenizer")).document, "error": None},
            "unprepared",
            is_reading=True,
        )
    ],
    "data show": [
        Scenario(
            "chats.jsonl --tokenizer tokenizer --json",
            lambda show: show("chats.jsonl", tokenizer=Path("tokenizer")).document,
            "unprepared",
            is_reading=True,
        )
    ],
    "verify": [Scenario("tiny --json", lambda verify: verify("tiny").document, "prepared", is_reading=True)],
    "train": [Scenario("tiny --json", lambda train: train("tiny"), "prepared", marks=SLOW)],
    "generate": [
        Scenario(
            "tiny --prompt 'the cat' --tokens 8 --seed 1 --device cpu --json",
            lambda generate: finished(generate("tiny", prompt="the cat", tokens=8, seed=1, device="cpu")),
            "model",
            is_reading=True,
        )
    ],
    "chat": [
        Scenario(
            "tiny --tokens 8 --seed 1 --device cpu --json",
            lambda chat: asked(chat("tiny", tokens=8, seed=1, device="cpu"), "the cat", "the dog"),
            "model",
            is_reading=True,
            stdin="the cat\nthe dog\n",
        )
    ],
    "export": [
        Scenario(
            "tiny --to gguf --out exported --json",
            lambda export: export("tiny", to="gguf", out=Path("exported")),
            "model",
        )
    ],
    "publish": [
        Scenario(
            "hf:me/tiny exported --json",
            lambda publish: publish("hf:me/tiny", "exported"),
            "export",
            arrange=with_hub,
            marks=(pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),),
        )
    ],
    "eval": [
        Scenario(
            "tiny --out scores.md --device cpu --json",
            lambda evaluate: evaluate("tiny", out=Path("scores.md"), device="cpu").document,
            "model",
        )
    ],
}

# Cloud runs

SCENARIOS |= {
    "plan": [Scenario("moss --json", lambda plan: plan("moss"), providers=BOTH)],
    "offers": [
        Scenario(
            f"--provider {provider} --all-configs --json",
            lambda offers, provider=provider: offers(num_gpus=0, providers=[provider]),
            providers=(provider,),
        )
        for provider in BOTH
    ],
    "launch": [
        Scenario("moss --spend-limit 1 --yes --json --set store={store}", launched, providers=BOTH, marks=SLOW),
    ],
    "status": [
        Scenario("moss --json", lambda status: next(status("moss")).document, "finished", BOTH, is_reading=True),
        Scenario("moss --json", lambda status: next(status("moss")).document, "ended", BOTH),
    ],
    "watch": [Scenario("moss", lambda watch: finished(watch("moss")), "finished", BOTH, is_reading=True)],
    "logs": [
        Scenario(
            f"moss {program} --json",
            lambda logs, program=program: [{"line": line} for line in logs("moss", program)],
            "finished",
            BOTH,
            is_reading=True,
        )
        for program in ("trainer", "agent")
    ],
    "ssh": [Scenario("moss --json", lambda ssh: ssh("moss"), "live", ("fake",), arrange=with_login, marks=SLOW)],
    "forward": [
        Scenario(
            "moss 6006 --json",
            lambda forward: forward("moss", here=6006),
            "live",
            ("fake",),
            arrange=with_login,
            marks=SLOW,
        )
    ],
    "limit": [
        Scenario(
            "moss --spend 2 --time 8h --json",
            lambda limit: limit("moss", spend_usd=Decimal(2), time_s=8 * 3600.0),
            "live",
            BOTH,
            marks=SLOW,
        )
    ],
    "stop": [Scenario("moss --json", lambda stop: stop("moss"), "live", BOTH, marks=SLOW)],
    "fetch": [
        Scenario("moss --json", lambda fetch: fetch("moss"), "finished", BOTH),
        Scenario(
            "moss --checkpoint 5 --to five --json",
            lambda fetch: fetch("moss", checkpoint="5", to=Path("five")),
            "finished",
            BOTH,
        ),
    ],
    "destroy": [
        Scenario("moss --yes --json", lambda destroy: destroy("moss", agrees=yes), "live hung", BOTH, marks=SLOW),
        Scenario(
            "--all --yes --json",
            lambda destroy: destroy(is_all=True, agrees=yes),
            "live hung",
            BOTH,
            marks=SLOW,
        ),
        Scenario("moss --json", lambda destroy: destroy("moss"), "finished", BOTH),
        Scenario(
            "moss --stored --yes --json",
            lambda destroy: destroy("moss", stored=True, agrees=yes),
            "finished",
            BOTH,
        ),
    ],
    "guard": [
        Scenario("--once --json", lambda guard: [each.to_dict() for each in guard(once=True)], "ended", BOTH),
        Scenario(
            "--once --json",
            lambda guard: [each.to_dict() for each in guard(once=True)],
            "live over limit",
            BOTH,
            marks=SLOW,
        ),
    ],
    "runs": [
        Scenario("--json", runs_at_home, "finished", BOTH, is_reading=True),
        Scenario("--json", runs_at_home, "ended", BOTH),
    ],
    "ledger": [
        Scenario("--json", lambda ledger: ledger(), "finished", BOTH, is_reading=True),
        Scenario("moss --json", lambda ledger: ledger("moss"), "ended", BOTH),
    ],
    "reconcile": [
        Scenario(
            f"{flag} --yes --json",
            lambda reconcile, flag=flag: {
                **reconcile(is_destroy=flag == "--destroy", is_adopt=flag == "--adopt", agrees=yes).to_dict(),
                "error": None,
            },
            "live forgotten",
            BOTH,
            marks=SLOW,
        )
        for flag in ("--destroy", "--adopt")
    ],
    "adopt": [
        Scenario(
            "{store} moss --yes --json",
            lambda adopt: adopt(store(), "moss", agrees=yes),
            "live elsewhere",
            BOTH,
            marks=SLOW,
        )
    ],
    "rehearse": [
        Scenario(
            "moss --seed 3 --json --set data.dir=data/rehearsed",
            rehearsed,
            marks=SLOW,
        )
    ],
}

# Tools

SCENARIOS |= {
    "store ls": [
        Scenario(
            "models --store {store} --json",
            lambda ls: listed(ls("models", store=store())),
            "finished",
            ("local",),
            is_reading=True,
        )
    ],
    "store get": [
        Scenario(
            "models/moss/manifest.json --store {store} --json",
            lambda get: get("models/moss/manifest.json", store=store()),
            "finished",
            ("local",),
        )
    ],
    "store put": [
        Scenario(
            "moss.txt kept.txt --store {store} --json",
            lambda put: put(Path("moss.txt"), "kept.txt", store=store()),
            "finished",
            ("local",),
        )
    ],
    "store rm": [
        Scenario(
            "models/moss --store {store} --yes --json",
            lambda remove: removed(remove("models/moss", store=store(), agrees=yes)),
            "finished",
            ("local",),
        )
    ],
    "tensorboard": [
        Scenario(
            "moss --no-serve --json", lambda write_curves: written(write_curves("moss")), "finished", BOTH, marks=SLOW
        )
    ],
    "report": [
        Scenario("moss --out moss.html --json", lambda report: report("moss", out=Path("moss.html")), "fetched", BOTH)
    ],
    "image build": [
        Scenario("moss --push me/train:1 --json", lambda build: build("moss", push="me/train:1"), arrange=with_docker)
    ],
    "setup": [
        Scenario(
            "local --store {store} --yes --json",
            lambda setup: setup("local", store=store(), agrees=yes),
            "text",
        )
    ],
    "doctor": [
        Scenario(
            f"moss --provider {provider} --json",
            lambda doctor, provider=provider: doctor("moss", providers=[provider]),
            providers=(provider,),
            is_reading=True,
            arrange=without_torch,
        )
        for provider in BOTH
    ],
}

# Verbs that cannot be compared, and why

WITHOUT = {
    "serve": "serves until Ctrl-C, writes nothing, and answers with an address and a token that differ each time",
    "dashboard": "serves until Ctrl-C, writes nothing, and answers with an address and a token that differ each time",
}
