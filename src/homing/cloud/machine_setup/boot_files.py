"""Builds what an instance needs to start: the agent's zip, the inputs (stored by hash), and boot.json.

    build_agent_zip    agent + wire + world -> one file that a bare Python 3.8 can run; reproducible bytes
    prepare_inputs     tokenizer, shards, run.json, run.yaml -> objects/<sha256>; skips objects that already exist,
                       and files that the instance fetches from the Hub itself
    make_boot          all instructions for the agent, without any secret

The instance's work folder then contains agent.zip, boot.json, run/ (the run directory) and data/.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

import homing
from homing import progress
from homing.cloud.artifacts.hub_weights import is_from_hub, url_of
from homing.cloud.commands_to_type import Words
from homing.cloud.launch.inputs import DATA_DIR, TOKENIZER_EXTRAS, object_key, push_object, relocated
from homing.errors import DataError, IntegrityError, StoreError
from homing.store.base import Store, unwatched
from homing.units import counted
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, EndBilling, Input
from homing.wire.run_json import Run, RunInput
from homing.wire.shard_manifest import DataManifest
from homing.world import PathLike, World

__all__ = ["AGENT_ZIP", "agent_argv", "build_agent_zip", "make_boot", "prepare_inputs", "sync_argv", "trainer_argv"]

AGENT_ZIP = "agent.zip"
RUN_DIR = "run"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same source gives the same bytes; no zip can have an older date
# Exactly the files that the agent imports. The agent must stay small enough to read in one sitting; a test counts the
# lines.
_ZIP_WIRE = (
    "boot_json_agent",
    "codec",
    "control_files",
    "event_lines",
    "guard_timing",
    "instance_file_names",
)
_ZIP_PARTS = ("instance/agent", *(f"wire/{name}.py" for name in _ZIP_WIRE), "world/machine.py")
_ZIP_MAIN = "from homing.instance.agent.__main__ import main\n\nraise SystemExit(main())\n"


def build_agent_zip(path: PathLike, world: World) -> str:
    """Write the zip that `python3 -I agent.zip boot.json` starts, and return its sha256."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in _agent_files(world):
            info = zipfile.ZipInfo(name, date_time=_ZIP_TIME)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    world.write(path, buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def prepare_inputs(
    run: Run,
    data_dir: PathLike,
    store: Store,
    world: World,
    *,
    run_file_text: str = "",
    words: Words | None = None,
) -> list[Input]:
    """Push the files that training needs to objects/<sha256>; return where each file belongs on the instance.

    `run` must have its id. In run.json the data folder is `../data`, because on the instance it is next to the run
    directory.
    """
    assert run.id, "inputs are prepared for a launched run, which has an id"
    there = relocated(run)
    documents = {f"{RUN_DIR}/{file_names.RUN}": codec.dumps(there, indent=1).encode()}
    if run_file_text:
        documents[f"{RUN_DIR}/{file_names.RUN_FILE}"] = run_file_text.encode()
    files = list(_data_files(os.fspath(data_dir), run, store, world, words or Words(run.name)))
    inputs = [_push_bytes(path, data, store) for path, data in documents.items()]
    return inputs + _push_files(files, store, world)


def make_boot(
    run: Run,
    *,
    mark: str,
    attempt: int,
    work_dir: PathLike,
    inputs: Sequence[Input],
    python: str,
    end_billing: EndBilling,
    started_at: float,
    rate_usd_per_hour: Decimal,
    spend_limit_usd: Decimal | None,
    spent_before_usd: Decimal = Decimal(0),
    heartbeat_s: float = 5.0,
    stop_grace_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Boot:
    """Return boot.json for one attempt. `python` is an interpreter on the instance that has homing and torch."""
    return Boot(
        run_id=run.id,
        run_name=run.name,
        mark=mark,
        attempt=attempt,
        work_dir=os.fspath(work_dir),
        store=run.store,
        inputs=list(inputs),
        trainer_argv=trainer_argv(python, work_dir),
        sync_argv=sync_argv(python, work_dir),
        agent_argv=agent_argv(python, work_dir),
        lookout_argv=[python, "-m", "homing.instance.alerts", os.path.join(os.fspath(work_dir), file_names.BOOT)],
        end_billing=end_billing,
        started_at=started_at,
        rate_usd_per_hour=str(rate_usd_per_hour),
        spent_before_usd=str(spent_before_usd),
        spend_limit_usd=None if spend_limit_usd is None else str(spend_limit_usd),
        time_limit_s=run.limits.time_s,
        idle_limit_s=run.limits.idle_s,
        unsaved_limit_s=run.limits.unsaved_s,
        stall_factor=run.limits.stall_factor,
        heartbeat_s=heartbeat_s,
        stop_grace_s=stop_grace_s,
        env=dict(env or {}),
    )


def agent_argv(python: str, work_dir: PathLike) -> list[str]:
    """Return the instance's first command, which the dead-man process also uses to restart an agent that has died."""
    return [
        python,
        "-I",
        os.path.join(os.fspath(work_dir), AGENT_ZIP),
        os.path.join(os.fspath(work_dir), file_names.BOOT),
    ]


def trainer_argv(python: str, work_dir: PathLike) -> list[str]:
    return [python, "-m", "homing.lm.train", os.path.join(os.fspath(work_dir), RUN_DIR)]


def sync_argv(python: str, work_dir: PathLike) -> list[str]:
    """Return the sync command, to which the agent appends --fetch, --watch or --once."""
    return [python, "-m", "homing.store.sync", "--boot", os.path.join(os.fspath(work_dir), file_names.BOOT)]


def _agent_files(world: World) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file in the zip, sorted, so that folder order does not affect the hash."""
    package = os.path.dirname(os.path.abspath(homing.__file__))
    # homing/__init__.py is the public API and may import modules that are not in the zip, so the zip gets a
    # stub. wire and world get stubs too, because their docstrings describe modules that are not in the zip.
    yield "__main__.py", _ZIP_MAIN.encode()
    yield "homing/__init__.py", f'__version__ = "{homing.__version__}"\n'.encode()
    yield "homing/instance/__init__.py", b""
    yield "homing/wire/__init__.py", b""
    yield "homing/world/__init__.py", b""
    for part in _ZIP_PARTS:
        source = os.path.join(package, part)
        found = world.walk(source) if world.is_dir(source) else [""]
        for name in found:
            if name == "" or name.endswith(".py"):
                yield f"homing/{part}/{name}".rstrip("/"), world.read(os.path.join(source, name) if name else source)


def _data_files(data_dir: str, run: Run, store: Store, world: World, words: Words) -> list[RunInput]:
    """Return the files of the instance's data folder: prepared text, tokenizer and the run's other inputs.

    A file that is not on this computer may be in the store under its hash, like the shards of an adopted run.
    """
    own = _own_files(data_dir, run, world, words)
    files = [RunInput(name, os.path.join(data_dir, name), sha256) for name, sha256 in own]
    files += [file for file in run.inputs if file.path not in {own.path for own in files}]
    sent = [file for file in files if not is_from_hub(file)]
    missing = [file.path for file in sent if not world.exists(file.source) and not _is_stored(file.sha256, store)]
    if missing:
        raise DataError(
            what=f"Prepared files for {run.name} are missing.",
            why=f"These files are neither in {data_dir} nor in the store: {', '.join(missing)}",
            fix=words.to("prep"),
        )
    return files


def _own_files(data_dir: str, run: Run, world: World, words: Words) -> Iterator[tuple[str, str]]:
    """Yield the name and sha256 of each tokenizer file and shard, after checking that the run was planned with them."""
    for name in TOKENIZER_EXTRAS:
        if world.exists(os.path.join(data_dir, name)):
            yield name, world.sha256(os.path.join(data_dir, name))
    if not run.data.manifest_sha256 and run.data.tokenizer_sha256:
        yield file_names.TOKENIZER, run.data.tokenizer_sha256  # no shared text: each phase has its own data
        return
    manifest_path = os.path.join(data_dir, file_names.MANIFEST)
    if not world.exists(manifest_path):
        raise DataError(
            what=f"{run.name} has no prepared data.",
            why=f"{manifest_path} does not exist.",
            fix=words.to("prep"),
        )
    text = world.read(manifest_path)
    digest = hashlib.sha256(text).hexdigest()
    if run.data.manifest_sha256 and digest != run.data.manifest_sha256:
        raise DataError(
            what=f"{run.name}'s data changed after the run was planned.",
            why=f"{manifest_path} has sha256 {digest}, but the run was planned with {run.data.manifest_sha256}.",
            fix=f"Plan again: {words.to('plan')}",
        )
    try:
        manifest = codec.loads(DataManifest, text)
    except codec.WireError as exc:
        raise DataError(f"{manifest_path} cannot be read.", str(exc), words.to("prep")) from exc
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    yield from [(file_names.MANIFEST, digest), (file_names.TOKENIZER, manifest.tokenizer_sha256)]
    yield from ((name, sha256) for shard in shards for name, _, sha256 in shard.files())


def _push_bytes(path: str, data: bytes, store: Store) -> Input:
    digest = push_object(store, data)
    return Input(key=object_key(digest), path=path, num_bytes=len(data), sha256=digest)


def _push_files(files: list[RunInput], store: Store, world: World) -> list[Input]:
    """Push the files that the store lacks in as few writes as possible, because each write to the Hub is a commit."""
    missing: dict[str, str] = {}
    sizes, hashed = {file.source: world.size(file.source) for file in files if world.exists(file.source)}, 0
    for file in files:
        progress.report("Checking the hashes of the inputs", hashed, sum(sizes.values()))
        hashed += sizes.get(file.source, 0)
        key = f"{file_names.STORE_OBJECTS}/{file.sha256}"
        if not is_from_hub(file) and key not in missing and not store.exists(key):
            _check_hash(file.source, file.sha256, world)
            missing[key] = file.source
    pairs, pushed = list(missing.items()), 0
    all_bytes = sum(sizes[source] for _, source in pairs)
    for start in range(0, len(pairs), store.batch_files):
        before = pushed

        def report(done: int, total: int, before: int = before) -> None:
            progress.report(f"Pushing {counted(len(pairs), 'input')}", before + done, all_bytes)

        store.progress = report
        report(0, 0)
        try:
            store.put_many(pairs[start : start + store.batch_files])
        finally:
            store.progress = unwatched  # what is pushed later is not one of the inputs
        pushed += sum(sizes[source] for _, source in pairs[start : start + store.batch_files])
    progress.finished()
    return [_input(file, store, world) for file in files]


def _check_hash(source: str, sha256: str, world: World) -> None:
    """Raise IntegrityError if the file does not match its hash, because no later push would correct the stored file."""
    digest = world.sha256(source)
    if digest != sha256:
        raise IntegrityError(
            what=f"{source} does not match its manifest.",
            why=f"Its sha256 is {digest}, but the manifest says {sha256}.",
            fix="Delete it and prepare again: homing prep RUN",
        )


def _input(file: RunInput, store: Store, world: World) -> Input:
    if is_from_hub(file):
        url = url_of(file, world.environment())
        return Input("", f"{DATA_DIR}/{file.path}", file.num_bytes, file.sha256, url=url)
    key, is_here = f"{file_names.STORE_OBJECTS}/{file.sha256}", world.exists(file.source)
    num_bytes = world.size(file.source) if is_here else next(e.num_bytes for e in store.list(key))
    return Input(key=key, path=f"{DATA_DIR}/{file.path}", num_bytes=num_bytes, sha256=file.sha256)


def _is_stored(sha256: str, store: Store) -> bool:
    try:
        return store.exists(f"{file_names.STORE_OBJECTS}/{sha256}")
    except StoreError:
        return False  # the store cannot be queried, so the file counts as missing unless it is on this computer
