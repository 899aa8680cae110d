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
from homing.page_assets import read_asset
from homing.redact import HIDDEN, redact
from homing.report.charts import Charts, draw, draw_all
from homing.report.report_data import Report
from homing.report.sections import Block, Figure, Table, Verbatim, Words, headline, make_figures, make_sections

__all__ = ["MARK", "anonymous", "picture_of", "render_for_maintainers", "render_html", "render_markdown"]

MARK = "homing report/1"  # written at the top of each page: a new report may overwrite a file that starts with this

# The C0 and C1 control characters except tab and newline, bidirectional controls, lone surrogates, and the Unicode line
# and paragraph separators.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*\[\]<>|~&]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))")
# characters that would make a line of Markdown a list item or a heading
# A cell that is aligned to the right if its whole column consists of such cells
_NUMBER = re.compile(r"[$~]?-?[\d,.]+([kMGTB]|%)?( tok/s)?")
_START = re.compile(r"^([-+=#]|\d+(?=[.)](\s|$)))")
# Content security policy: the browser must not load or run anything, even if text in the page asks it to.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Only what the shared stylesheet has no rule for. A closed part is printed open.
_STYLE = """
.page { max-width: 72rem; }
h1 { font-size: 1.9rem; }
.page > .row { margin-bottom: .4rem; }
.page > p { margin-bottom: 1.25rem; }
.stat { display: flex; flex-direction: column; gap: .1rem; }
.stat .meter { margin-top: .35rem; max-width: 9rem; }
.chart { margin: 0; }
.chart figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .4rem; }
.chart svg { display: block; width: 100%; height: auto; font-family: var(--sans); }
.charts, .table-wrap, .samples, details { margin-bottom: 1rem; }
.card > :last-child { margin-bottom: 0; }
.charts { display: grid; gap: 1.25rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.samples { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.samples .code-block { margin: 0; height: calc(100% - 1.9rem); }
.code-block pre { overflow-wrap: anywhere; }
td { overflow-wrap: anywhere; min-width: 6rem; }
th { overflow-wrap: normal; }
tbody th { white-space: normal; width: 13rem; }
td.num { overflow-wrap: normal; min-width: 0; }
summary { cursor: pointer; color: var(--link); font-size: .9rem; margin-bottom: .5rem; }
footer { color: var(--muted); font-size: .85rem; }
@media (max-width: 40rem) {
  th, td { padding: .4rem .5rem; }
  tbody th { width: 8rem; }
  h1 { font-size: 1.5rem; }
}
@media print {
  :root, :root:not([data-theme="light"]) { color-scheme: light; --bg: #fff; --surface: #fff; --text: #1f1d1a;
    --muted: #55504a; --border: #d5d0c8; --sunken: #f4f2ee; --grid: #e4e0d8; --accent: #a8420d; --link: #0b57a4;
    --series-1: #0072b2; --series-2: #c4500a; --series-3: #00805a; --series-5: #7a5cc4; }
  .page { padding: 0; max-width: none; }
  .chart, pre { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""


def picture_of(report: Report) -> str:
    """Return all charts of the report as one SVG file, or "" if there are none."""
    blocks = [block for section in make_sections(report) for block in section.blocks]
    return draw_all([chart for block in blocks if isinstance(block, Charts) for chart in block.charts])


def render_markdown(report: Report, picture: str = "") -> str:
    """Return the report as Markdown. `picture` names the SVG file next to the page; "" leaves the picture out."""
    parts = [f"<!-- {MARK} -->", f"# {_md(report.name)}", _md_line(headline(report))]
    parts.append(_markdown(Table((), [(each.label, each.value) for each in make_figures(report)]), ""))
    for section in make_sections(report):
        parts.append(f"## {section.title}")
        parts += [text for block in section.blocks if (text := _markdown(block, picture))]
    parts.append(_md_line(_foot(report)))
    return "\n\n".join(parts) + "\n"


def render_html(report: Report) -> str:
    style = f"{read_asset('style.css')}{_STYLE}"
    kind = {"done": "good", "failed": "bad", "unfinished": "bad"}.get(report.state, "warn")
    note = "" if report.is_finished else f'<p class="note">{_html(headline(report))}</p>'
    parts = [
        "<!doctype html>",
        f"<!-- {MARK} -->",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_html(report.name)}: homing report</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        '<header class="topbar"><span class="brand">homing</span><span class="muted">Report</span></header>',
        '<main class="page">',
        f'<div class="row"><h1>{_html(report.name)}</h1><span class="badge {kind}">{_html(report.state)}</span></div>',
        note or f'<p class="muted">{_html(headline(report))}</p>',
        _figures_html(make_figures(report)),
    ]
    for section in make_sections(report):
        name = re.sub(r"\W+", "-", section.title.lower())
        parts.append(f'<section class="card" aria-labelledby="{name}"><h2 id="{name}">{_html(section.title)}</h2>')
        parts += _blocks_html(section.blocks)
        parts.append("</section>")
    return "\n".join([*parts, f"<footer>{_html(_foot(report))}</footer>", "</main>", "</body>", "</html>", ""])


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
    if isinstance(block, Charts):
        return f"![{_md(block.title)}]({quote(picture)})" if picture and block.charts else ""
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


def _figures_html(figures: Sequence[Figure]) -> str:
    shown = []
    for each in figures:
        bar = ""
        if each.share is not None:
            width = f"{min(1.0, each.share):.1%}"
            bar = f'<div class="meter" aria-hidden="true"><span style="width:{width}"></span></div>'
        shown.append(f'<div class="stat"><dt>{_html(each.label)}</dt><dd>{_html(each.value)}{bar}</dd></div>')
    return f'<div class="card"><dl class="stats">{"".join(shown)}</dl></div>'


def _blocks_html(blocks: Sequence[Block]) -> list[str]:
    """Render blocks in order; verbatim texts that follow each other are shown side by side."""
    parts: list[str] = []
    texts: list[str] = []
    for block in [*blocks, None]:
        if isinstance(block, Verbatim) and block.title:
            texts.append(f"<div><h3>{_html(block.title)}</h3>{_code_html(block.text)}</div>")
            continue
        if texts:
            parts.append(f'<div class="samples">{"".join(texts)}</div>')
            texts = []
        if block is not None:
            parts.append(_block_html(block))
    return parts


def _block_html(block: Block) -> str:
    if isinstance(block, Charts):
        drawn = [
            f'<figure class="chart"><figcaption>{_html(chart.title)}</figcaption>{draw(chart, _clean)}</figure>'
            for chart in block.charts
        ]
        return f'<div class="charts">{"".join(drawn)}</div>'
    if isinstance(block, Words):
        return f"<p>{_html(block.text)}</p>"
    if isinstance(block, Verbatim):
        return _code_html(block.text)
    return _table_html(block)


def _code_html(text: str) -> str:
    return f'<div class="code-block"><pre>{_html(text)}</pre></div>'


def _table_html(table: Table) -> str:
    is_number = [
        all(_NUMBER.fullmatch(row[at]) for row in table.rows if row[at]) and any(row[at] for row in table.rows)
        for at in range(len(table.headers))
    ]
    kinds = [' class="num"' if each else "" for each in is_number]
    head = "".join(f'<th scope="col"{kind}>{_html(cell)}</th>' for cell, kind in zip(table.headers, kinds, strict=True))
    rows = []
    for row in table.rows:
        if table.headers:
            cells = "".join(f"<td{kind}>{_html(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        else:
            cells = f'<th scope="row">{_html(row[0])}</th>' + "".join(f"<td>{_html(cell)}</td>" for cell in row[1:])
        rows.append(f"<tr>{cells}</tr>")
    body = f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{chr(10).join(rows)}</tbody></table>"
    # A table that is wider than the window scrolls on its own, also by keyboard.
    named = _html(table.folded or "Table")
    shown = f'<div class="table-wrap" tabindex="0" role="group" aria-label="{named}">{body}</div>'
    return f"<details><summary>{named}</summary>{shown}</details>" if table.folded else shown


_MOST_EVENTS = 200
_LEFT_OUT = ("samples", "kept", "stored", "next", "run_file")
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
        del phase["lr_curve"], phase["speed_curve"]
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
