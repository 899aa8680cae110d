"""A bucket is a store: the contract on two servers, cuts, bursts, and what its refusals say."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.stores import StoreContract
from tests.doubles.proxy import Proxy
from tests.doubles.s3_servers import Server, free_port
from tests.doubles.toy_world import Hasty
from tests.store.test_download_input_files import reads_of_bringing

from homing.cloud.artifacts.remove_from_store import plan_removal, remove
from homing.cloud.home import Home
from homing.errors import IntegrityError, MissingExtra, StoreError, UsageError
from homing.pip_command import pip_install
from homing.store import NotInStore, Store, open_store
from homing.store.address import parse_s3
from homing.store.s3 import transfer
from homing.store.s3.client import Connection, s3_error
from homing.store.s3.store import S3Store
from homing.store.s3.transfer import sweep
from homing.world import HttpRequest, World

NewBucket = Callable[[Server], str]
PART = 5 << 20  # the smallest that S3 takes
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class TestMoto(StoreContract):
    @pytest.fixture
    def store(self, moto: Server, new_bucket: NewBucket) -> Store:
        return open_store(f"s3://{new_bucket(moto)}/pre/fix?endpoint={moto.endpoint}", World())

    @pytest.fixture
    def unreachable(self, keys: None, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr("homing.store.s3.client.ATTEMPTS", 1)
        return open_store(f"s3://bucket/x?endpoint=http://127.0.0.1:{free_port()}", World())


class TestRclone(StoreContract):
    """Real signatures. It takes both of two exclusive writes, and so it may not hold a lease."""

    @pytest.fixture
    def store(self, rclone: Server, new_bucket: NewBucket) -> Store:
        return open_store(f"s3:{new_bucket(rclone)}?endpoint={rclone.endpoint}", World())

    @pytest.fixture
    def unreachable(self, rclone: Server, keys: None, monkeypatch: pytest.MonkeyPatch) -> Store:
        """Its bucket was deleted: not an empty store."""
        return open_store(f"s3://was-there-once?endpoint={rclone.endpoint}", World())

    def test_one_of_many_creates_what_is_absent(self, store: Store) -> None:
        with pytest.raises(StoreError, match="two computers") as caught:
            store.create_if_absent("lease", b"1")
        assert "If-None-Match" in caught.value.why
        assert not store.exists("lease")
        assert store.list("") == []


@pytest.fixture
def proxy(moto: Server) -> Iterator[Proxy]:
    with Proxy(moto.port) as made:
        yield made


@pytest.fixture
def through(proxy: Proxy, moto: Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store behind the proxy, whose client gives up at the first cut, as a killed process would."""
    monkeypatch.setattr("homing.store.s3.client.ATTEMPTS", 1)
    return S3Store(f"s3://{new_bucket(moto)}/p?endpoint={proxy.endpoint}", Hasty(), part_bytes=PART)


def big_file(folder: Path, num_bytes: int, seed: int = 1) -> Path:
    path = folder / "big"
    path.write_bytes(random.Random(seed).randbytes(num_bytes))
    return path


@pytest.mark.acceptance(39)
@pytest.mark.slow
def test_an_interrupted_upload_resumes_and_resends_at_most_one_part(
    through: S3Store, proxy: Proxy, moto: Server, tmp_path: Path
) -> None:
    path = big_file(tmp_path, 3 * PART + 1000)
    before, num_cuts = proxy.bytes_up, 0
    for cut in (1_000, PART // 2, PART + 300_000, PART, 5):
        proxy.cut_up_after = [cut]
        with pytest.raises(StoreError):
            # A new object each time: it knows what a new process would.
            S3Store(through.url, Hasty(), part_bytes=PART).put("k", str(path))
        assert not proxy.cut_up_after, "it was cut"
        assert not S3Store(through.url, Hasty()).exists("k"), "half is not visible"
        num_cuts += 1
    store = S3Store(through.url, Hasty(), part_bytes=PART)
    entry = store.put("k", str(path))
    assert proxy.bytes_up - before < path.stat().st_size + num_cuts * PART, "a cut costs no more than its part"
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == store.sha256("k")


@pytest.mark.acceptance(39)
@pytest.mark.slow
def test_a_second_try_sends_only_what_is_missing(through: S3Store, proxy: Proxy, tmp_path: Path) -> None:
    path = big_file(tmp_path, 4 * PART)
    sent: list[int] = []

    def stop_at_three(done: int, total: int) -> None:
        sent.append(done)
        if done >= 3 * PART:
            raise KeyboardInterrupt

    through.progress = stop_at_three
    with pytest.raises(KeyboardInterrupt):
        through.put("k", str(path))
    assert not through.exists("k")
    before = proxy.bytes_up
    again = S3Store(through.url, Hasty(), part_bytes=PART)
    again.put("k", str(path))
    assert proxy.bytes_up - before < 1.1 * PART
    assert again.sha256("k") == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_another_file_under_the_same_key_is_never_mixed_with_what_was_begun(through: S3Store, tmp_path: Path) -> None:
    first = big_file(tmp_path, 3 * PART, seed=1)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    through.progress = stop
    with pytest.raises(KeyboardInterrupt):
        through.put("k", str(first))
    second = big_file(tmp_path, 3 * PART, seed=2)
    store = S3Store(through.url, Hasty(), part_bytes=PART)
    entry = store.put("k", str(second))
    assert store.sha256("k") == entry.sha256 == hashlib.sha256(second.read_bytes()).hexdigest()


def test_a_file_that_grows_is_pushed_as_long_as_it_was_at_the_start(through: S3Store, tmp_path: Path) -> None:
    path = big_file(tmp_path, 2 * PART)
    before = path.read_bytes()

    def grow(done: int, total: int) -> None:
        with open(path, "ab") as file:
            file.write(b"more")

    through.progress = grow
    entry = through.put("k", str(path))
    assert entry.num_bytes == len(before)
    assert entry.sha256 == hashlib.sha256(before).hexdigest() == through.sha256("k")


@pytest.mark.slow
def test_uploads_idle_for_a_day_are_aborted(through: S3Store) -> None:
    class NextWeek(World):
        def now(self) -> float:
            return super().now() + 7 * 86_400

    client, bucket = through.connection.client, through.address.bucket
    made = client.create_multipart_upload(Bucket=bucket, Key="p/old")
    client.upload_part(Bucket=bucket, Key="p/old", UploadId=made["UploadId"], PartNumber=1, Body=b"x" * PART)
    client.create_multipart_upload(Bucket=bucket, Key="elsewhere/old")
    assert sweep(through.connection, World()) == 0, "its last part is of today"
    assert sweep(through.connection, NextWeek()) == 1, "below our prefix only"
    assert [u["Key"] for u in client.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["elsewhere/old"]


def test_what_was_pushed_in_part_goes_with_the_folder_that_a_person_removes(through: S3Store, tmp_path: Path) -> None:
    # Of a machine that was taken away during an upload: no list shows it, and it is billed for ever.
    client, bucket = through.connection.client, through.address.bucket
    for key in ("p/runs/moss-1/checkpoints/x", "p/runs/moss-10/checkpoints/x"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    through.put_bytes("runs/moss-1/metrics.jsonl", b"{}")
    home = Home(tmp_path / "home", World())
    remove(through, plan_removal(through, "runs/moss-1", home))
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert left == ["p/runs/moss-10/checkpoints/x"]


def test_deleting_neighboring_keys_does_not_abort_uploads_of_another_home(through: S3Store, tmp_path: Path) -> None:
    # Its first launch: until the inputs are there, no record in the store tells of it.
    client, bucket = through.connection.client, through.address.bucket
    client.create_multipart_upload(Bucket=bucket, Key=f"p/objects/{'b' * 64}")
    through.put_bytes(f"objects/{'a' * 64}", b"{}")
    remove(through, plan_removal(through, "objects", Home(tmp_path / "home", World())))
    assert through.list("objects") == []
    assert len(client.list_multipart_uploads(Bucket=bucket)["Uploads"]) == 1


def test_an_interrupted_get_resumes_by_range(through: S3Store, proxy: Proxy, tmp_path: Path) -> None:
    path = big_file(tmp_path, 3 * PART)
    digest = through.put("k", str(path)).sha256
    fresh = S3Store(through.url, Hasty(), part_bytes=PART)
    proxy.cut_down_after = [PART, 2 * PART, PART // 3]
    assert fresh.sha256("k") == digest
    assert proxy.cuts >= 1


def test_a_killed_get_resumes_in_the_next_process(through: S3Store, tmp_path: Path) -> None:
    path = big_file(tmp_path, 3 * PART)
    digest = through.put("k", str(path)).sha256
    target, asked = tmp_path / "target", []

    def stop(done: int, total: int) -> None:
        asked.append(done)
        if done > PART:
            raise KeyboardInterrupt

    through.progress = stop
    with pytest.raises(KeyboardInterrupt):
        through.get("k", str(target), digest)
    assert not target.exists()
    again = S3Store(through.url, Hasty())
    seen: list[int] = []
    again.progress = lambda done, total: seen.append(done)
    again.get("k", str(target), digest)
    assert seen[0] > PART, "it began where the other ended"
    assert target.read_bytes() == path.read_bytes()
    assert list(tmp_path.glob("target.part-*")) == []


@pytest.mark.parametrize("is_hash_known", [True, False])
def test_a_first_part_that_was_damaged_after_a_kill_is_not_gone_on_with(
    through: S3Store, tmp_path: Path, is_hash_known: bool
) -> None:
    # A computer that lost its power may leave zeros where the beginning was; only a hash tells, where one is known.
    path = big_file(tmp_path, 3 * PART)
    digest = through.put("k", str(path)).sha256
    target = tmp_path / "target"
    begun = Path(through._temporary_path(str(target), "k", through._head("k")))
    begun.write_bytes(bytes(PART + 1))
    through.get("k", str(target), digest if is_hash_known else None)
    assert target.read_bytes() == path.read_bytes()
    assert list(tmp_path.glob("target.part-*")) == []


def test_damage_in_the_store_itself_is_reported_as_such(through: S3Store, tmp_path: Path) -> None:
    through.put_bytes("k", b"other bytes")
    begun = Path(through._temporary_path(str(tmp_path / "target"), "k", through._head("k")))
    begun.write_bytes(b"other")
    with pytest.raises(IntegrityError, match="is corrupt"):
        through.get("k", str(tmp_path / "target"), "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_burst_of_503_is_waited_out(proxy: Proxy, moto: Server, new_bucket: NewBucket) -> None:
    store = S3Store(f"s3://{new_bucket(moto)}?endpoint={proxy.endpoint}", World())
    proxy.answers = [SLOW_DOWN] * 2
    store.put_bytes("k", b"through")
    proxy.answers = [SLOW_DOWN]
    assert store.read("k") == b"through"
    assert proxy.answers == []


def test_a_lost_answer_to_an_exclusive_write_is_distinguished_from_a_lost_race(
    proxy: Proxy, moto: Server, new_bucket: NewBucket
) -> None:
    store = S3Store(f"s3://{new_bucket(moto)}?endpoint={proxy.endpoint}", World())
    assert store.is_exclusive()
    fresh = S3Store(store.url, World())
    fresh._is_exclusive = True
    proxy.cut_down_after = [0]  # the write happens, its answer is lost, the SDK tries again and meets its own
    assert fresh.create_if_absent("lease", b"mine")
    assert proxy.cuts == 1
    assert not fresh.create_if_absent("lease", b"mine"), "the same bytes by another are not the same maker"


def test_a_file_damaged_at_rest_does_not_hide_behind_a_checksum(
    rclone: Server, new_bucket: NewBucket, tmp_path: Path
) -> None:
    bucket = new_bucket(rclone)
    store = open_store(f"s3://{bucket}/x?endpoint={rclone.endpoint}", World())
    source = tmp_path / "source"
    source.write_bytes(b"a" * 10_000)
    entry = store.put("k", str(source))
    assert rclone.folder is not None
    (rclone.folder / bucket / "x/k").write_bytes(b"a" * 9_999 + b"b")
    assert store.sha256("k") != entry.sha256


@pytest.mark.acceptance(33)
def test_a_file_that_is_brought_is_read_once(
    moto: Server, new_bucket: NewBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    plain = transfer._open_range

    def open_range(connection: Connection, key: str, offset: int) -> Any:
        opened.append(key)
        return plain(connection, key, offset)

    monkeypatch.setattr(transfer, "_open_range", open_range)
    url = f"s3://{new_bucket(moto)}/en?endpoint={moto.endpoint}"
    assert reads_of_bringing(url, tmp_path, lambda: len(opened)) == [1, 1, 1]


@pytest.mark.parametrize(
    ("variable", "value", "code", "says"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong-secret-key", "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "AKIDNOBODYKNOWS", "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_keys_are_reported_with_their_source_and_never_shown(
    rclone: Server,
    new_bucket: NewBucket,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    code: str,
    says: str,
) -> None:
    bucket = new_bucket(rclone)
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError) as caught:
        open_store(f"s3://{bucket}?endpoint={rclone.endpoint}", World()).list("")
    assert code in caught.value.why
    assert "the environment" in caught.value.why
    assert says in caught.value.fix
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_no_keys_at_all_names_where_they_are_looked_for(
    moto: Server, keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError) as caught:
        open_store(f"s3://bucket?endpoint={moto.endpoint}", World()).list("")
    assert "No complete credentials" in caught.value.why
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix


def test_an_absent_bucket_is_not_an_absent_key(moto: Server, keys: None) -> None:
    store = open_store(f"s3://missing-bucket?endpoint={moto.endpoint}", World())
    for call in (lambda: store.exists("k"), lambda: store.read("k"), lambda: store.list("")):
        with pytest.raises(StoreError, match="missing-bucket") as caught:
            call()
        assert not isinstance(caught.value, NotInStore)
        assert "has no bucket" in caught.value.why


def test_the_endpoint_may_come_from_the_environment(
    moto: Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(moto)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.endpoint)
    store = open_store(f"s3:{bucket}/x", World())
    store.put_bytes("k", b"1")
    assert store.read("k") == b"1"
    assert store.url == f"s3://{bucket}/x"


def test_a_list_longer_than_a_page_is_whole(
    moto: Server, new_bucket: NewBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(f"s3://{new_bucket(moto)}?endpoint={moto.endpoint}", World())
    real = store.connection.client.get_paginator

    def small_pages(name: str) -> object:
        paginator = real(name)
        pages = paginator.paginate
        paginator.paginate = lambda **call: pages(**call, PaginationConfig={"PageSize": 2})
        return paginator

    monkeypatch.setattr(store.connection.client, "get_paginator", small_pages)
    for number in range(7):
        store.put_bytes(f"a/{number}", b"")
    assert len(store.list("a/")) == 7


@pytest.mark.parametrize(
    "url", ["s3://B/x", "s3://ab", "s3://bucket/a//b", "s3://bucket?endpoint=ftp://x", "s3://bucket?x=1"]
)
def test_an_address_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a valid s3 address"):
        open_store(url, World())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError) as caught:
        open_store("s3://bucket", World()).list("")
    assert pip_install("aws") in caught.value.fix


def test_a_machine_with_nothing_installed_can_put_one_object_by_its_address(
    rclone: Server, new_bucket: NewBucket
) -> None:
    store = S3Store(f"s3://{new_bucket(rclone)}/pre?endpoint={rclone.endpoint}", World())
    url = store.put_url("runs/x/logs/boot.log", 60.0)
    assert World().http(HttpRequest("PUT", url, body=b"Stage disk failed")).status == 200
    assert store.read("runs/x/logs/boot.log") == b"Stage disk failed"
    other = url.replace("boot.log", "other.log")
    assert World().http(HttpRequest("PUT", other, body=b"x")).status == 403, "this key and no other"


@pytest.mark.acceptance(43)
@pytest.mark.parametrize(("operation", "code"), [("PutObject", "AccessDenied"), ("HeadBucket", "403")])
def test_access_denied_names_the_missing_permission_and_a_command_to_test_it(operation: str, code: str) -> None:
    from botocore.exceptions import ClientError

    exc = ClientError({"Error": {"Code": code, "Message": "Access Denied"}}, operation)
    error = s3_error(exc, parse_s3("s3://moss-bucket/runs?region=eu-west-1"), "written", "k")
    assert f"are not allowed to do this in moss-bucket: {operation}. ({code})" in error.why
    assert "s3:ListBucket, GetObject, PutObject, DeleteObject" in error.fix
    assert error.fix.endswith("then check: homing store ls --store 's3://moss-bucket/runs?region=eu-west-1'")


@pytest.mark.parametrize("do", ["list", "read", "exists", "delete"])
def test_without_the_sdk_every_call_names_the_extra_and_nothing_else(do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("boto3", "botocore", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match="needs the extra `aws`"):
        getattr(S3Store("s3://nowhere/p", World()), do)("k")
