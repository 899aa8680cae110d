"""Tokenizer: training, files, encoding and decoding.

    train_bpe     documents            -> merges           (rustbpe)
    write_files   merges               -> tokenizer.json and the accompanying files that other tools read; also the
                                          regular expressions that split text into words
    encode        batches of documents -> ids, many MB/s   (gigatoken, verified against `tokenizers` at each start);
                                          third-party tokenizers may need `tokenizers`, which is slower
    tokenizer     tokenizer.json       -> Tokenizer; our special tokens and chat template

`load_tokenizer` needs only `tokenizers` and the standard library: the trainer, `generate` and `chat` use it.
"""

from homing.lm.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
