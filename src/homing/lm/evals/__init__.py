"""How good is it: bits per byte on held-out text, the bigram it must beat, samples to read."""
