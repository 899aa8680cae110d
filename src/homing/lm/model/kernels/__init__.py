"""Triton kernels, for CUDA. Not imported without CUDA.

Each has an equivalent in plain torch next to its caller, used everywhere else; tests marked `gpu` compare the two.
"""
