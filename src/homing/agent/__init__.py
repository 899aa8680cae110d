"""On the instance: start the trainer, watch its limits, push home, end billing, whatever happens."""
