"""Weights as others keep them: one safetensors file, or shards with an index, straight into the decoder and out again.

files  a folder -> which tensor lies in which file, with its type; every missing file named at once
load   those files -> a Decoder, tensor by tensor, so that the memory is that of the model and of one tensor
save   a Decoder -> the same files, in the types they had, bit for bit

Knows nothing of the Hub: `homing.config.open_weights` brings the folder.
"""

from homing.lm.open_weights.files import WeightFiles, find_weights
from homing.lm.open_weights.load import empty_decoder, fill, load_decoder, read_tensors
from homing.lm.open_weights.save import save_weights

__all__ = ["WeightFiles", "empty_decoder", "fill", "find_weights", "load_decoder", "read_tensors", "save_weights"]
