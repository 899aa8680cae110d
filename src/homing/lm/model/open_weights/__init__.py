"""Loads weights from safetensors into a decoder and saves them again, as one file or as shards with an index.

find_tensors         a folder -> which tensor is in which file, with its dtype; reports all missing files together
load_and_save        those files -> a Decoder, tensor by tensor, so that memory holds the model and one tensor;
                     a Decoder -> the same files, in their original dtypes, bit for bit

Works on local folders only: `homing.config.weights.open_weights` downloads them from the Hub.
"""

from homing.lm.model.open_weights.find_tensors import WeightFiles, find_weights
from homing.lm.model.open_weights.load_and_save import empty_decoder, fill, load_decoder, read_tensors, save_weights

__all__ = ["WeightFiles", "empty_decoder", "fill", "find_weights", "load_decoder", "read_tensors", "save_weights"]
