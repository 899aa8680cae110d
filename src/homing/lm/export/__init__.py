"""A trained model to what others open, proven before it is called done.

opened     a checkpoint, an adapter's checkpoint or anybody's folder -> the decoder in fp32, tokenizer, template
folder     -> Hugging Face folder             (hf, merged)
adapter    -> adapter folder for peft         (adapter)
gguf_file  -> one GGUF file; gguf_tokens its tokenizer, ollama the Modelfile beside it   (gguf, ollama)
check      what was written, opened by its own reader, against the trainer's decoder
card       README.md: data, phases, cost, evaluation, licence, and the result of the check
whole      written aside, renamed at the end: a failed check leaves nothing
"""

from homing.lm.export.card import Facts
from homing.lm.export.make import DTYPES, KINDS, Made, Order, export
from homing.lm.export.whole import RECORD, read_record

__all__ = ["DTYPES", "KINDS", "RECORD", "Facts", "Made", "Order", "export", "read_record"]
