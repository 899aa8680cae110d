"""Which run, model or checkpoint a name means, and what is known about it."""
