"""A checkpoint to text: load it, sample from it, talk to it.

load    a checkpoint, an export or anybody's folder -> model and tokenizer, checked against its manifest
adapted an adapter's checkpoint -> the weights it was trained on with it put in
sample  prompt ids -> ids, one at a time
reader  ids -> logits of what follows, with a KV cache; on CUDA by a captured graph
text    prompt text -> pieces of text; turns of a conversation as ChatML
"""

from homing.lm.generate.load import Card, load_for_use, read_card
from homing.lm.generate.sample import generate
from homing.lm.generate.text import ChatTurns, complete, text_pieces

__all__ = ["Card", "ChatTurns", "complete", "generate", "load_for_use", "read_card", "text_pieces"]
