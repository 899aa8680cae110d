"""What World promises to those who touch the machine only through it."""

from __future__ import annotations

import contextlib
import errno
import http.server
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.world import HttpRequest, NetworkError, Retries, World


@pytest.fixture
def world() -> World:
    return World()


def wait_for(is_true: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


# --- several things at once ---


def test_parallel_calls_return_answers_and_errors_in_order(world: World) -> None:
    def refuse() -> int:
        raise ValueError("no")

    began = time.monotonic()
    slow = [lambda n=n: (time.sleep(0.3), n)[1] for n in range(5)]
    answers = world.together([*slow, refuse], timeout_s=10.0)
    assert answers[:5] == [0, 1, 2, 3, 4]
    assert isinstance(answers[5], ValueError)
    assert time.monotonic() - began < 1.4


def test_a_call_that_is_late_is_a_timeout_and_what_it_brings_later_changes_nothing(world: World) -> None:
    let_go = threading.Event()
    (late, quick) = world.together([lambda: let_go.wait(10.0), lambda: True], timeout_s=0.1)
    assert isinstance(late, TimeoutError)
    assert quick is True
    let_go.set()


# --- disk ---


def test_a_killed_writer_leaves_the_old_file_or_the_new_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = (
        "import sys; from homing.world import World; w = World(); n = 0\n"
        f"while True: n += 1; w.write({str(path)!r}, bytes([n % 251]) * 400_000)"
    )
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", code])
        wait_for(path.exists)
        time.sleep(0.05)
        writer.kill()
        writer.wait()
        data = path.read_bytes()
        assert len(data) == 400_000
        assert len(set(data)) == 1


def test_a_failed_write_leaves_no_temporary_file(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        world.write(tmp_path / "file", b"new")
    with pytest.raises(OSError, match="No space"):
        world.copy(tmp_path / "file", tmp_path / "copy")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_write_sets_the_mode_from_the_start(world: World, tmp_path: Path) -> None:
    world.write(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_exactly_one_of_many_processes_creates_a_file(tmp_path: Path) -> None:
    code = (
        "import sys, os, time; from homing.world import World; w = World()\n"
        f"go = {str(tmp_path / 'go')!r}\n"
        "while not os.path.exists(go): time.sleep(0.001)\n"
        f"print(w.create({str(tmp_path / 'lease')!r}, str(os.getpid()).encode()))"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(6)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    answers = {racer.pid: racer.communicate(timeout=30)[0].strip() for racer in racers}
    winners = [pid for pid, answer in answers.items() if answer == "True"]
    assert sorted(answers.values()) == ["False"] * 5 + ["True"]
    assert (tmp_path / "lease").read_text() == str(winners[0])


def test_copy_gives_the_hash_of_what_it_read(world: World, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    assert world.copy(tmp_path / "a", tmp_path / "b") == world.sha256(tmp_path / "a") == world.sha256(tmp_path / "b")


def test_append_and_read_from_speak_of_the_same_bytes(world: World, tmp_path: Path) -> None:
    path = tmp_path / "log"
    world.append(path, b"one\n")
    world.append(path, b"two\n")
    assert world.read(path, 4) == b"two\n"
    assert world.read(path, 4, max_bytes=1) == b"t"


def test_an_absent_folder_is_not_an_empty_one(world: World, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        world.listdir(tmp_path / "absent")
    world.remove(tmp_path / "absent")
    world.rmtree(tmp_path / "absent")


# --- database ---


def test_a_transaction_happens_whole_or_not_at_all(world: World, tmp_path: Path) -> None:
    database = world.database(tmp_path / "db.sqlite")
    database.execute(("CREATE TABLE t (x INTEGER PRIMARY KEY)", ()))
    with pytest.raises(Exception, match="UNIQUE"):
        database.execute(("INSERT INTO t VALUES (1)", ()), ("INSERT INTO t VALUES (1)", ()))
    assert database.execute(("SELECT * FROM t", ())) == []
    database.execute(("INSERT INTO t VALUES (?)", (7,)))
    assert world.database(tmp_path / "db.sqlite").execute(("SELECT x FROM t", ())) == [{"x": 7}]


def test_only_a_create_makes_a_database(world: World, tmp_path: Path) -> None:
    database = world.database(tmp_path / "db.sqlite")
    for statement in ("SELECT 1", "INSERT INTO t VALUES (1)"):
        with pytest.raises(FileNotFoundError):
            database.execute((statement, ()))
    assert not (tmp_path / "db.sqlite").exists()


# --- processes ---


def test_a_spawned_program_has_its_own_session_and_tells_its_end(world: World, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getsid(0) == os.getpid(), os.environ['A'], os.getcwd()); sys.exit(7)"
    pid = world.spawn([sys.executable, "-c", code], {"A": "b"}, tmp_path, tmp_path / "log")
    wait_for(lambda: world.poll(pid) is not None)
    assert world.poll(pid) == 7
    assert (tmp_path / "log").read_text().split() == ["True", "b", str(tmp_path)]


def test_marked_finds_live_processes_by_a_variable_and_never_the_dead(world: World, tmp_path: Path) -> None:
    mark = f"test-{world.random_hex(12)}"
    code = (
        "import time, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )
    pid = world.spawn(
        [sys.executable, "-c", code], {**os.environ, "HOMING_MARK": f"{mark}-1"}, tmp_path, tmp_path / "l"
    )
    wait_for(lambda: len(world.marked("HOMING_MARK", mark)) == 2)
    found = world.marked("HOMING_MARK", mark)
    assert {value for _, value in found} == {f"{mark}-1"}
    assert pid in {process.pid for process, _ in found}
    assert all(process.started for process, _ in found)
    assert world.signal(pid, signal.SIGKILL, is_group=True)
    wait_for(lambda: world.marked("HOMING_MARK", mark) == [])
    wait_for(lambda: world.poll(pid) is not None)
    assert world.poll(pid) == -signal.SIGKILL
    assert not world.signal(pid, signal.SIGTERM)


def test_a_mark_is_found_among_words_that_are_no_text(world: World, tmp_path: Path) -> None:
    mark = f"test-{world.random_hex(12)}"
    env = {**os.environ, "ODD": os.fsdecode(b"\xff"), "HOMING_MARK": mark}
    pid = world.spawn([sys.executable, "-c", "import time; time.sleep(60)"], env, tmp_path, tmp_path / "l")
    wait_for(lambda: [(process.pid, value) for process, value in world.marked("HOMING_MARK", mark)] == [(pid, mark)])
    assert world.marked("HOMING_MARK", os.fsdecode(b"\xff")) == []
    assert world.signal(pid, signal.SIGKILL)
    wait_for(lambda: world.poll(pid) is not None)


def test_run_says_why_a_program_gave_no_answer(world: World) -> None:
    assert world.run([sys.executable, "-c", "print('a'); exit(3)"], timeout_s=30).code == 3
    assert world.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2).code == 124
    assert world.run(["/no/such/program"], timeout_s=1).code == 127


# --- network ---


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(int(self.path.strip("/").split("?")[0]))
            self.send_header("X-Key", self.headers.get("Authorization", ""))
            self.send_header("Location", "/200")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 302, 404, 429, 503])
def test_any_status_is_an_answer_and_redirects_are_not_followed(world: World, server: str, status: int) -> None:
    reply = world.http(HttpRequest("POST", f"{server}/{status}", {"Authorization": "k"}, b"hello"))
    assert (reply.status, reply.headers["x-key"], reply.body) == (status, "k", b"hello")


def test_a_network_error_does_not_contain_the_query(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with pytest.raises(NetworkError) as caught:
        world.http(HttpRequest("GET", f"http://127.0.0.1:{port}/x?key=hidden", timeout_s=2))
    assert "hidden" not in str(caught.value)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(NetworkError):
        world.http(HttpRequest("GET", f"http://127.0.0.1:{mute.getsockname()[1]}/", timeout_s=0.2))


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut", b""])
def test_half_an_answer_is_no_answer(world: World, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply_once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply_once)
        thread.start()
        with pytest.raises(NetworkError):
            world.http(HttpRequest("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout_s=5))
        thread.join()


@pytest.mark.parametrize(("every_s", "least_s", "most_s"), [(60.0, 1.0, 20.0), (0.05, 1.0, 20.0)])
def test_an_endless_response_is_read_until_it_pauses_or_times_out(
    world: World, every_s: float, least_s: float, most_s: float
) -> None:
    is_over = threading.Event()

    class Drip(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not is_over.wait(every_s):
                try:
                    self.wfile.write(b"drip\n")
                    self.wfile.flush()
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as httpd:
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        began = time.monotonic()
        reply = world.stream(HttpRequest("GET", f"http://127.0.0.1:{httpd.server_port}/", timeout_s=1.5), 1.2)
        took_s = time.monotonic() - began
        is_over.set()
        httpd.shutdown()
    assert reply.status == 200
    assert (b"drip\n" in reply.body) == (every_s < 1.0)
    assert least_s <= took_s < most_s
    with pytest.raises(NetworkError):
        world.stream(HttpRequest("GET", "http://127.0.0.1:1/"), 0.5)


def test_a_lock_is_one_process_s_until_it_ends(world: World, tmp_path: Path) -> None:
    code = (
        "import sys, time; from homing.world import World\n"
        f"print(World().lock({str(tmp_path / 'lock')!r}), flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "True"
    assert not world.lock(tmp_path / "lock")
    holder.kill()
    holder.communicate()
    assert world.lock(tmp_path / "lock")


def test_a_damaged_database_is_an_os_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "db.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(OSError, match="not a database"):
        world.database(tmp_path / "db.sqlite").execute(("SELECT 1", ()))


def test_a_link_is_the_same_file_and_a_copy_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"tokens")
    World().link(source, target)
    assert target.stat().st_ino == source.stat().st_ino
    target.unlink()

    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    World().link(source, target)
    assert target.read_bytes() == b"tokens"
    assert target.stat().st_ino != source.stat().st_ino


def test_a_program_gets_what_is_meant_for_its_stdin_and_nothing_otherwise() -> None:
    assert World().run(["cat"], 30.0, stdin="secret \u00fc\n").out == "secret \u00fc\n"
    assert World().run(["cat"], 30.0).out == ""


def test_a_signal_calls_its_handler_with_its_number_and_none_ignores_it() -> None:
    got: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    try:
        World().on_signal(signal.SIGUSR1, got.append)
        os.kill(os.getpid(), signal.SIGUSR1)
        World().on_signal(signal.SIGUSR1, None)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


def test_walk_skips_a_vanished_folder_and_raises_for_an_unreadable_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    assert World().walk(tmp_path / "never was") == []

    def ill(path: object) -> object:
        raise PermissionError(errno.EACCES, "not allowed")

    monkeypatch.setattr(os, "scandir", ill)
    with pytest.raises(PermissionError):
        World().walk(tmp_path)


def test_restoring_over_a_database_is_refused_and_its_write_ahead_log_stays(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = World().database(path)
    database.execute(("CREATE TABLE notes (words TEXT)", ()))
    image = database.image()
    # A connection that stays open keeps what it commits in the write-ahead log, as a process that was killed does.
    with contextlib.closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("INSERT INTO notes VALUES ('kept')")
        writer.commit()
        assert (tmp_path / "ledger.sqlite-wal").stat().st_size > 0
        with pytest.raises(FileExistsError):
            database.restore(image)
        assert (tmp_path / "ledger.sqlite-wal").stat().st_size > 0
    assert database.execute(("SELECT words FROM notes", ())) == [{"words": "kept"}]


def test_pauses_between_tries_double_up_to_the_longest_and_none_follows_the_last() -> None:
    slept: list[float] = []

    class Sleeping(World):
        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    retries = Retries(tries=5, first_s=0.5, longest_s=3.0)
    assert list(retries.attempts(Sleeping())) == [False, False, False, False, True]
    assert slept == [0.5, 1.0, 2.0, 3.0]
    assert retries.pause_s(1, asked_s=2.5) == 2.5
    assert retries.pause_s(1, asked_s=99.0) == 3.0
    assert Retries(tries=3, first_s=1.0).pause_s(10_000) < float("inf")
