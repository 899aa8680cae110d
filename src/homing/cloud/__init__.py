"""THE LIFE OF A RUN: plan -> offer -> launch -> agent -> watch -> fetch -> destroy.

Plain synchronous code that reaches clock, disk, processes and network through a `World` alone. It never trains, never
prints and never asks; the verbs in `homing.cli` do the talking.
"""
