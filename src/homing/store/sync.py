"""Sync: the program that moves data between the run directory and the store; started by the agent.

    python -m homing.store.sync --boot boot.json --fetch   fetch inputs from the store, and open weights from the Hub,
                                                           into the work folder, and verify them
                                                 --watch   push changes, and fetch the user's requests, until terminated
                                                 --once    push everything and read it back; exit 0 only on success

Sync is a separate process in the trainer's environment, so that a store that hangs or an SDK that crashes takes down
neither the trainer nor the watchdog. In each mode, sync first checks the run's lease: if a newer lease names another
instance, this instance stops pushing. Exit codes: 0 done, 2 wrong usage, 7 store or hash failure,
file_names.EXIT_SUPERSEDED.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from homing.errors import HomingError, IntegrityError, StoreError, StoreRefused
from homing.redact import RedactedFormatter, redact_crashes
from homing.store import open_store
from homing.store.base import NotInStore, Store, check_key, run_key
from homing.store.hub_download import HubFailed, take_from_hub
from homing.store.push import Pusher
from homing.store.read_lease import Fence
from homing.wire import codec, file_names
from homing.wire.boot_json import Boot, Input
from homing.world import World

__all__ = ["Superseded", "bring_request", "fetch_inputs", "main", "push_once", "watch"]

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
_MISSING_TRIES = 3  # number of tries before a missing input ends the run
_FETCHED = "fetched"  # file in the work folder, written after the fetch, that contains the hash of boot.json


class Superseded(HomingError):
    """Raised if a newer lease names another instance, so that this instance must stop writing to the store."""

    exit_code = file_names.EXIT_SUPERSEDED


def main(argv: Sequence[str] | None = None, world: World | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m homing.store.sync", description="Sync the run directory with the store."
    )
    parser.add_argument("--boot", required=True, help="path of boot.json on this instance")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fetch", action="store_true", help="download and verify the inputs, then exit")
    mode.add_argument("--watch", action="store_true", help="push changes and fetch the user's requests until stopped")
    mode.add_argument("--once", action="store_true", help="push everything, read it back to verify it, then exit")
    args = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactedFormatter("%(asctime)s sync %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    world = world or World()
    try:
        boot = codec.loads(Boot, world.read(args.boot))
        # Never create a missing store again: pushing to a new, empty store would look like success.
        store = open_store(boot.store, world, create=False)
        if not args.watch:  # --watch checks before each pass
            _check_lease_if_readable(boot, store, world)
        if args.fetch:
            fetch_inputs(boot, store, world)
        elif args.once:
            push_once(boot, store, world)
        else:
            watch(boot, store, world)
    except (codec.WireError, OSError) as exc:
        log.error("%s: %s", type(exc).__name__, exc)
        return StoreError.exit_code
    except HomingError as exc:
        log.error("%s", exc)
        return exc.exit_code
    return 0


def fetch_inputs(boot: Boot, store: Store, world: World) -> None:
    """Fetch every input to its path and verify its hash, unless the correct file is already there.

    Files that earlier attempts wrote to the run directory are fetched only once. This attempt then appends to them, or
    deletes them under the retention policy, and fetching them again would undo its work.
    """
    pusher = _pusher(boot, store, world)
    world.mkdir(_run_dir(boot))
    was_done = _is_fetched(boot, world)
    for item in boot.inputs:
        path = os.path.join(boot.work_dir, check_key(item.path))
        if was_done and _is_living(item.path):
            continue
        if world.exists(path) and world.size(path) == item.num_bytes and world.sha256(path) == item.sha256:
            continue
        # The agent and sync may have written events before this fetch. Put them after the earlier, fetched events.
        begun = world.read(path) if item.path == f"run/{file_names.EVENTS}" and world.exists(path) else b""
        if begun and hashlib.sha256(begun[: item.num_bytes]).hexdigest() == item.sha256:
            continue
        world.mkdir(os.path.dirname(path))
        text = f"Fetched {item.path}, {item.num_bytes:,} bytes verified"
        if not _take_kept(boot, item, path, world):
            if item.url:
                text += f", in {_take_from_hub(boot, item, path, pusher):.1f} s from the Hub"
            else:
                _take_from_store(boot, item, path, pusher)
            _keep(boot, item, path, world)
        if begun:
            world.append(path, begun)
        # Write an event, not only a log line, so that the agent's watchdog does not mistake a long fetch for an idle
        # run.
        pusher.event("input_fetched", f"{text}.")
    world.write(os.path.join(boot.work_dir, _FETCHED), _this(boot))


def _take_from_store(boot: Boot, item: Input, path: str, pusher: Pusher) -> None:
    """Fetch one input from the store.

    If the store does not respond, the agent retries. If the store reports that the key is missing or damaged, this
    function tries a few more times, because a replica may lag behind, and then writes an event that ends the run.
    """
    for tries in range(1, _MISSING_TRIES + 1):
        try:
            return pusher.store.get(item.key, path, item.sha256)
        except (NotInStore, IntegrityError) as exc:
            if isinstance(exc, NotInStore):
                wrong, fix = "is not in", "It was deleted."
            else:
                remove = f"homing store rm {item.key} --store {shlex.quote(pusher.store.url)}"
                wrong, fix = "has changed since it was pushed to", f"Remove it: {remove}"
            text = f"Cannot fetch {item.path}: {item.key} {wrong} {pusher.store.url} (try {tries} of {_MISSING_TRIES})."
            log.warning("%s", text)
            if tries == _MISSING_TRIES:
                # This event makes the agent end the run, and no other instance is started, just as if the Hub had
                # refused the weights.
                fix += f" To push it again, run on the computer with the data: homing launch {boot.run_id} --resume"
                pusher.event("input_missing", f"{text} {fix}", stops=boot.mark)
                raise
        pusher.world.sleep(boot.heartbeat_s * 2**tries)


def _take_from_hub(boot: Boot, item: Input, path: str, pusher: Pusher) -> float:
    """Download one input from the Hub and return the number of seconds that it took."""
    since = pusher.world.monotonic()
    try:
        take_from_hub(item, path, pusher.world, pusher.event)
        return pusher.world.monotonic() - since
    except HubFailed as exc:
        # Do not retry, because that would only cost money. `stops` contains this instance's mark, which makes its agent
        # end the run.
        pusher.event("weights_refused", f"{exc.what} {exc.why}", stops=boot.mark)
        raise


def _kept_at(boot: Boot, item: Input) -> str:
    """Return the path of an input's cached copy on the volume, or "" if the input is not cached.

    The volume caches only inputs that the run never changes: token shards and the tokenizer.
    """
    folder = boot.bootstrap.inputs_dir if boot.bootstrap else ""
    return os.path.join(folder, item.sha256) if folder and item.path.startswith("data/") else ""


def _take_kept(boot: Boot, item: Input, path: str, world: World) -> bool:
    kept = _kept_at(boot, item)
    if not kept or not world.exists(kept) or world.sha256(kept) != item.sha256:
        return False
    world.remove(path)
    world.link(kept, path)
    return True


def _keep(boot: Boot, item: Input, path: str, world: World) -> None:
    kept = _kept_at(boot, item)
    if kept:
        world.mkdir(os.path.dirname(kept))
        world.remove(kept)  # remove a damaged copy, if there is one
        world.link(path, kept)


def push_once(boot: Boot, store: Store, world: World) -> None:
    """Push everything and read it back. If anything is missing, raise a HomingError that says what."""
    pusher = _pusher(boot, store, world)
    try:
        bring_request(boot, store, world)
        pusher.push_everything(is_settled=_is_fetched(boot, world))
    except HomingError as exc:
        with contextlib.suppress(OSError):
            if isinstance(exc, StoreRefused):
                _report_refusal(boot, pusher, exc)
            pusher.report_problem(exc.what)
        raise
    log.info("all of %s is in %s, verified", boot.run_id, store.url)


def watch(boot: Boot, store: Store, world: World) -> None:
    """Push changes until terminated. If the store fails, retry at increasing intervals while training continues."""
    pusher = _pusher(boot, store, world)
    fence = _fence(boot, store)
    failures, due_at = 0, world.monotonic()
    while True:
        try:
            _check_lease(boot, fence, pusher)
            bring_request(boot, store, world)
            # Push less often than requests are read: reads are cheap in every store, but a commit every few seconds
            # would exceed the Hub's rate limit.
            if world.monotonic() >= due_at:
                pusher.push_changes(is_settled=_is_fetched(boot, world))
                # Push the agent's first heartbeat without delay, because the user's computer is waiting for it.
                has_spoken = world.exists(os.path.join(_run_dir(boot), file_names.HEARTBEAT))
                due_at = world.monotonic() + (store.pace_s if has_spoken else 0.0)
        except Superseded:
            raise
        except (HomingError, OSError) as exc:
            failures += 1
            _report_failure(boot, pusher, exc, failures)
        else:
            if failures:
                pusher.event(file_names.PUSH_RECOVERED, f"The store is reachable again after {failures} failed tries.")
            failures = 0
        world.sleep(min(boot.heartbeat_s * 2 ** min(failures, 10), max(_LONGEST_WAIT_S, boot.heartbeat_s)))


def bring_request(boot: Boot, store: Store, world: World) -> None:
    """Copy the user's latest request from the store to the file that the agent reads."""
    path = os.path.join(_run_dir(boot), file_names.REQUEST)
    try:
        wanted = store.read(run_key(boot.run_id, file_names.REQUEST))
    except NotInStore:
        return
    if not world.exists(path) or world.read(path) != wanted:
        world.write(path, wanted)
        log.info("fetched a request from the store")


def _fence(boot: Boot, store: Store) -> Fence:
    return Fence(store, boot.run_id, boot.mark, boot.fence)


def _check_lease(boot: Boot, fence: Fence, pusher: Pusher) -> None:
    lease = fence.superseded_by()
    if lease is None:
        return
    text = f"Lease {lease.number} belongs to {lease.owner} on {lease.host} and names {lease.mark or 'no instance'}."
    with contextlib.suppress(OSError):  # this instance must stop pushing even if the disk is full
        pusher.event("superseded", f"{text} {boot.mark} stops pushing.")
    raise Superseded(f"{boot.mark} was superseded.", text, "The new owner resumes the run.")


def _check_lease_if_readable(boot: Boot, store: Store, world: World) -> None:
    """Check the lease, but ignore store errors, because an outage must not make an instance look superseded.

    If the store does not respond, the next operation reports the error.
    """
    try:
        _check_lease(boot, _fence(boot, store), _pusher(boot, store, world))
    except Superseded:
        raise
    except (HomingError, OSError) as exc:
        log.warning("the lease could not be read: %s", exc)


def _is_fetched(boot: Boot, world: World) -> bool:
    path = os.path.join(boot.work_dir, _FETCHED)
    return world.exists(path) and world.read(path) == _this(boot)


def _this(boot: Boot) -> bytes:
    return hashlib.sha256(codec.dumps(boot).encode()).hexdigest().encode()


def _is_living(path: str) -> bool:
    """Return True if the run itself may change or delete this input."""
    return path.startswith("run/") and path not in (f"run/{file_names.RUN}", f"run/{file_names.RUN_FILE}")


def _report_failure(boot: Boot, pusher: Pusher, exc: HomingError | OSError, failures: int) -> None:
    problem = exc.what if isinstance(exc, HomingError) else f"{type(exc).__name__}: {exc}"
    log.warning("try %d failed: %s", failures, exc)
    with contextlib.suppress(OSError):  # a full disk must not terminate the only program that can still push
        if failures == 1:
            pusher.event("push_failing", f"Push failed; retrying: {problem}")
        if isinstance(exc, StoreRefused) and failures & (failures - 1) == 0:
            # Report the refusal at failures 1, 2, 4, 8 and so on. If the store refuses for as long as limits.unsaved,
            # the agent stops the run.
            _report_refusal(boot, pusher, exc)
        pusher.report_problem(problem)


def _report_refusal(boot: Boot, pusher: Pusher, exc: StoreRefused) -> None:
    pusher.event(file_names.STORE_REFUSES, f"The store refused the push: {exc.what} {exc.why}", refused=boot.mark)


def _pusher(boot: Boot, store: Store, world: World) -> Pusher:
    return Pusher(run_dir=_run_dir(boot), run_id=boot.run_id, run_name=boot.run_name, store=store, world=world)


def _run_dir(boot: Boot) -> str:
    return os.path.join(boot.work_dir, "run")


if __name__ == "__main__":
    # The agent ends --watch with SIGTERM. Exit normally, so that no partially written file is left in the store.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    redact_crashes()  # the log is pushed, and a traceback in the log could contain the store's keys
    raise SystemExit(main())
