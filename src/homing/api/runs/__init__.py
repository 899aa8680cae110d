"""Rented runs, one function per verb: plan, launch, watch, status, logs, stop, fetch, destroy and more."""
