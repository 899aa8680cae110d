"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

metrics.jsonl is the source of truth. A follower reads this file from a run directory or from the store, and sends the
metrics to one tracker. The follower is a separate process on the user's computer, so no key leaves that computer, and
no tracker can delay a step or stop a run. If a tracker rejects metrics, the follower sends them again later.
"""
