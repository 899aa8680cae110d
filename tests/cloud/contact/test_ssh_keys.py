"""SSH keys: made once, at home, and never left half-written."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from homing.cloud.contact.ssh_access import find_host_key, host_key, known_hosts_line, login_key
from homing.errors import UsageError
from homing.world import Completed, World


@pytest.mark.acceptance(80, 111, "X19")
def test_the_login_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    first, again = login_key(tmp_path, World()), login_key(tmp_path, World())
    assert first == again
    assert first.private_path.stat().st_mode & 0o777 == 0o600
    assert first.public_line.startswith("ssh-ed25519 AAAA")
    assert "PRIVATE KEY" in first.private_path.read_text()


@pytest.mark.acceptance(111)
def test_a_lost_key_is_made_again(tmp_path: Path) -> None:
    first = login_key(tmp_path, World())
    shutil.rmtree(tmp_path / "keys")
    again = login_key(tmp_path, World())
    assert again.public_line != first.public_line
    assert again.private_path.stat().st_mode & 0o777 == 0o600


def test_each_instance_has_a_host_key_of_its_own_that_stays(tmp_path: Path) -> None:
    one, other = host_key(tmp_path, "homing-a-1", World()), host_key(tmp_path, "homing-a-2", World())
    assert one.public_line != other.public_line
    assert host_key(tmp_path, "homing-a-1", World()) == one
    assert find_host_key(tmp_path, "homing-a-1", World()) == one
    assert find_host_key(tmp_path, "homing-of-another-home", World()) is None


def test_a_private_key_shows_in_no_repr(tmp_path: Path) -> None:
    assert "PRIVATE" not in repr(host_key(tmp_path, "homing-a-1", World()))


def test_the_known_hosts_line_includes_a_port_other_than_22(tmp_path: Path) -> None:
    key = host_key(tmp_path, "homing-a-1", World())
    kind, text = key.public_line.split()[:2]
    assert known_hosts_line(key, "1.2.3.4") == f"1.2.3.4 {kind} {text}"
    assert known_hosts_line(key, "1.2.3.4", 10341) == f"[1.2.3.4]:10341 {kind} {text}"


def test_launches_that_make_it_at_the_same_time_all_use_the_same(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(login_key(tmp_path, World()).public_line)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6
    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["login"]


def test_without_ssh_keygen_it_says_what_to_install_and_leaves_nothing(tmp_path: Path) -> None:
    class Bare(World):
        def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
            return Completed(127, "", "No such file or directory: 'ssh-keygen'")

    with pytest.raises(UsageError, match="Could not create an SSH key") as caught:
        login_key(tmp_path, Bare())
    assert "openssh-client" in caught.value.fix
    assert list((tmp_path / "keys").iterdir()) == []
