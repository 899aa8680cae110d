"""Manages a run on rented machines: plan -> offer -> launch -> agent -> watch -> fetch -> destroy.

This is plain synchronous code that accesses the clock, the disk, processes and the network only through a `World`. It
never trains, prints or prompts; the commands in `homing.cli` interact with the user.
"""
