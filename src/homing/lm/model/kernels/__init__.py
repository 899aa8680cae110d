"""Triton kernels, for CUDA. Each has a plain torch twin beside its caller, which computes everywhere else; the two are
compared on the card by tests marked `gpu`. Nothing here is imported where there is no CUDA."""
