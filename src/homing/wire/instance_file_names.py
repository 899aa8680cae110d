"""File names on an instance that the agent shares with other programs. file_names.py contains all other names."""

from __future__ import annotations

# Files in the work folder, next to boot.json.
RUN_DIR = "run"
AGENT_LOCK, DEAD_MAN_LOCK = "agent.lock", "dead-man.lock"  # lock files, each locked while its process is alive
CLOCK = "clock"  # a boot-clock time, and the number of seconds billed by then
RESTARTS = "restarts"  # how many times the dead-man restarted the agent, and the boot-clock time of the last restart
BILLING_ENDED = "billing-ended"  # boot-clock time at which the request to end billing was accepted

# Files in the run directory.
CONTROL = "control.json"
REQUEST = "request.json"
HEARTBEAT = "heartbeat.json"
LIMITS = "limits.json"  # a Request with the limits that the agent last accepted; the dead-man process reads it too
USE = "use.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
LOGS = "logs"

# Kinds of events by which sync reports the store's state to the agent.
STORE_REFUSES = "store_refuses"  # a refusal that seems permanent: no permission, no bucket, an expired token
PUSH_RECOVERED = "push_recovered"

# Trainer exit codes.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75

# The exit code of store.sync if a newer lease names another instance. This instance must then stop pushing.
EXIT_SUPERSEDED = 76

# Environment variable of every process on our instances; the local and ssh providers use it to find those processes.
MARK_ENV = "HOMING_MARK"
