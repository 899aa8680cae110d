"""The training loop with its optimizers, learning-rate schedule and checkpoints: shards in, checkpoints out."""
