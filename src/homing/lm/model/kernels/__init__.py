"""Triton kernels for CUDA. They are not imported on other devices.

Each kernel has an equivalent in plain torch next to its caller, for use on other devices. Tests marked `gpu` compare
the two.
"""
