"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

metrics.jsonl is the source of truth. A follower reads it, from a run directory or from the store, and sends it to one
tracker. It is a separate process at home: no key leaves this computer, no tracker can delay a step or stop a run, and
metrics that a tracker refused are sent again later.
"""
