"""File names on an instance that the agent shares with other programs. More in file_names.py."""

from __future__ import annotations

# In the work folder, next to boot.json.
RUN_DIR = "run"
AGENT_LOCK, DEAD_MAN_LOCK = "agent.lock", "dead-man.lock"  # held while the process is alive
CLOCK = "clock"  # how long billing had been running at a given boot-clock time
RESTARTS = "restarts"  # how often the dead-man restarted the agent, and the boot-clock time of the last restart
BILLING_ENDED = "billing-ended"  # boot-clock time at which the request to end billing was accepted

# In the run directory.
CONTROL = "control.json"
REQUEST = "request.json"
HEARTBEAT = "heartbeat.json"
LIMITS = "limits.json"  # a Request: the limits that the agent last accepted; the dead-man follows them
USE = "use.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
LOGS = "logs"

# Event kinds by which sync reports the state of the store to the agent.
STORE_REFUSES = "store_refuses"  # an apparently permanent refusal: no permission, no bucket, an expired token
PUSH_RECOVERED = "push_recovered"

# Trainer exit codes.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75

# Exit code of store.sync: a newer lease names another instance, so this one pushes nothing more.
EXIT_SUPERSEDED = 76

# Set in the environment of every process on our instances; the local and ssh providers use it to find their processes.
MARK_ENV = "HOMING_MARK"
