"""What the page of troubles quotes is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"


def quoted() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.acceptance(145, 146, 147)
def test_every_message_on_the_page_is_one_that_the_program_has() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    assert len(quoted()) >= 20
    assert [words for words in quoted() if words not in source] == []


@pytest.mark.parametrize("cloud", ["aws", "modal", "runpod", "shadeform"])
def test_every_message_on_the_page_of_a_cloud_is_one_that_the_program_has(cloud: str) -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    table = (ROOT / f"docs/clouds/{cloud}.md").read_text(encoding="utf-8").split("\n## Errors")[1]
    messages = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(messages) >= 7
    # `...` is a value that the program fills in.
    parts = [part.strip() for message in messages for part in message.split("...") if part.strip()]
    assert [part for part in parts if part not in source] == []


@pytest.mark.acceptance(145, 146)
@pytest.mark.parametrize(
    "words",
    [
        "sent no heartbeat within",  # an instance that does not start
        "The trainer ended with",  # training that failed
        "has read-only access",  # checkpoints that are not uploaded: the token
        "does not work as a store",  # or the store
        "The schedule exceeds the spend limit",  # a limit that comes before the end
        "vocab_size mismatch",
        "is not prepared",  # a data file that is not there
        "Out of memory at a micro-batch of",
    ],
)
def test_what_goes_wrong_most_often_is_on_the_page_in_the_words_of_its_message(words: str) -> None:
    assert words in quoted()


@pytest.mark.acceptance(147)
def test_slow_text_containers_and_buckets_have_their_paragraph() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for words in (
        "Tokenising is slow?",
        "If a container fails to start, `homing doctor`",
        "If S3 denies access, `homing doctor RUN`",
    ):
        assert words in page


@pytest.mark.acceptance(113)
def test_every_account_of_the_table_is_on_the_page_of_keys() -> None:
    from homing.cloud.api_key_table import ACCOUNTS

    page = (ROOT / "docs/guides/doctor.md").read_text(encoding="utf-8")
    for account in ACCOUNTS.values():
        assert account.key_page in page
        assert all(key in page for key in account.keys)
