"""Reads and writes weights in safetensors, as one file or as shards with an index, directly into the decoder and back.

files  a folder -> which tensor is in which file, with its dtype; reports every missing file at once
load   those files -> a Decoder, tensor by tensor, so that memory holds the model and one tensor
save   a Decoder -> the same files, in their original dtypes, bit for bit

Knows nothing of the Hub: `homing.config.weights.open_weights` downloads the folder.
"""

from homing.lm.model.open_weights.read_weights import empty_decoder, fill, load_decoder, read_tensors
from homing.lm.model.open_weights.safetensors_folder import WeightFiles, find_weights
from homing.lm.model.open_weights.write_weights import save_weights

__all__ = ["WeightFiles", "empty_decoder", "fill", "find_weights", "load_decoder", "read_tensors", "save_weights"]
