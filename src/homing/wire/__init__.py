"""File formats that cross machines: the files of the run directory and the documents in them.

names       file and folder names that writers and readers share       codec   strict writers, lenient readers
run         run.json, the resolved run                                 data    manifest.json next to token shards
checkpoint  manifest.json inside a checkpoint                          event   events.jsonl, metrics.jsonl
control     control.json, request.json, heartbeat.json, use.json       record  the run's record in the store
boot        boot.json, the configuration of an instance                limit   which guard acts when before a limit
orders      the agent's part of boot.json, with how to end billing     instance  the agent's part of names
turns       turns.json, the text a chat template puts around messages  template  the chat template itself, as text

Standard library only, Python 3.8: the agent runs on whatever Python an image has.
"""
