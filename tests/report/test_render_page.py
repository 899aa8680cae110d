"""A page with untrusted text: none of it may be executed."""

from __future__ import annotations

import html.parser
import re

import pytest

from homing.report import Report, render_html, render_markdown
from homing.report.render_page import picture_of
from homing.report.report_data import Happening, Kept, Phase, Sample

EVIL = '</pre><script>alert(1)</script><img src="http://out.test/x">'


def report(**messages: object) -> Report:
    return Report("moss-1", "moss", "done", "Every phase is trained.", True, True, 0.0, "0.1.0", **messages)  # type: ignore[arg-type]


class Tags(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def full() -> Report:
    return report(
        phases=[Phase(EVIL, curve=[(1, 2.0), (2, 1.0)])],
        samples=[Sample("pretrain", 1, f"```\n{EVIL}\n[x](javascript:alert(1))\x1b[31m\x00\u202e")],
        happenings=[Happening(0.0, "trainer", "alert", f"{EVIL} | a | ![x](http://out.test/y)\n# title")],
        kept=[Kept(EVIL, "pretrain", 1, 1, {EVIL: "a"})],
        problems=["# no title", "1. no list", "- no list"],
    )


def test_html_from_a_run_is_text_and_the_page_asks_for_nothing() -> None:
    text = render_html(full())
    tags = Tags(text)
    assert {"script", "img", "a", "link", "iframe"}.isdisjoint(tag for tag, _ in tags.found)
    assert not any({"src", "href", "onload", "onclick"} & attributes.keys() for _, attributes in tags.found)
    assert "<script>alert(1)</script>" in "".join(tags.text), "shown as it is"
    policy = [each["content"] for tag, each in tags.found if tag == "meta" and "http-equiv" in each]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert text.count("<svg ") == 1
    assert "\x1b" not in render_html(report(phases=[Phase("a\x1b[0m", curve=[(1, 2.0), (2, 1.0)])]))


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_control_characters_are_shown_by_number(render: object) -> None:
    text = render(full())  # type: ignore[operator]
    assert not any(sign in text for sign in "\x1b\x00\u202e")
    assert "\\x1b" in text
    assert "\\u202e" in text
    text.encode()
    assert render(report(samples=[Sample("sft", 1, "\ud800")])).encode()  # type: ignore[operator]


def test_a_sample_cannot_end_its_own_fence() -> None:
    lines = render_markdown(full()).splitlines()
    begin = lines.index("````text")
    end = lines.index("````", begin)
    assert "```" in lines[begin + 1 : end]
    assert EVIL in lines[begin + 1 : end]


def test_text_in_markdown_makes_no_cell_link_tag_title_or_list() -> None:
    lines = render_markdown(full()).splitlines()
    (row,) = [line for line in lines if "alert | " in line]
    assert "\\<script\\>" in row
    assert "\\| a \\|" in row
    assert "!\\[x\\](http" in row
    assert row.endswith("# title |"), "one line"
    for line in ("\\# no title", "1\\. no list", "\\- no list"):
        assert line in lines


def test_the_picture_of_a_markdown_page_is_a_file_next_to_it() -> None:
    found = full()
    assert "](my%20moss.svg)" in render_markdown(found, "my moss.svg")
    assert "![" not in render_markdown(report(phases=found.phases))
    assert picture_of(found).startswith("<svg ")
    assert picture_of(report()) == ""


@pytest.mark.regression("report-headers")
def test_the_headers_of_a_table_do_not_break_inside_words() -> None:
    style = render_html(full()).partition("<style>")[2].partition("</style>")[0]
    wraps = {
        selector.strip(): found.group(1)
        for rule in style.split("}")
        if (found := re.search(r"overflow-wrap: (\w+)", rule))
        for selector in rule.partition("{")[0].split(",")
    }
    assert wraps["td"] == "anywhere", "a hash or a path has no other place to break"
    assert wraps["th"] == "normal"
