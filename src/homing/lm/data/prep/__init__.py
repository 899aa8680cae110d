"""Data preparation, raw text -> tokenizer -> token shards: all of `homing prep` except its command line.

    order     what was requested, checked before anything is touched
    scan      pass one: read, hash and check every byte; train the tokenizer on an even sample
    encode    pass two: documents to ids to shards, with regular resume points
    publish   move the results into place, manifest last
    flow      these four in order, skipping what is done

Memory is bounded by the size of a chunk, the encoder's word cache, which is emptied regularly, and the words of the
sample; never by the size of the text. Free memory is returned to the operating system (tokenizer/heap).
"""

from homing.lm.data.prep.pipeline import prepare
from homing.lm.data.prep.prep_settings import PrepOrder, Progress

__all__ = ["PrepOrder", "Progress", "prepare"]
