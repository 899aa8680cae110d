"""The program between the run directory and the store; the agent starts it, in the trainer's environment.

    python -m homing.store.sync --boot boot.json --fetch   inputs from the store, and open weights from the Hub, to the
                                                           work folder, verified
                                                 --watch   push what changes and bring requests, until told to end
                                                 --once    push everything and read it back; exit 0 only if all is there

A process of its own, so that a store that hangs or an SDK that crashes takes neither trainer nor watchdog with it.
Before each of these it looks at the run's lease: when a newer one names another instance, this one pushes nothing more.
Exit codes: 0 done, 2 called wrongly, 7 the store or a hash failed, names.EXIT_SUPERSEDED.
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
from homing.store.from_hub import HubFailed, take_from_hub
from homing.store.lease import Fence
from homing.store.push import Pusher
from homing.wire import codec, names
from homing.wire.boot import Boot, Input
from homing.world import World

__all__ = ["Superseded", "bring_request", "fetch_inputs", "main", "push_once", "watch"]

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
_MISSING_TRIES = 3  # before an input that the store does not have is given up, and the run with it
_FETCHED = "fetched"  # in the work folder: which boot.json has had its inputs brought


class Superseded(HomingError):
    """A newer lease names another instance: what this one has must not reach the store any more."""

    exit_code = names.EXIT_SUPERSEDED


def main(argv: Sequence[str] | None = None, world: World | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m homing.store.sync", description="Run directory <-> store.")
    parser.add_argument("--boot", required=True, help="boot.json of this instance")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--fetch", action="store_true", help="bring the inputs, verified, and end")
    mode.add_argument("--watch", action="store_true", help="push changes and bring requests until ended")
    mode.add_argument("--once", action="store_true", help="push everything, read it back, and end")
    args = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactedFormatter("%(asctime)s sync %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    world = world or World()
    try:
        boot = codec.loads(Boot, world.read(args.boot))
        # A store that is gone must stay gone: making a new empty one here would look like success.
        store = open_store(boot.store, world, create=False)
        if not args.watch:  # which looks before each pass
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
    """Every input at its place with its hash; what is right already is left alone, so a restart costs little.

    What an earlier attempt left in the run directory is brought once: from then on it is this attempt's own, grown or
    dropped by retention, and bringing it again would undo work.
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
        # Agent and sync have begun to append before the history arrives; it goes before their lines, not over them.
        begun = world.read(path) if item.path == f"run/{names.EVENTS}" and world.exists(path) else b""
        if begun and hashlib.sha256(begun[: item.num_bytes]).hexdigest() == item.sha256:
            continue
        world.mkdir(os.path.dirname(path))
        told = f"{item.path} is here, {item.num_bytes:,} bytes verified"
        if not _take_kept(boot, item, path, world):
            if item.url:
                told += f", in {_take_from_hub(boot, item, path, pusher):.1f} s from the Hub"
            else:
                _take_from_store(boot, item, path, pusher)
            _keep(boot, item, path, world)
        if begun:
            world.append(path, begun)
        # An event and not only a log line: to the agent's watchdog a long fetch that moves is not idle.
        pusher.event("input_fetched", f"{told}.")
    world.write(os.path.join(boot.work_dir, _FETCHED), _this(boot))


def _take_from_store(boot: Boot, item: Input, path: str, pusher: Pusher) -> None:
    """A store that does not answer is waited for by the agent; one that says that it has no such key is asked again,
    for a list or a copy of it may be late, and then believed."""
    for tries in range(1, _MISSING_TRIES + 1):
        try:
            return pusher.store.get(item.key, path, item.sha256)
        except (NotInStore, IntegrityError) as exc:
            if isinstance(exc, NotInStore):
                wrong, fix = "is not in", "Somebody removed it."
            else:
                remove = f"homing store rm {item.key} --store {shlex.quote(pusher.store.url)}"
                wrong, fix = "has other content than it was pushed with in", f"Remove it: {remove}"
            text = f"{item.path} cannot be had: {item.key} {wrong} {pusher.store.url}, try {tries} of {_MISSING_TRIES}."
            log.warning("%s", text)
            if tries == _MISSING_TRIES:
                # As with weights that the Hub refuses: the agent ends the run with these words, and no other begins.
                fix += f" Where its data is: homing launch {boot.run_id} --resume pushes it again."
                pusher.event("input_missing", f"{text} {fix}", stops=boot.mark)
                raise
        pusher.world.sleep(boot.heartbeat_s * 2**tries)


def _take_from_hub(boot: Boot, item: Input, path: str, pusher: Pusher) -> float:
    """How many seconds it took."""
    since = pusher.world.monotonic()
    try:
        take_from_hub(item, path, pusher.world, pusher.event)
        return pusher.world.monotonic() - since
    except HubFailed as exc:
        # Trying again would bill for nothing: the agent stops for an event that names its mark, and says these words.
        pusher.event("weights_refused", f"{exc.what} {exc.why}", stops=boot.mark)
        raise


def _kept_at(boot: Boot, item: Input) -> str:
    """Only what the run never writes to: shards and tokenizer, not its own checkpoints and logs."""
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
        world.remove(kept)  # one that was damaged
        world.link(path, kept)


def push_once(boot: Boot, store: Store, world: World) -> None:
    """Everything pushed and read back, or a HomingError that says what is not there."""
    pusher = _pusher(boot, store, world)
    try:
        bring_request(boot, store, world)
        pusher.push_everything(is_settled=_is_fetched(boot, world))
    except HomingError as exc:
        with contextlib.suppress(OSError):
            if isinstance(exc, StoreRefused):
                _tell_refusal(boot, pusher, exc)
            pusher.tell_problem(exc.what)
        raise
    log.info("all of %s is in %s, verified", boot.run_id, store.url)


def watch(boot: Boot, store: Store, world: World) -> None:
    """Until ended from outside. A failing store is waited for, longer each time; training goes on meanwhile."""
    pusher = _pusher(boot, store, world)
    fence = _fence(boot, store)
    failures, due_at = 0, world.monotonic()
    while True:
        try:
            _check_lease(boot, fence, pusher)
            bring_request(boot, store, world)
            # Asking is cheap everywhere, writing is not: a commit every few seconds would drown the Hub.
            if world.monotonic() >= due_at:
                pusher.push_changes(is_settled=_is_fetched(boot, world))
                # The first word of the agent is waited for at home, with the meter running.
                has_spoken = world.exists(os.path.join(_run_dir(boot), names.HEARTBEAT))
                due_at = world.monotonic() + (store.pace_s if has_spoken else 0.0)
        except Superseded:
            raise
        except (HomingError, OSError) as exc:
            failures += 1
            _tell_failure(boot, pusher, exc, failures)
        else:
            if failures:
                pusher.event(names.PUSH_RECOVERED, f"The store answers again after {failures} failed tries.")
            failures = 0
        world.sleep(min(boot.heartbeat_s * 2 ** min(failures, 10), max(_LONGEST_WAIT_S, boot.heartbeat_s)))


def bring_request(boot: Boot, store: Store, world: World) -> None:
    """What home wants, from the store to where the agent looks."""
    path = os.path.join(_run_dir(boot), names.REQUEST)
    try:
        wanted = store.read(run_key(boot.run_id, names.REQUEST))
    except NotInStore:
        return
    if not world.exists(path) or world.read(path) != wanted:
        world.write(path, wanted)
        log.info("brought a request from home")


def _fence(boot: Boot, store: Store) -> Fence:
    return Fence(store, boot.run_id, boot.mark, boot.fence)


def _check_lease(boot: Boot, fence: Fence, pusher: Pusher) -> None:
    lease = fence.superseded_by()
    if lease is None:
        return
    text = f"The home {lease.owner} on {lease.host} holds lease {lease.number}, for {lease.mark or 'no instance'}."
    with contextlib.suppress(OSError):  # a full disk must not let it go on
        pusher.event("superseded", f"{text} {boot.mark} pushes nothing more.")
    raise Superseded(f"{boot.mark} was superseded.", text, "Its new owner goes on with the run.")


def _check_lease_if_readable(boot: Boot, store: Store, world: World) -> None:
    """A store that cannot be read supersedes nobody: what comes next finds out whether it answers."""
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
    """Whether the run itself goes on writing, or deleting, this input."""
    return path.startswith("run/") and path not in (f"run/{names.RUN}", f"run/{names.RUN_FILE}")


def _tell_failure(boot: Boot, pusher: Pusher, exc: HomingError | OSError, failures: int) -> None:
    problem = exc.what if isinstance(exc, HomingError) else f"{type(exc).__name__}: {exc}"
    log.warning("try %d failed: %s", failures, exc)
    with contextlib.suppress(OSError):  # a full disk must not end the one program that could still push
        if failures == 1:
            pusher.event("push_failing", f"Pushing fails and is tried again: {problem}")
        if isinstance(exc, StoreRefused) and failures & (failures - 1) == 0:
            # Told at the first try and now and then: the agent stops the run after limits.unsaved of this.
            _tell_refusal(boot, pusher, exc)
        pusher.tell_problem(problem)


def _tell_refusal(boot: Boot, pusher: Pusher, exc: StoreRefused) -> None:
    pusher.event(names.STORE_REFUSES, f"The store refuses: {exc.what} {exc.why}", refused=boot.mark)


def _pusher(boot: Boot, store: Store, world: World) -> Pusher:
    return Pusher(run_dir=_run_dir(boot), run_id=boot.run_id, run_name=boot.run_name, store=store, world=world)


def _run_dir(boot: Boot) -> str:
    return os.path.join(boot.work_dir, "run")


if __name__ == "__main__":
    # The agent ends --watch with SIGTERM: leave by the front door, so that no half-written file stays in the store.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    redact_crashes()  # its log is pushed to the store, and it holds the keys to it
    raise SystemExit(main())
