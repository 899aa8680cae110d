"""Loads a checkpoint, samples text from it, and chats with it.

load_model      a checkpoint, an export or any model folder -> model and tokenizer, checked against its manifest
load_adapter    an adapter's checkpoint -> its base weights with the adapter merged in
pick_token      logits -> the next token: temperature, top-k, top-p, min-p, penalties, bias, log-probabilities
sampling        prompt ids -> ids of one text, with a KV cache; on CUDA with a captured graph
batching        many texts at once on one KV cache, which join and leave while the others continue (continuous batching)
text_stream     ids -> pieces of text, up to a stop string
chat_and_text   prompt text -> pieces of text; turns of a conversation as ChatML
"""

from homing.lm.generate.chat_and_text import ChatTurns, complete
from homing.lm.generate.load_model import Card, load_for_use, read_card
from homing.lm.generate.sampling import generate
from homing.lm.generate.text_stream import decode_stream

__all__ = ["Card", "ChatTurns", "complete", "decode_stream", "generate", "load_for_use", "read_card"]
