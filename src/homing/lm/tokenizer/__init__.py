"""Tokenizer: training, files, encoding and decoding.

    train     documents            -> merges           (rustbpe)
    files     merges               -> tokenizer.json and the accompanying files that other tools read
    encode    batches of documents -> ids, many MB/s   (gigatoken, compared with tokenizer.json at each start)
    encode_external                   the same with a third-party tokenizer (`tokenizers`, slower)
    load      tokenizer.json       -> Tokenizer        (here)

`load_tokenizer` needs only `tokenizers` and the standard library: the trainer, `generate` and `chat` use it.
"""

from homing.lm.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
