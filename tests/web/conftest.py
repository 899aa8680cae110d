"""One browser for the tests of a file that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.web.browser import Browser, running_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
