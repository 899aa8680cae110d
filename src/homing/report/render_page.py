"""Renders sections as one page: Markdown, self-contained HTML, or a bug report for the maintainers.

Samples, logs, names and addresses are untrusted text. They are sanitized here, and only here: characters that control
the terminal or the text direction are replaced with their codes, and the format's special characters are escaped.

The bug report describes what happened to a run, without the owner's private data. It leaves out samples, names of data
files, prompts, and where weights are stored. It masks secret values of this process, anything that looks like a key,
e-mail addresses, IP addresses, the host name, the user name and the home folder. It keeps marks (the names of
instances), instance ids and run names, because they are needed to compare the report with the provider's console.
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
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from homing import __version__
from homing.cloud.home import Home
from homing.cloud.machine_setup.code_bundle import tree_state
from homing.redact import HIDDEN, redact
from homing.report.report_data import Report
from homing.report.sections import Block, Picture, Table, Verbatim, Words, headline, make_sections

__all__ = ["MARK", "anonymous", "picture_of", "render_for_maintainers", "render_html", "render_markdown"]

MARK = "homing report/1"  # written at the top of each page: a new report may overwrite a file that starts with this

# The C0 and C1 control characters except tab and newline, bidirectional controls, lone surrogates, and the Unicode line
# and paragraph separators.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~&]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))")
# characters that would make a line of Markdown a list item or a heading
_START = re.compile(r"^([-+=#]|\d+(?=[.)](\s|$)))")
# Content security policy: the browser must not load or run anything, even if text in the page asks it to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ddd; padding: .25em .6em; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { overflow-wrap: normal; }
pre { background: #f5f5f5; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; }
"""


def picture_of(report: Report) -> str:
    """Return the report's picture as SVG, or "" if there is none."""
    found = (block.svg for section in make_sections(report) for block in section.blocks if isinstance(block, Picture))
    return next(found, "")


def render_markdown(report: Report, picture: str = "") -> str:
    """Return the report as Markdown. `picture` names the SVG file next to the page; "" leaves the picture out."""
    parts = [f"<!-- {MARK} -->", f"# {_md(report.name)}", _md_line(headline(report))]
    for section in make_sections(report):
        parts.append(f"## {section.title}")
        parts += [text for block in section.blocks if (text := _markdown(block, picture))]
    parts.append(_md_line(_foot(report)))
    return "\n\n".join(parts) + "\n"


def render_html(report: Report) -> str:
    parts = [
        "<!doctype html>",
        f"<!-- {MARK} -->",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_html(report.name)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{_html(report.name)}</h1>",
        f"<p><strong>{_html(headline(report))}</strong></p>",
    ]
    for section in make_sections(report):
        parts.append(f"<h2>{_html(section.title)}</h2>")
        parts += [_block_html(block) for block in section.blocks]
    return "\n".join([*parts, f"<p><small>{_html(_foot(report))}</small></p>", "</body>", "</html>", ""])


def _foot(report: Report) -> str:
    return f"Written by homing {report.version} from the stored data of {report.run}."


def _clean(text: str) -> str:
    """Normalize line endings, and replace every other control character with its code, such as \\x1b."""
    text = text.replace("\r\n", "\n")
    return _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}" if ord(sign[0]) < 256 else f"\\u{ord(sign[0]):04x}", text)


def _one_line(text: str) -> str:
    return " ".join(_clean(text).split())


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _md(text: str) -> str:
    """Escape Markdown text that does not start a line, such as the text of a table cell."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text))


def _md_line(text: str) -> str:
    return _START.sub(_not_a_start, _md(text))


def _not_a_start(found: re.Match[str]) -> str:
    return f"{found[1]}\\" if found[1].isdigit() else f"\\{found[1]}"


def _markdown(block: Block, picture: str) -> str:
    if isinstance(block, Picture):
        return f"![{_md(block.title)}]({quote(picture)})" if picture else ""
    if isinstance(block, Words):
        return _md_line(block.text)
    if isinstance(block, Verbatim):
        return "\n\n".join(filter(None, [_md_line(block.title), _fenced(_clean(block.text))]))
    headers = block.headers or ("", "")
    lines = [_row(headers), _rule(headers), *(_row(row) for row in block.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_md(cell) for cell in cells)} |"


def _rule(headers: Sequence[str]) -> str:
    return "|" + "---|" * len(headers)


def _fenced(text: str) -> str:
    """Return the text as a code block. Its fence is longer than any in the text, so that the text cannot close it."""
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


# -- HTML --------------------------------------------------------------------------------------------------------------


def _html(text: str) -> str:
    return escape(_clean(text), quote=True)


def _block_html(block: Block) -> str:
    if isinstance(block, Picture):
        return f"<figure>{block.svg}</figure>"
    if isinstance(block, Words):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Verbatim):
        title = f"<h3>{_html(block.title)}</h3>" if block.title else ""
        return f"{title}<pre>{_html(block.text)}</pre>"
    return _table_html(block)


def _table_html(table: Table) -> str:
    head = "".join(f"<th>{_html(cell)}</th>" for cell in table.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>\n" for row in table.rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>\n{rows}</tbody></table>"


_MOST_EVENTS = 200
_LEFT_OUT = ("samples", "kept", "stored", "next")
# Matches keys in the providers' formats, and long alphanumeric strings after a word such as "token".
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
        line["account"] = bool(line["account"])  # report only whether the account was known, not the account itself
    commit, changed = tree_state(home.world)
    facts = {
        "homing": __version__,
        "commit": f"{commit}{' with changes' if changed else ''}" or "an installed package",
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }
    return anonymous(
        f"# Report for the maintainers: {report.run}\n\n"
        "Secrets, addresses, and the names of this computer and its user were redacted."
        " Review the report before you send it.\n\n"
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
