"""What the page of troubles quotes is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"


def quoted() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_message_on_the_page_is_one_that_the_program_has() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    assert len(quoted()) >= 20
    assert [words for words in quoted() if words not in source] == []


def test_every_account_of_the_table_is_on_the_page_of_keys() -> None:
    from homing.cloud.accounts import ACCOUNTS

    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    for account in ACCOUNTS.values():
        assert account.key_page in page
        assert all(key in page for key in account.keys)
