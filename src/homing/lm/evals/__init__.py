"""Evaluation: bits per byte on held-out text, a bigram baseline, and `homing eval`.

during training   bits_per_byte
after training    text_loss, chat_loss, multiple_choice, generated_answers: each evaluates a model on one kind of data
                  likelihood: rows -> nats     eval_result, compare_and_report: how reliable the figures are
"""
