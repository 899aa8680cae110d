"""Documents to a vocabulary, text to ids and back.

    train     documents            -> merges           (rustbpe)
    files     merges               -> tokenizer.json and what others read beside it
    encode    pieces of documents  -> ids, many MB/s   (gigatoken, proven equal to tokenizer.json at each start)
    encode_theirs                     the same with somebody else's tokenizer (`tokenizers`, slower)
    load      tokenizer.json       -> Tokenizer        (here)

`load_tokenizer` needs only `tokenizers` and the standard library: it is what the trainer, `generate` and `chat` use.
"""

from homing.lm.tokenizer.load import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
