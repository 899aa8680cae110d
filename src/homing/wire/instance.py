"""Names on an instance by which the agent finds what others write there, and they what it writes. More in names.py."""

from __future__ import annotations

# In the work folder, beside boot.json.
RUN_DIR = "run"
AGENT_LOCK, DEAD_MAN_LOCK = "agent.lock", "dead-man.lock"  # held while they live
CLOCK = "clock"  # how long billing had gone on at some moment of the machine's boot clock
RESTARTS = "restarts"  # of the agent by the dead-man: how many, and when the last was by the boot clock
BILLING_ENDED = "billing-ended"  # when what ends billing was accepted, by the boot clock

# In the run directory.
CONTROL = "control.json"
REQUEST = "request.json"
HEARTBEAT = "heartbeat.json"
LIMITS = "limits.json"  # a Request: the limits that the agent last took; the dead-man follows them
USE = "use.json"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
LOGS = "logs"

# Kinds of events by which sync tells the agent how the store is.
STORE_REFUSES = "store_refuses"  # for good, as it looks: no permission, no bucket, an expired token
PUSH_RECOVERED = "push_recovered"

# Trainer exit codes.
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75

# store.sync's: a newer lease names another instance, so this one pushes nothing more.
EXIT_SUPERSEDED = 76

# Environment of every process that an instance of ours starts; local and ssh find their own by it.
MARK_ENV = "HOMING_MARK"
