"""Data preparation, raw text -> tokenizer -> token shards: all of `homing prep` except its command line.

    prep_settings   what was requested, checked before anything is written
    scan_pass       pass one: read, hash and check every byte; train the tokenizer on an even sample
    encode_pass     pass two: documents to ids to shards, with regular resume points
    work_folder     holds the unfinished work; at the end, moves the results into place, the manifest last
    pipeline        runs the stages in order, skipping those that are already done

Memory use depends on the chunk size, the encoder's word cache (which is emptied regularly) and the words in the sample,
but not on the size of the text. Free memory is returned to the operating system (tokenizer/trim_heap).
"""

from homing.lm.data.prep.pipeline import prepare
from homing.lm.data.prep.prep_settings import PrepOrder, Progress

__all__ = ["PrepOrder", "Progress", "prepare"]
