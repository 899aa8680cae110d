"""Find the run, model or checkpoint that a name refers to, and read its state."""
