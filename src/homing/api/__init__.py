"""What the verbs do, as a library: the command line parses and prints, this package does the work.

It never prompts, prints or exits, and loads torch only inside the functions that need it. What it has to say on the way
goes to `homing.api.notices`. The names that users import are in `homing` itself.
"""
