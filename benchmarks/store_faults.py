"""Nothing damaged loads as good, and a cut line costs at most the part that was on its way.

1. checkpoints in a store, damaged one file at a time (bytes flipped, cut off, swapped, removed; manifests and
   pointers too): what fetch brings home and what a new attempt is given must be, byte for byte, what was pushed
2. uploads to `s3:` through a proxy that cuts the line at random bytes: each ends with the bytes of the file, is
   invisible until it is whole, and sends no more than one part twice for each cut; half of them as one process
   whose SDK tries again, half as a new process each time

python benchmarks/store_faults.py [--quick] [--seed N] [--corruptions N] [--uploads N]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from tests.cloud.rig import make_run  # noqa: E402
from tests.doubles import s3_servers  # noqa: E402
from tests.doubles.proxy import Proxy  # noqa: E402

from _result import write_proof  # noqa: E402
from homing.cloud.artifacts.checkpoints import (  # noqa: E402
    fetch,
    known_hash,
    list_checkpoints,
)
from homing.cloud.home import Home  # noqa: E402
from homing.cloud.launch.resume import resume_inputs  # noqa: E402
from homing.cloud.ledger.ledger import LedgerLine, RunRow  # noqa: E402
from homing.errors import HomingError, StoreError  # noqa: E402
from homing.store import FileStore, Store  # noqa: E402
from homing.store.push import Pusher  # noqa: E402
from homing.store.s3 import client as s3_client  # noqa: E402
from homing.store.s3.store import S3Store  # noqa: E402
from homing.wire import codec, file_names  # noqa: E402
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer  # noqa: E402
from homing.wire.event_lines import Outcome  # noqa: E402
from homing.world import World  # noqa: E402

RUN, NAME, PHASES = "moss-1a2b", "moss", ["pretrain", "mid"]
STEPS = {"pretrain": (100, 200), "mid": (50, 100)}
PART = 5 << 20  # the smallest that S3 takes
OVERHEAD = 64_000  # headers and listings of one try
KINDS = ("flip", "flip", "truncate", "swap", "remove")


class Quick(World):
    """Does not wait between tries."""

    def sleep(self, seconds: float) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 corruptions, 2 uploads, some 10 seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corruptions", type=int)
    parser.add_argument("--uploads", type=int)
    asked = parser.parse_args()
    num_corruptions = asked.corruptions or (60 if asked.quick else 1000)
    num_uploads = asked.uploads or (2 if asked.quick else 40)
    begun, chance = time.monotonic(), random.Random(asked.seed)
    # In memory where there is such a place: a thousand times a few synced files is a disk's afternoon.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="homing-store-", dir=place) as folder:
        damage = corrupt_and_load(Path(folder), num_corruptions, chance)
        print(damage, flush=True)
        cuts = cut_uploads(Path(folder), num_uploads, chance)
        print(cuts, flush=True)
    problems = damage.pop("problems") + cuts.pop("problems")
    for problem in problems[:10]:
        print("problem:", problem)
    passed = not problems
    figures = {"seed": asked.seed, "corruptions": damage, "uploads": cuts, "problems": problems[:10]}
    figures["seconds"] = round(time.monotonic() - begun, 1)
    if not asked.quick:
        write_proof("store_faults", figures, passed=passed)
    verdict = "PASS" if passed else "FAIL"
    print(
        f"{verdict} {damage['count']} corruptions, {damage['loaded_damaged']} loaded as good; "
        f"{cuts['count']} uploads cut {cuts['cuts']} times, {cuts['wrong']} wrong"
    )
    return 0 if passed else 1


# --- damage at rest --------------------------------------------------------------------------------------------------


def corrupt_and_load(folder: Path, count: int, chance: random.Random) -> dict[str, Any]:
    home, row, store = lay_out(folder, chance)
    genuine = {entry.key: store.read(entry.key) for entry in store.list("")}
    targets = sorted(key for key in genuine if f"/{file_names.CHECKPOINTS}/" in key or key.startswith("models/"))
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    problems: list[str] = []
    for number in range(count):
        kind = chance.choice(KINDS)
        key = chance.choice(targets)
        touched = corrupt(store, genuine, targets, key, kind, chance)
        kinds[kind] += 1
        for name, attempt in (("fetch", try_fetch), ("fetch --or-older", try_fetch_older), ("resume", try_resume)):
            end, found = attempt(home, row, store, folder / "model", genuine)
            ends[f"{name}: {end}"] += 1
            problems += [f"{number}: {kind} of {key}: {name}: {problem}" for problem in found]
        problems += [f"{number}: {kind} of {key}: {problem}" for problem in try_get(store, folder, key, genuine)]
        for each in touched:
            store.put_bytes(each, genuine[each])
    return {
        "count": count,
        "files": len(targets),
        "by_kind": dict(kinds),
        "ends": dict(sorted(ends.items())),
        "loaded_damaged": len(problems),
        "problems": problems,
    }


def lay_out(folder: Path, chance: random.Random) -> tuple[Home, RunRow, FileStore]:
    """A run of two phases, pushed by the real pusher; manifests sealed, as the trainer seals them."""
    run_dir = folder / "run"
    for phase, steps in STEPS.items():
        for step in steps:
            write_checkpoint(run_dir, phase, step, chance)
    run = make_run(folder, NAME)
    phases = [dataclasses.replace(run.phases[0], kind=kind) for kind in PHASES]
    (run_dir / file_names.RUN).write_text(codec.dumps(dataclasses.replace(run, id=RUN, phases=phases)))
    (run_dir / file_names.METRICS).write_text('{"step": 1}\n')
    (run_dir / file_names.OUTCOME).write_text(codec.dumps(Outcome("done", "done", 0, "mid", 100, 1.0)))
    store = FileStore(str(folder / "store"), Quick())
    store.put_bytes("objects/begun", b"")  # as a launch does before anything is pushed
    Pusher(str(run_dir), RUN, NAME, store, Quick()).push_everything()
    home = Home(folder / "home", Quick())
    home.world.mkdir(home.path)
    row = RunRow(RUN, NAME, "done", 1.0, store.url, "0" * 64, "1.00")
    home.ledger.intend(row, LedgerLine(f"mark-{RUN}", RUN, NAME, 1, "local", "this", "0.1", "1.00", 1.0))
    return home, row, store


def write_checkpoint(run_dir: Path, phase: str, step: int, chance: random.Random) -> None:
    folder = run_dir / file_names.CHECKPOINTS / phase / file_names.step_dir(step)
    folder.mkdir(parents=True)
    files = []
    for name in (file_names.WEIGHTS, file_names.OPTIMIZER, file_names.STATE, file_names.RUN, file_names.TOKENIZER):
        data = chance.randbytes(chance.randrange(200, 5000))
        (folder / name).write_bytes(data)
        files.append(FileHash(name, len(data), hashlib.sha256(data).hexdigest()))
    manifest = CheckpointManifest(NAME, RUN, phase, step, step * 64, False, "c" * 64, 1, files, val_loss=1.5)
    empty = codec.dumps(manifest, indent=1).encode()
    sealed = dataclasses.replace(manifest, sha256=hashlib.sha256(empty).hexdigest())
    (folder / file_names.MANIFEST).write_bytes(codec.dumps(sealed, indent=1).encode())
    for name in (file_names.LATEST, file_names.BEST):
        (folder.parent / name).write_text(codec.dumps(Pointer(step=step)))


def corrupt(
    store: Store, genuine: dict[str, bytes], targets: list[str], key: str, kind: str, chance: random.Random
) -> list[str]:
    """Damages one file, or two by exchanging them; returns the keys to restore. The new bytes always differ."""
    data = genuine[key]
    if kind == "remove":
        store.delete(key)
    elif kind == "truncate":
        store.put_bytes(key, data[: chance.randrange(len(data))])
    elif kind == "swap":
        # Mostly with its like in another checkpoint: that is the exchange that could be believed.
        alike = [each for each in targets if each.rsplit("/", 1)[1] == key.rsplit("/", 1)[1] and genuine[each] != data]
        other = chance.choice(alike or [each for each in targets if genuine[each] != data])
        store.put_bytes(key, genuine[other])
        store.put_bytes(other, data)
        return [key, other]
    else:
        damaged = bytearray(data)
        for at in chance.sample(range(len(data)), min(len(data), chance.choice((1, 1, 2, 5)))):
            damaged[at] ^= 1 << chance.randrange(8)
        store.put_bytes(key, bytes(damaged))
    return [key]


def try_fetch(
    home: Home, row: RunRow, store: Store, target: Path, genuine: dict[str, bytes], *, or_older: bool = False
) -> tuple[str, list[str]]:
    shutil.rmtree(target, ignore_errors=True)
    try:
        got = fetch(home, row, target, or_older=or_older)
    except HomingError as exc:
        left = ["it was refused, and left a model behind"] if target.exists() else []
        return f"refused ({type(exc).__name__})", left
    prefix = f"runs/{RUN}/{file_names.CHECKPOINTS}/{got.manifest.phase}/{file_names.step_dir(got.manifest.step)}/"
    wanted = {key[len(prefix) :]: data for key, data in genuine.items() if key.startswith(prefix)}
    return "whole", compare(wanted, {path.name: path.read_bytes() for path in target.iterdir()})


def try_fetch_older(*args: Any) -> tuple[str, list[str]]:
    return try_fetch(*args, or_older=True)


def try_resume(home: Home, row: RunRow, store: Store, target: Path, genuine: dict[str, bytes]) -> tuple[str, list[str]]:
    """What the next attempt would find on its disk: every input, brought by its hash."""
    try:
        inputs, _ = resume_inputs(store, RUN, PHASES)
    except HomingError as exc:
        return f"refused ({type(exc).__name__})", []
    found: dict[str, dict[str, bytes]] = {}
    for item in inputs:
        parts = item.path.split("/")
        if len(parts) == 5:
            data = store.read(item.key)
            if hashlib.sha256(data).hexdigest() != item.sha256:
                continue  # the instance refuses it by this very hash
            found.setdefault("/".join(parts[1:4]), {})[parts[4]] = data
    problems = []
    for folder, files in found.items():
        prefix = f"runs/{RUN}/{folder}/"
        wanted = {key[len(prefix) :]: data for key, data in genuine.items() if key.startswith(prefix)}
        problems += compare(wanted, files)
    return f"{len(found)} checkpoints", problems


def try_get(store: Store, folder: Path, key: str, genuine: dict[str, bytes]) -> list[str]:
    """`homing store get` of the file itself, by the hash that the store promises of it."""
    with contextlib.suppress(HomingError):
        sha256 = known_hash(store, key)
        if sha256 is not None:
            store.get(key, str(folder / "one"), sha256)
            # A manifest that was damaged promises another hash; such a checkpoint is refused as a whole.
            promised = {c.folder: c for c in list_checkpoints(store, RUN, PHASES) if not c.problem}
            is_trusted = any(f"/{each}/" in f"/{key}" for each in promised)
            if is_trusted and (folder / "one").read_bytes() != genuine[key]:
                return ["store get brought other bytes"]
    return []


def compare(wanted: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    names_ = [f"{name} differs" for name, data in found.items() if wanted.get(name) != data]
    return names_ + [f"{name} is missing" for name in wanted if name not in found]


# --- lines that are cut ----------------------------------------------------------------------------------------------


def cut_uploads(folder: Path, count: int, chance: random.Random) -> dict[str, Any]:
    import boto3

    os.environ.update(AWS_ACCESS_KEY_ID=s3_servers.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=s3_servers.SECRET_KEY)
    os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/dev/null")
    total = {"count": count, "cuts": 0, "bytes": 0, "bytes_sent": 0, "most_parts_twice_per_cut": 0.0, "wrong": 0}
    problems: list[str] = []
    with s3_servers.moto() as server:
        boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1").create_bucket(Bucket="homing")
        for number in range(count):
            size = chance.randrange(2 * PART + 1, 4 * PART)
            path = folder / "upload"
            path.write_bytes(chance.randbytes(size))
            with Proxy(server.port) as proxy:
                found = one_upload(proxy, path, chance, is_one_process=number % 2 == 0)
            total["cuts"] += proxy.cuts
            total["bytes"] += size
            total["bytes_sent"] += proxy.bytes_up
            extra = (proxy.bytes_up - size - OVERHEAD * (proxy.cuts + 1)) / PART
            if proxy.cuts:
                total["most_parts_twice_per_cut"] = max(total["most_parts_twice_per_cut"], round(extra / proxy.cuts, 3))
            if extra > proxy.cuts:
                found.append(f"{proxy.bytes_up:,} bytes were sent for {size:,} with {proxy.cuts} cuts")
            total["wrong"] += bool(found)
            if number % 10 == 9:
                print(f"  {number + 1} of {count} uploads, {total['cuts']} cuts", flush=True)
            problems += [f"upload {number}: {problem}" for problem in found]
    if not total["cuts"]:
        problems.append("no line was ever cut")
    return {**total, "problems": problems}


def one_upload(proxy: Proxy, path: Path, chance: random.Random, *, is_one_process: bool) -> list[str]:
    """Cut one to three times, then left alone; what is wrong at the end."""
    url, digest = f"s3://homing/u?endpoint={proxy.endpoint}", hashlib.sha256(path.read_bytes()).hexdigest()
    size, num_cuts = path.stat().st_size, chance.randrange(1, 4)
    cuts = [chance.randrange(size) for _ in range(num_cuts)]
    problems: list[str] = []
    attempts, entry = s3_client.ATTEMPTS, None
    try:
        if is_one_process:
            proxy.cut_up_after = cuts
        else:
            s3_client.ATTEMPTS = 1
            for cut in cuts:
                proxy.cut_up_after = [cut]
                with contextlib.suppress(StoreError):
                    entry = S3Store(url, Quick(), part_bytes=PART).put("k", str(path))
                proxy.cut_up_after = []
                problems += look(url, digest)
                if entry is not None:
                    break  # what was left was shorter than the way to the cut
        entry = entry or S3Store(url, Quick(), part_bytes=PART).put("k", str(path))
        proxy.cut_up_after = []
        if entry.sha256 != digest:
            problems.append("put tells another hash")
        problems += look(url, digest) or ([] if S3Store(url, Quick()).exists("k") else ["it is not there"])
        S3Store(url, Quick()).delete("k")
    except HomingError as exc:
        problems.append(str(exc).replace("\n", " "))
    finally:
        s3_client.ATTEMPTS = attempts
    return problems


def look(url: str, digest: str) -> list[str]:
    store = S3Store(url, Quick())
    return ["a half is visible"] if store.exists("k") and store.sha256("k") != digest else []


if __name__ == "__main__":
    raise SystemExit(main())
