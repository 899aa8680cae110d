"""Other people's trackers: TensorBoard, Weights & Biases, MLflow, trackio.

metrics.jsonl is the truth. A follower reads it, from a run directory or from the store, and tells one tracker; it is a
process of its own at home, so no key travels, no tracker can hold a step back or stop a run, and what a tracker refused
is told again later.
"""
