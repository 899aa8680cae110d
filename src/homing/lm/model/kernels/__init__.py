"""Triton kernels for CUDA, which are not imported without CUDA.

Each has an equivalent in plain torch next to its caller, which is used everywhere else. Tests marked `gpu` compare the
two.
"""
