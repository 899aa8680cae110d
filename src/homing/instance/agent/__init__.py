"""The agent: runs on the instance, starts the trainer, enforces limits, pushes results and ends billing."""
