"""The planted mistakes of mutants.py: one safety line each, with the tests that should notice first.

Names single tests where a whole test file takes long. A mutant that they miss is tried on the whole control plane.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str  # must occur exactly once in the file
    new: str
    tests: tuple[str, ...]
    is_quick: bool = False


MUTANTS = [
    # --- ledger order ---
    Mutant(
        "create-before-begin",
        "src/homing/cloud/launch/launch.py",
        "    home.ledger.begin_create(draft.mark, request.order.boot.started_at)\n",
        "",
        (
            "tests/cloud/reconcile/test_reconcile.py::test_an_unanswered_create_may_be_billing_until_the_grace_period_ends",
            "tests/cloud/reconcile/test_reconcile.py::test_a_launch_destroyed_before_its_create_call_creates_nothing",
            "tests/cloud/launch/test_launch.py::test_a_run_trains_ends_its_own_billing_and_leaves_a_receipt",
        ),
    ),
    Mutant(
        "id-not-recorded",
        "src/homing/cloud/launch/launch.py",
        "    home.ledger.update(draft.mark, instance_id=instance.id, state=instance.state, billing=instance.billing)\n",
        "",
        ("tests/cloud/launch/test_launch.py::test_a_run_trains_ends_its_own_billing_and_leaves_a_receipt",),
    ),
    Mutant(
        "no-undo",
        "src/homing/cloud/launch/launch.py",
        "        _undo(draft, home, exc, notify, line)\n",
        "",
        ("tests/cloud/launch/test_launch.py::test_the_instance_id_of_a_failed_create_is_recorded",),
    ),
    Mutant(
        "other-rate-accepted",
        "src/homing/cloud/launch/launch.py",
        "    if instance.rate_usd_per_hour != draft.order.offer.rate_usd_per_hour:\n",
        "    if False:\n",
        ("tests/cloud/launch/test_launch.py::test_an_instance_at_a_higher_rate_than_offered_is_destroyed",),
    ),
    Mutant(
        "lines-may-be-deleted",
        "src/homing/cloud/ledger/ledger.py",
        "BEGIN SELECT RAISE(ABORT, 'ledger lines are never deleted'); END",
        "BEGIN SELECT 1; END",
        ("tests/cloud/ledger/test_ledger.py",),
        is_quick=True,
    ),
    Mutant(
        "begin-after-destroy",
        "src/homing/cloud/ledger/ledger.py",
        " AND created_at IS NULL AND destroy_asked_at IS NULL",
        " AND created_at IS NULL",
        (
            "tests/cloud/ledger/test_ledger.py",
            "tests/cloud/reconcile/test_reconcile.py::test_a_launch_destroyed_before_its_create_call_creates_nothing",
        ),
    ),
    # --- lease ---
    Mutant(
        "lease-for-everyone",
        "src/homing/cloud/ledger/run_lease.py",
        "    raise taken_elsewhere(store, holder or wanted, owner)\n",
        "    return wanted\n",
        ("tests/cloud/ledger/test_lease.py",),
        is_quick=True,
    ),
    Mutant(
        "fence-ignored",
        "src/homing/store/read_lease.py",
        "        return self._newest if self._newest is not None and self._newest.mark != self._mark else None\n",
        "        return None\n",
        ("tests/store/test_sync.py",),
    ),
    # --- reconcile and destroy ---
    Mutant(
        "one-look-is-enough",
        "src/homing/cloud/reconcile/reconcile.py",
        "    for look in range(LOOKS):\n",
        "    for look in range(1):\n",
        ("tests/cloud/reconcile/test_inventory.py",),
    ),
    Mutant(
        "silence-means-gone",
        "src/homing/cloud/reconcile/reconcile.py",
        '                home.ledger.update(line.mark, state="unknown", billing="maybe")\n',
        '                home.ledger.close(line.mark, at=0.0, spend_usd=Decimal(0), note="")\n',
        (
            "tests/cloud/reconcile/test_reconcile.py::test_instances_of_an_unreachable_provider_may_be_billing",
        ),
    ),
    Mutant(
        "lines-of-others-written",
        "src/homing/cloud/reconcile/reconcile.py",
        "        if shown_mark(mark) in others:\n",
        "        if False:\n",
        ("tests/cloud/reconcile/test_inventory.py",),
    ),
    Mutant(
        "gone-by-another-accounts-key",
        "src/homing/cloud/reconcile/reconcile.py",
        "        check_account(home, provider, line)\n",
        "        pass\n",
        ("tests/cloud/providers/fake/test_provider.py::test_what_the_key_of_another_account_does_not_show_is_not_gone",),
    ),
    Mutant(
        "ended-by-another-accounts-key",
        "src/homing/cloud/destroy.py",
        "        check_account(home, provider, line)\n",
        "        pass\n",
        ("tests/cloud/providers/fake/test_provider.py::test_what_the_key_of_another_account_does_not_show_is_not_gone",),
    ),
    Mutant(
        "destroy-believes-the-call",
        "src/homing/cloud/destroy.py",
        "    if not is_absent(provider, home, line.mark, instance_id):\n",
        "    if False:\n",
        (
            "tests/cloud/reconcile/test_reconcile.py::test_destroy_is_retried_until_the_provider_shows_it_absent",
            "tests/cloud/reconcile/test_reconcile.py::test_a_destroy_not_confirmed_in_time_raises_still_billing_and_is_remembered",
        ),
    ),
    Mutant(
        "errors-mean-gone",
        "src/homing/cloud/destroy.py",
        "        problem = _words(exc)\n",
        '        problem = ""\n',
        ("tests/cloud/reconcile/test_reconcile.py::test_a_destroy_refused_by_the_provider_raises_still_billing",),
    ),
    Mutant(
        "cheaper-of-both",
        "src/homing/cloud/reconcile/receipt.py",
        "    spend = max(ours, seen, billed)\n",
        "    spend = min(ours, billed)\n",
        ("tests/cloud/reconcile/test_inventory.py",),
    ),
    Mutant(
        "unseen-instance-is-free",
        "src/homing/cloud/reconcile/receipt.py",
        "    if instance is None and (provider is None or isinstance(provider, Remembering)):\n",
        "    if instance is None:\n",
        ("tests/cloud/reconcile/test_receipt.py",),
    ),
    Mutant(
        "twins-cost-once",
        "src/homing/cloud/reconcile/reconcile.py",
        "            problems += note_duplicate(home, lines.get(shown_mark(mark)), instance)\n",
        "            pass\n",
        ("tests/cloud/reconcile/test_receipt.py",),
    ),
    Mutant(
        "clock-takes-dollars-back",
        "src/homing/cloud/reconcile/receipt.py",
        "    if before is not None:\n        spend = max(",
        "    if before == ():\n        spend = max(",
        ("tests/cloud/reconcile/test_receipt.py::test_spend_between_two_observations_uses_the_monotonic_clock",),
    ),
    Mutant(
        "attempts-by-time",
        "src/homing/cloud/ledger/ledger.py",
        "\"ORDER BY attempt, ",
        "\"ORDER BY intent_at, ",
        ("tests/cloud/ledger/test_ledger.py",),
    ),
    Mutant(
        "shutdown-only-stops",
        "src/homing/cloud/providers/aws/create_request.py",
        '"InstanceInitiatedShutdownBehavior": "terminate",',
        '"InstanceInitiatedShutdownBehavior": "stop",',
        ("tests/cloud/providers/aws/test_create_request.py", "tests/cloud/providers/aws/test_provider.py"),
    ),
    Mutant(
        "sandbox-for-a-day",
        "src/homing/cloud/providers/modal/provider.py",
        '"timeout": create_request.timeout_s(boot),',
        '"timeout": 86400,',
        ("tests/sim/test_modal.py::test_a_sandbox_that_hangs_is_ended_by_its_timeout_inside_the_limit_without_anybody",),
    ),
    Mutant(
        "meter-does-not-count",
        "src/homing/cloud/ledger/meter.py",
        "    if line.destroyed_at is not None or line.created_at is None:\n",
        "    if True:\n",
        ("tests/cloud/ledger/test_meter.py",),
    ),
    # --- guards ---
    Mutant(
        "watchdog-sleeps",
        "src/homing/instance/agent/watchdog.py",
        "        if self.left_s(LAND) <= 0:\n",
        "        if False:\n",
        ("tests/instance/agent/test_watchdog.py",),
    ),
    Mutant(
        "wall-clock-only",
        "src/homing/instance/agent/watchdog.py",
        "        return self._before_s + self._world.boottime() - self._began\n",
        "        return self._world.now() - self._boot.started_at\n",
        ("tests/instance/agent/test_watchdog.py",),
    ),
    Mutant(
        "dead-man-sleeps",
        "src/homing/instance/agent/dead_man.py",
        "        if self.limits.left_s(DEAD_MAN) <= 0:\n",
        "        if False:\n",
        ("tests/instance/agent/test_dead_man.py::test_it_ends_after_the_agents_turn_and_before_the_limit",),
    ),
    Mutant(
        "dead-man-not-started",
        "src/homing/instance/agent/__main__.py",
        "        dead_man.start(folder)\n",
        "        pass\n",
        ("tests/instance/agent/test_dead_man.py::test_it_is_there_before_the_first_heartbeat_and_there_is_only_one",),
    ),
    Mutant(
        "guard-sleeps",
        "src/homing/cloud/guard/guard_pass.py",
        "        if self.now < due:\n",
        "        if True:\n",
        ("tests/cloud/guard/test_guard_pass.py::test_the_guard_destroys_a_run_just_before_its_spend_limit",),
    ),
    Mutant(
        "given-away-unguarded",
        "src/homing/cloud/guard/guard_pass.py",
        "        if not self.billing:\n            return True\n",
        "        if not self.billing or self.run.state == ADOPTED:\n            return True\n",
        (
            "tests/cloud/guard/test_guard_pass.py::test_the_guard_ends_a_run_adopted_elsewhere_at_its_limit_without_taking_it_back",
        ),
    ),
    Mutant(
        "given-away-at-our-limit",
        "src/homing/cloud/guard/limits_and_destroys.py",
        "    if run.state != ADOPTED:\n",
        "    if True:\n",
        ("tests/cloud/guard/test_spend_terms.py",),
    ),
    Mutant(
        "guard-kills-the-silent",
        "src/homing/cloud/guard/guard_pass.py",
        '        if beat is None and self.run.state == "launching" and quiet_s >= idle_s:\n',
        "        if quiet_s >= stale_s:\n",
        (
            "tests/cloud/guard/test_guard_pass.py::test_a_silent_instance_is_alerted_once_then_more_urgently_and_not_destroyed",
            "tests/cloud/guard/test_guard_pass.py::test_a_running_instance_with_a_lost_heartbeat_is_alerted_and_not_destroyed",
        ),
    ),
    Mutant(
        "silence-by-their-clock",
        "src/homing/cloud/contact/heartbeats.py",
        "            return seen_s\n",
        "            return max(0.0, now - beat.t)\n",
        ("tests/cloud/contact/test_silence.py",),
    ),
    Mutant(
        "control-request-lost",
        "src/homing/cloud/contact/control_request.py",
        "        if _numbers(home, folder)[-1] <= newest.serial:\n",
        "        if True:\n",
        ("tests/cloud/contact/test_control_request.py",),
    ),
    Mutant(
        "ends-before-the-push",
        "src/homing/instance/agent/supervise.py",
        "self._report_outcome, self._push, self._keep, self._say_goodbye",
        "self._report_outcome, self._keep, self._say_goodbye",
        ("tests/instance/agent/test_supervise.py::test_a_run_that_is_done_is_pushed_and_then_ends_billing",),
    ),
    # --- checkpoints ---
    Mutant(
        "hash-not-checked-on-load",
        "src/homing/lm/train/checkpoints/checkpoint_files.py",
        "        elif file_sha256(path) != file.sha256:\n",
        "        elif False:\n",
        ("tests/lm/train/checkpoints/test_checkpoint_files.py",),
    ),
    Mutant(
        "hash-not-checked-on-fetch",
        "src/homing/cloud/artifacts/checkpoints.py",
        "            store.get(checkpoint.key(file.name), str(target), file.sha256)\n",
        "            store.get(checkpoint.key(file.name), str(target))\n",
        ("tests/cloud/artifacts/test_fetch.py::test_fetch_refuses_a_damaged_checkpoint_and_leaves_no_files",),
    ),
    Mutant(
        "seal-not-checked",
        "src/homing/cloud/artifacts/checkpoints.py",
        "    if seal and hashlib.sha256(text.replace(seal, b\"\", 1)).hexdigest() != manifest.sha256:\n",
        "    if False:\n",
        ("tests/cloud/artifacts/test_fetch.py::test_a_manifest_that_does_not_match_its_own_hash_is_damaged",),
    ),
    Mutant(
        "name-leads-outside",
        "src/homing/cloud/artifacts/checkpoints.py",
        "    if strange:\n",
        "    if False:\n",
        ("tests/cloud/artifacts/test_fetch.py::test_a_manifest_with_a_path_outside_the_checkpoint_is_refused",),
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
        "src/homing/cloud/providers/ssh/connection.py",
        '        "StrictHostKeyChecking": "yes",\n',
        '        "StrictHostKeyChecking": "no",\n',
        ("tests/cloud/providers/ssh/test_provider.py::test_a_changed_host_key_is_refused_loudly_and_no_order_is_sent",),
    ),
    Mutant(
        "create-again-unseen",
        "src/homing/cloud/providers/once.py",
        "                made = self._look_for(request.mark, exc)\n",
        "                made = None\n",
        ("tests/cloud/providers/fake/test_provider.py",),
    ),
    Mutant(
        "billing-key-for-all",
        "src/homing/instance/agent/supervise.py",
        "        hidden = [*self.boot.end_billing.header_env.values()]",
        "        hidden: List[str] = []",
        ("tests/instance/agent/test_supervise.py::test_the_key_that_ends_billing_is_hidden_from_the_children",),
    ),
    # --- what others send: figures, files, code ---
    Mutant(
        "absurd-figures-believed",
        "src/homing/wire/codec.py",
        "    if not number.is_finite() or not least <= number <= most:\n",
        "    if number.is_nan():\n",
        ("tests/cloud/providers/fake/test_provider.py",),
    ),
    Mutant(
        "absurd-bill-believed",
        "src/homing/cloud/reconcile/receipt.py",
        "    if rate > 0 and usd > most:\n",
        "    if False:\n",
        ("tests/cloud/test_destroy.py::test_an_absurd_bill_is_reported_and_not_recorded",),
    ),
    Mutant(
        "unreadable-end-is-an-end",
        "src/homing/cloud/ledger/ledger.py",
        '_IS_OPEN = "(destroyed_at IS NULL OR destroyed_at >= 1e12)"',
        '_IS_OPEN = "(destroyed_at IS NULL)"',
        ("tests/cloud/ledger/test_damaged_rows.py",),
    ),
    Mutant(
        "dotenv-sets-anything",
        "src/homing/api/dotenv.py",
        "if value and name in CREDENTIALS and name not in os.environ}",
        "if value and name not in os.environ}",
        ("tests/cli/test_dotenv.py::test_a_file_that_came_with_the_folder_sets_credentials_and_nothing_else",),
    ),
    Mutant(
        "keys-over-plain-http",
        "src/homing/api_address.py",
        '    if parts.scheme == "http" and _is_loopback(host):\n',
        '    if parts.scheme == "http":\n',
        ("tests/security/test_plain_http.py",),
    ),
    Mutant(
        "startup-runs-any-bytes",
        "src/homing/cloud/machine_setup/startup.sh",
        '[ "${found%% *}" = "${FETCH[i + 2]}" ] && mv',
        "mv",
        ("tests/cloud/machine_setup/test_startup_script.py::test_a_download_with_a_wrong_hash_is_not_used_and_the_timer_ends_billing",),
    ),
    Mutant(
        "wheel-imported-unhashed",
        "src/homing/cloud/launch/run_documents.py",
        "'found == expected or sys.exit(",
        "'True or sys.exit(",
        (
            "tests/security/test_hostile_code.py"
            "::test_nothing_is_imported_from_a_wheel_that_is_not_the_one_that_left_home",
        ),
    ),
    Mutant(
        "planted-object-trusted",
        "src/homing/cloud/launch/inputs.py",
        "    if not store.create_if_absent(key, data) and store.sha256(key) != digest:\n",
        "    if store.create_if_absent(key, data):\n",
        (
            "tests/security/test_hostile_code.py"
            "::test_what_another_writer_planted_under_the_hash_of_a_run_file_is_written_again",
        ),
    ),
    Mutant(
        "packages-without-hashes",
        "src/homing/instance/bootstrap.py",
        'VERIFIED = ("--require-hashes", "--only-binary", ":all:")',
        "VERIFIED = ()",
        ("tests/instance/test_bootstrap.py::test_packages_are_installed_only_with_their_hashes",),
    ),
    # --- a home that is lost, damaged or full ---
    Mutant(
        "lost-run-rented-again",
        "src/homing/cloud/launch/draft.py",
        "        check_lost(home, run.name, run.store)\n",
        "        pass\n",
        ("tests/cli/test_lost_ledger.py::test_launch_is_refused_where_the_provider_of_a_lost_run_cannot_be_asked",),
    ),
    Mutant(
        "lost-ledger-not-restored",
        "src/homing/cloud/ledger/ledger_file.py",
        'not self._world.exists(self.backup) or self._restore(f"The ledger {self.path} was missing.")',
        "True",
        ("tests/cloud/ledger/test_ledger_file.py::test_a_lost_ledger_is_restored_from_its_backup_and_says_so",),
    ),
    Mutant(
        "intent-only-in-memory",
        "src/homing/cloud/ledger/ledger_file.py",
        "            if must_last and not is_read:\n",
        "            if False:\n",
        (
            "tests/cloud/ledger/test_ledger_file.py"
            "::test_an_unwritable_ledger_is_read_and_updated_in_memory",
        ),
    ),
    Mutant(
        "names-by-age-alone",
        "src/homing/cloud/ledger/ledger.py",
        "(run.id != word, not run.is_live and run.id not in billing)",
        "(run.id != word, False)",
        ("tests/cli/test_clock_set_back.py",),
    ),
    Mutant(
        "limit-of-a-lost-run-forgotten",
        "src/homing/cloud/reconcile/reconcile.py",
        "    found = remembered(home, instance)\n",
        "    found = None\n",
        ("tests/cli/test_lost_ledger.py::test_the_guard_ends_it_at_its_limit",),
    ),
    Mutant(
        "unasked-stop-is-final",
        "src/homing/cloud/reconcile/reconcile.py",
        "        is_cut = outcome.is_preempted or found.is_unasked\n",
        "        is_cut = outcome.is_preempted\n",
        ("tests/sim/test_interruptions.py::test_the_guard_launches_such_a_run_again",),
    ),
    # --- what a stranger's file or prompt may take ---
    Mutant(
        "slow-headers-have-no-deadline",
        "src/homing/web/threaded_server.py",
        "        elif self._deadline is None:",
        "        elif False:",
        ("tests/web/test_slow_clients.py::test_the_next_request_on_a_connection_has_a_deadline_too",),
    ),
    Mutant(
        "bodies-of-any-size",
        "src/homing/web/app.py",
        "                    if len(raw) > most:\n",
        "                    if False:\n",
        ("tests/web/test_slow_clients.py::test_a_body_without_its_length_is_counted_as_it_comes",),
    ),
    Mutant(
        "shards-of-other-text",
        "src/homing/api/data/stale_shards.py",
        "    for folder, why in stale_shards(loaded):\n",
        "    for folder, why in ():\n",
        ("tests/api/data/test_stale_shards.py::test_no_verb_uses_shards_of_other_text",),
    ),
    Mutant(
        "kernel-layout-unchecked",
        "src/homing/lm/model/kernels/__init__.py",
        "    if not is_right:\n",
        "    if False:\n",
        ("tests/lm/model/test_kernels.py::test_a_kernel_refuses_what_it_would_misread",),
    ),
]  # fmt: skip
