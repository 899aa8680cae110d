"""Tokenizer: training, files, encoding and decoding.

    train_bpe     documents            -> merges           (rustbpe)
    write_files   merges               -> tokenizer.json and the accompanying files that other tools read; also the
                                          patterns by which text is split
    encode        batches of documents -> ids, many MB/s   (gigatoken, compared with tokenizer.json at each start), or
                                          with a third-party tokenizer (`tokenizers`, slower)
    tokenizer     tokenizer.json       -> Tokenizer; our special tokens and chat template

`load_tokenizer` needs only `tokenizers` and the standard library: the trainer, `generate` and `chat` use it.
"""

from homing.lm.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
