"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, trackio.

metrics.jsonl is the source of truth. A follower reads it from a run directory or from the store, and sends the metrics
to one tracker. The follower is a separate process at home, so no key leaves this computer, and no tracker can delay a
step or stop a run. Metrics that a tracker refused are sent again later.
"""
