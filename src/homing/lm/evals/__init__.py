"""Evaluation: bits per byte on held-out text, a bigram baseline, samples to read, and `homing eval`.

in training     bits_per_byte, bigram, samples
afterwards      any_text, conversations, choices, answers: a data set -> figures as sums over units (result)
                likelihood: rows -> nats     intervals, compare, report: how reliable the figures are
"""
