"""The planted mistakes of mutants.py: one safety line each, with the tests that should notice first."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # stands exactly once in the file
    new: str
    tests: tuple[str, ...]
    is_quick: bool = False


_CLOUD = "src/homing/cloud"
_LAUNCH = ("tests/cloud/test_launch.py",)

MUTANTS = [
    # --- ledger order ---
    Mutant(
        "create-before-begin",
        f"{_CLOUD}/launch.py",
        "    home.ledger.begin_create(draft.mark, request.order.boot.started_at)\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "id-not-recorded",
        f"{_CLOUD}/launch.py",
        "    home.ledger.update(draft.mark, instance_id=instance.id, state=instance.state, billing=instance.billing)\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "no-undo",
        f"{_CLOUD}/launch.py",
        "        _undo(draft, home, exc, tell)\n",
        "",
        _LAUNCH,
    ),
    Mutant(
        "other-rate-accepted",
        f"{_CLOUD}/launch.py",
        "    if instance.rate_usd_per_hour != draft.order.offer.rate_usd_per_hour:\n",
        "    if False:\n",
        _LAUNCH,
    ),
    Mutant(
        "lines-may-be-deleted",
        f"{_CLOUD}/ledger.py",
        "BEGIN SELECT RAISE(ABORT, 'ledger lines are never deleted'); END",
        "BEGIN SELECT 1; END",
        ("tests/cloud/test_ledger.py",),
        is_quick=True,
    ),
    Mutant(
        "begin-after-destroy",
        f"{_CLOUD}/ledger.py",
        " AND created_at IS NULL AND destroy_asked_at IS NULL",
        " AND created_at IS NULL",
        ("tests/cloud/test_ledger.py", "tests/cloud/test_reconcile.py"),
    ),
    # --- lease ---
    Mutant(
        "lease-for-everyone",
        f"{_CLOUD}/lease.py",
        "    raise taken_elsewhere(store, holder or wanted, owner)\n",
        "    return wanted\n",
        ("tests/cloud/test_lease.py",),
        is_quick=True,
    ),
    Mutant(
        "fence-ignored",
        "src/homing/store/lease.py",
        "        return self._newest if self._newest is not None and self._newest.mark != self._mark else None\n",
        "        return None\n",
        ("tests/store/test_sync.py",),
    ),
    # --- reconcile and destroy ---
    Mutant(
        "one-look-is-enough",
        f"{_CLOUD}/reconcile.py",
        "    for look in range(LOOKS):\n",
        "    for look in range(1):\n",
        ("tests/cloud/test_reconcile.py", "tests/cloud/test_survey.py"),
    ),
    Mutant(
        "silence-means-gone",
        f"{_CLOUD}/reconcile.py",
        '                home.ledger.update(line.mark, state="unknown", billing="maybe")\n',
        '                home.ledger.close(line.mark, at=0.0, spend_usd=Decimal(0), note="")\n',
        ("tests/cloud/test_reconcile.py",),
    ),
    Mutant(
        "destroy-believes-the-call",
        f"{_CLOUD}/destroy.py",
        "    if not is_absent(provider, home, line.mark, instance_id):\n",
        "    if False:\n",
        ("tests/cloud/test_reconcile.py",),
    ),
    Mutant(
        "errors-mean-gone",
        f"{_CLOUD}/destroy.py",
        '            problem = str(exc).replace("\\n", " ") or type(exc).__name__\n',
        '            problem = ""\n',
        ("tests/cloud/test_reconcile.py",),
    ),
    Mutant(
        "cheaper-of-both",
        f"{_CLOUD}/reconcile.py",
        "spend_usd=max(ours, theirs), note=note)",
        "spend_usd=min(ours, theirs), note=note)",
        ("tests/cloud/test_reconcile.py", "tests/cloud/test_meter.py"),
    ),
    Mutant(
        "meter-stands-still",
        f"{_CLOUD}/meter.py",
        "    if line.destroyed_at is not None or line.created_at is None:\n",
        "    if True:\n",
        ("tests/cloud/test_meter.py",),
    ),
    # --- guards ---
    Mutant(
        "watchdog-sleeps",
        "src/homing/agent/watchdog.py",
        "        if self.left_s(LAND) <= 0:\n",
        "        if False:\n",
        ("tests/agent/test_watchdog.py",),
    ),
    Mutant(
        "wall-clock-only",
        "src/homing/agent/limits.py",
        "        return max(by_wall, self._before_s + self._world.monotonic() - self._began)\n",
        "        return by_wall\n",
        ("tests/agent/test_watchdog.py",),
    ),
    Mutant(
        "dead-man-sleeps",
        "src/homing/agent/dead_man.py",
        "        if self.limits.left_s(DEAD_MAN) <= 0:\n",
        "        if False:\n",
        ("tests/agent/test_dead_man.py",),
    ),
    Mutant(
        "dead-man-not-started",
        "src/homing/agent/__main__.py",
        "        dead_man.start(folder)\n",
        "        pass\n",
        ("tests/agent/test_dead_man.py", "tests/cloud/test_launch.py"),
    ),
    Mutant(
        "guard-sleeps",
        f"{_CLOUD}/guard.py",
        "        if self.now < due:\n",
        "        if True:\n",
        ("tests/cloud/test_guard.py",),
    ),
    Mutant(
        "given-away-unguarded",
        f"{_CLOUD}/guard.py",
        "        if not self.billing:\n            return True\n",
        "        if not self.billing or self.run.state == ADOPTED:\n            return True\n",
        ("tests/cloud/test_guard.py",),
    ),
    Mutant(
        "given-away-at-our-limit",
        f"{_CLOUD}/terms.py",
        "    if run.state != ADOPTED:\n",
        "    if True:\n",
        ("tests/cloud/test_terms.py",),
    ),
    Mutant(
        "guard-kills-the-silent",
        f"{_CLOUD}/guard.py",
        '        if beat is None and self.run.state == "launching" and quiet_s >= idle_s:\n',
        "        if quiet_s >= stale_s:\n",
        ("tests/cloud/test_guard.py",),
    ),
    Mutant(
        "silence-by-their-clock",
        f"{_CLOUD}/heard.py",
        '        return float(now - note["seen_at"])\n',
        "        return max(0.0, now - beat.t)\n",
        ("tests/cloud/test_heard.py",),
    ),
    Mutant(
        "a-wish-lost",
        f"{_CLOUD}/wish.py",
        "        if _numbers(home, folder)[-1] <= newest.serial:\n",
        "        if True:\n",
        ("tests/cloud/test_wish.py",),
    ),
    Mutant(
        "ends-before-the-push",
        "src/homing/agent/supervise.py",
        "record, self._push, keep, self._say_goodbye",
        "record, keep, self._say_goodbye",
        ("tests/agent/test_supervise.py",),
    ),
    # --- checkpoints ---
    Mutant(
        "hash-not-checked-on-load",
        "src/homing/lm/train/checkpoint.py",
        "        elif file_sha256(path) != file.sha256:\n",
        "        elif False:\n",
        ("tests/lm/train/test_checkpoint.py",),
    ),
    Mutant(
        "hash-not-checked-on-fetch",
        f"{_CLOUD}/fetch.py",
        "            store.get(checkpoint.key(file.name), str(target), file.sha256)\n",
        "            store.get(checkpoint.key(file.name), str(target))\n",
        ("tests/cloud/test_fetch.py",),
    ),
    Mutant(
        "seal-not-checked",
        f"{_CLOUD}/checkpoints.py",
        "    if seal and hashlib.sha256(text.replace(seal, b\"\", 1)).hexdigest() != manifest.sha256:\n",
        "    if False:\n",
        ("tests/cloud/test_fetch.py", "tests/cloud/test_checkpoints.py"),
    ),
    Mutant(
        "name-leads-outside",
        f"{_CLOUD}/checkpoints.py",
        "    if strange:\n",
        "    if False:\n",
        ("tests/security/test_hostile_stores.py",),
    ),
    Mutant(
        "last-good-pruned",
        "src/homing/store/push.py",
        "                self._order((phase, step)) < newest\n",
        "                True\n",
        ("tests/store/test_push.py",),
    ),
    Mutant(
        "push-not-read-back",
        "src/homing/store/push.py",
        "            return self.store.exists(key) and self.store.sha256(key) == file.sha256\n",
        "            return self.store.exists(key)\n",
        ("tests/store/test_push.py",),
    ),
    # --- who is at the other end ---
    Mutant(
        "any-host-key",
        f"{_CLOUD}/providers/ssh_host.py",
        '        "StrictHostKeyChecking": "yes",\n',
        '        "StrictHostKeyChecking": "no",\n',
        ("tests/cloud/providers/test_ssh.py",),
    ),
    Mutant(
        "create-again-unseen",
        f"{_CLOUD}/providers/fake.py",
        "                made = self._look_for(request.mark, exc)\n",
        "                made = None\n",
        ("tests/cloud/providers/test_fake.py",),
    ),
    Mutant(
        "billing-key-for-all",
        "src/homing/agent/supervise.py",
        "        hidden = [*self.boot.end_billing.header_env.values()]",
        "        hidden: List[str] = []",
        ("tests/agent/test_supervise.py",),
    ),
]  # fmt: skip
