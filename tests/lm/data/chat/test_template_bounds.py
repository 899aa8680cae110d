"""Templates from strangers: bounded in time and memory, and never read through a link that leaves their folder."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lm.data.chat.kit import make_tokenizer

from homing.errors import DataError, HomingError
from homing.lm.data.chat import template as templates
from homing.lm.data.chat.messages import Fault
from homing.lm.data.chat.template import ChatTemplate, find_template

ASKED = [{"role": "user", "content": "Hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"still rendering after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.regression("template-bombs")
@pytest.mark.slow
def test_a_template_that_never_ends_is_a_fault_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_RENDER_S", 0.5, raising=False)
    template = ChatTemplate("{{ messages[0]['content'] }}{% if messages[1] %}" + LOOP + "{% endif %}", {})
    with alarm(120):
        assert template.render(ASKED) == "Hi"
        for _ in range(2):
            with pytest.raises(Fault, match=r"longer than 0\.5 s"):
                template.render([*ASKED, *ASKED])
            assert template.render(ASKED) == "Hi", "the next conversation is rendered"
        with pytest.raises(DataError, match="Cannot use the chat template"):
            template.render([*ASKED, *ASKED])


@pytest.mark.parametrize("source", ["{{ 'ab' * 2000000000 }}", "{% set x = namespace(a='ab') %}{% for i in range(40) %}"
                                    "{% set x.a = x.a ~ x.a %}{% endfor %}{{ x.a }}"])  # fmt: skip
def test_a_template_that_takes_gigabytes_is_a_fault(source: str) -> None:
    """The first while it is compiled: Jinja computes constants then."""
    with pytest.raises(Fault, match="exceeded its limits"):
        ChatTemplate(source, {}).render(ASKED)


def test_rendering_in_a_process_gives_the_same_text_and_faults() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{% if tools %}{{ tools|tojson }}{{ raise_exception('no tools') }}{% endif %}{{ strftime_now('%Y') }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    said = [{"role": "user", "content": "Gr\u00fc\u00dfe \U0001f600\n\x0c"}]
    assert template.render(said, marks=("[", "]")) == f"<s>[{said[0]['content']}]{time.strftime('%Y')}"
    with pytest.raises(Fault, match="rejects this conversation: no tools"):
        template.render(said, [{"name": "x"}])
    with pytest.raises(Fault, match="fails on this conversation: "):
        ChatTemplate("{{ 1 + 'a' }}", {}).render(said)


def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("x", {})
    template.render(ASKED)
    child = template._child
    assert child is not None
    del template
    assert child.returncode is not None


@pytest.mark.regression("template-symlink")
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = make_tokenizer(tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_text("{}" if name.endswith("json") else "PRIVATE KEY")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(HomingError, match="outside its folder"):
        find_template(folder)


def test_links_inside_the_folder_and_of_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "models--x/snapshots/abc")
    (tmp_path / "models--x/blobs").mkdir()
    (tmp_path / "models--x/blobs/1234").write_text("from a blob")
    (folder / "chat_template.jinja").symlink_to("../../blobs/1234")
    found = find_template(folder)
    assert found is not None
    assert found.source == "from a blob"
    (folder / "chat_template.jinja").unlink()
    (folder / "other.jinja").write_text("next to it")
    (folder / "chat_template.jinja").symlink_to("other.jinja")
    found = find_template(folder)
    assert found is not None
    assert found.source == "next to it"
