"""How good is it: bits per byte on held-out text, the bigram it must beat, samples to read; and `homing eval`.

in training     bits_per_byte, bigram, samples
afterwards      any_text, conversations, choices, answers: a set -> figures as sums over units (result)
                likelihood: rows -> nats     intervals, compare, report: what the figures are worth
"""
