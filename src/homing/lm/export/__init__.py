"""Exports a trained model to formats that other tools can open. An export is verified before it is published.

source_model    a full checkpoint, an adapter checkpoint or any model folder -> the decoder in fp32, tokenizer, template
hf_folder       -> Hugging Face folder (hf, merged), or adapter folder for peft (adapter)
gguf_file       -> one GGUF file with its tokenizer; the Modelfile next to it   (gguf, ollama)
check_export    opens the export with third-party software and compares it with the trainer's decoder
model_card      README.md: data, phases, cost, evaluation, license, and the result of the check
export_model    writes to a temporary folder that is renamed at the end, so that a failed check leaves no files
"""

from homing.lm.export.export_model import DTYPES, KINDS, RECORD, Made, Order, export, read_record
from homing.lm.export.model_card import Facts

__all__ = ["DTYPES", "KINDS", "RECORD", "Facts", "Made", "Order", "export", "read_record"]
