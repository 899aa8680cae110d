"""What crosses machines, described once: the run directory's files and the documents in them.

names       the file and folder names that writer and reader share     codec   strict writers, lenient readers
run         run.json, the resolved run                                 data    manifest.json beside token shards
checkpoint  manifest.json inside a checkpoint                          event   events.jsonl, metrics.jsonl
control     control.json, request.json, heartbeat.json, use.json       record  the run's own record in the store
boot        boot.json, what an instance is told at start               limit   who ends an instance, and when
orders      the agent's part of boot.json, with how to end billing     instance  the agent's part of names
turns       turns.json, what a chat template writes around words       template  that template, as text

Standard library only, and Python 3.8: the agent runs on whatever Python an image has.
"""
