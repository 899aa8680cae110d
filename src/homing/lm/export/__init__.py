"""Exports a trained model to formats that other tools open, verified before it is published.

opened     a checkpoint, an adapter's checkpoint or any model folder -> the decoder in fp32, tokenizer, template
folder     -> Hugging Face folder             (hf, merged)
adapter    -> adapter folder for peft         (adapter)
gguf_file  -> one GGUF file; gguf_tokens its tokenizer, ollama the Modelfile next to it   (gguf, ollama)
check      opens the result with third-party software and compares it with the trainer's decoder
card       README.md: data, phases, cost, evaluation, license, and the result of the check
whole      written to a temporary folder and renamed at the end: a failed check leaves nothing
"""

from homing.lm.export.atomic_folder import RECORD, read_record
from homing.lm.export.export_model import DTYPES, KINDS, Made, Order, export
from homing.lm.export.model_card import Facts

__all__ = ["DTYPES", "KINDS", "RECORD", "Facts", "Made", "Order", "export", "read_record"]
