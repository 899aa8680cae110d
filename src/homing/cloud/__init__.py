"""The lifecycle of a run: plan -> offer -> launch -> agent -> watch -> fetch -> destroy.

Plain synchronous code that reaches clock, disk, processes and network only through a `World`. It never trains, prints
or prompts; the commands in `homing.cli` do the talking.
"""
