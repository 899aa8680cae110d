"""Text to tokenizer to token shards: the whole of `homing prep`, without its command line.

    order     what is wanted, checked before anything is touched
    scan      pass one: every byte read, hashed and checked; an even sample teaches the tokenizer
    encode    pass two: documents to ids to shards, marked now and then so that a killed prep goes on
    publish   all at once, manifest last
    flow      the four in order, skipping what is done

Memory is bounded by the size of a piece, the encoder's memory of words, which is emptied now and then, and the words of
the sample; never by the text. What is free goes back to the system (tokenizer/heap).
"""

from homing.lm.prep.flow import prepare
from homing.lm.prep.order import PrepOrder, Progress

__all__ = ["PrepOrder", "Progress", "prepare"]
