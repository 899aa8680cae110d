"""Shards to checkpoints: the loop, its optimizers, its schedule and its checkpoints."""
