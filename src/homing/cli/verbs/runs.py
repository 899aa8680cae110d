"""`homing runs`: all runs, rented or trained here, and everything that may still cost money, in the ledger or not."""

from __future__ import annotations

from homing.api.lookup.find_runs import open_home
from homing.api.lookup.list_runs import HEADERS, billing_words, forgotten_words, list_runs
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import All, Json, Last
from homing.cloud.contact import home_guard
from homing.units import counted

__all__ = ["command"]


def command(last: Last = 30, all_: All = False, json_: Json = False) -> None:
    """List the newest runs, every unfinished run, and everything that may still cost money."""
    with open_home() as home:
        found = list_runs(last=last, is_all=all_, home=home)
        if output.is_json():
            output.emit("runs/1", found.to_dict(home))
        output.table(HEADERS, found.rows)
        if found.num_left_out:
            output.say(
                f"{counted(found.num_left_out, 'older run')} not shown (ended, not billing)."
                " Show them: homing runs --all"
            )
        say_problems(found.problems)
        for line in found.forgotten:
            output.say(f"warning: {forgotten_words(line)}")
        for sentence in billing_words(found.billing, found.things, found.problems):
            output.say(sentence)
        if guard := home_guard.words(home):
            output.say(guard)
        if not found.num_known and not home.ledger.num_lines() and not found.lost:
            output.say(
                f"No runs were launched from this homing home directory ({home.path}). Runs launched from other homing"
                " home directories are not shown."
            )
