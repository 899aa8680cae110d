"""File formats shared between machines: the files in the run directory and their contents.

codec                converts dataclasses to JSON and back: strict when writing, lenient when reading
file_names           file and folder names that writers and readers share
instance_file_names  the part of file_names that ships with the agent
run_json             run.json, the resolved run
boot_json            boot.json, the configuration of an instance
boot_json_agent      the agent's part of boot.json, including how to end billing
guard_timing         when each guard acts before a limit
control_files        control.json, request.json, heartbeat.json, use.json
event_lines          events.jsonl, metrics.jsonl, outcome.json
checkpoint_manifest  manifest.json inside a checkpoint
shard_manifest       manifest.json next to token shards
run_record           the run's record and leases in the store
chat_template        reads a chat template as text, and defines turns.json, the text that templates put around messages

This package uses only the standard library of Python 3.8, because the agent runs on whatever Python an image has.
"""
