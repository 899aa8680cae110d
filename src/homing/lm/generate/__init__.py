"""Loads a checkpoint, samples text from it, and chats with it.

load_model      a checkpoint, an export or any model folder -> model and tokenizer, checked against its manifest
load_adapter    an adapter's checkpoint -> its base weights with the adapter merged in
sampling        prompt ids -> ids, one at a time, with a KV cache; on CUDA with a captured graph
chat_and_text   prompt text -> chunks of text; turns of a conversation as ChatML
"""

from homing.lm.generate.chat_and_text import ChatTurns, complete, decode_stream
from homing.lm.generate.load_model import Card, load_for_use, read_card
from homing.lm.generate.sampling import generate

__all__ = ["Card", "ChatTurns", "complete", "decode_stream", "generate", "load_for_use", "read_card"]
