"""The lifecycle of a run: plan -> offer -> launch -> agent -> watch -> fetch -> destroy.

This is plain synchronous code that reaches the clock, the disk, processes and the network only through a `World`. It
never trains, prints or prompts; the commands in `homing.cli` talk to the user.
"""
