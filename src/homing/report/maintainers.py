"""A report for the maintainers of homing: what happened to a run, without its owner's private data.

    Report, ledger lines -> facts, times, events, figures -> anonymous text

Left out: samples, names of data files, prompts, where weights are stored. Hidden: secret values of this process, what
looks like a key, e-mail addresses, IP addresses, the host name, the user name and the home folder. Marks, instance ids
and run names are kept: without them nothing can be compared with the provider's page.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import re
import socket
import sys
from typing import Any

from homing import __version__
from homing.cloud.home import Home
from homing.cloud.machine_setup.code_bundle import tree_state
from homing.redact import HIDDEN, redact
from homing.report.report_data import Report

__all__ = ["anonymous", "render_for_maintainers"]

_MOST_EVENTS = 200
_LEFT_OUT = ("samples", "kept", "stored", "next")
# Keys in the providers' formats, and long strings of letters and digits after a word that announces a secret.
_KEYS = re.compile(
    r"\b(rpa_|hf_|sk-|ak-|as-|AKIA|ASIA|ghp_|github_pat_|wandb_)[A-Za-z0-9_-]{8,}"
    r"|(?i:\b(api[_-]?key|token|secret|password|authorization|bearer)\b[\"']?\s*[:= ]\s*[\"']?)[A-Za-z0-9+/_.=-]{12,}"
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b")


def render_for_maintainers(report: Report, home: Home) -> str:
    document = dataclasses.asdict(report)
    for name in _LEFT_OUT:
        document.pop(name)
    document["num_events"] = len(document["happenings"])
    document["happenings"] = document["happenings"][-_MOST_EVENTS:]
    for data in document["data"]:
        data.pop("files")
    for phase in document["phases"]:
        phase["curve"] = phase["curve"][-3:]
    lines = [dataclasses.asdict(line) for line in home.ledger.lines(report.run)]
    for line in lines:
        line["account"] = bool(line["account"])  # only whether it was known; the account itself is not included
    commit, changed = tree_state(home.world)
    facts = {
        "homing": __version__,
        "commit": f"{commit}{' with changes' if changed else ''}" or "an installed package",
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }
    return anonymous(
        f"# Report for the maintainers: {report.run}\n\n"
        "Secrets, addresses and names of this computer were redacted. Review it before you send it.\n\n"
        f"State: {report.state}. {report.reason}\n\n"
        "What did you expect, and what happened instead? (please write it here):\n\n\n"
        f"```json\n{_dump({'versions': facts, 'ledger': lines, 'report': document})}\n```\n"
    )


def anonymous(text: str) -> str:
    text = _KEYS.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", redact(text))
    text = _ADDRESS.sub("<address>", _EMAIL.sub("<e-mail>", text))
    names = {os.path.expanduser("~"): "~", socket.gethostname(): "<this computer>", _user(): "<me>"}
    for name, stands_for in names.items():
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stands_for, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, default=str, ensure_ascii=False)
