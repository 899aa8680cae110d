"""Trains a model: the training loop, the optimizers, the learning-rate schedule and the checkpoints."""
