"""`homing destroy`: end billing, confirmed by the provider. Asks only if something would be lost."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.runs.end_runs import Ended, called, destroy
from homing.cli import output
from homing.cli.complete import run_words
from homing.cli.options import Json, Yes
from homing.cloud.ledger.meter import at_most
from homing.cloud.reconcile.inventory import Finding

__all__ = ["command"]


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Name of the run whose instances should be destroyed, or the id of one instance or volume.",
            autocompletion=run_words,
        ),
    ] = None,
    is_all: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Destroy every instance that homing created, even one that belongs to no run, and its resources.",
        ),
    ] = False,
    kept: Annotated[bool, typer.Option("--kept", help="With --all: also destroy kept volumes, after asking.")] = False,
    stored: Annotated[
        bool,
        typer.Option("--stored", help="Also delete what the runs pushed to the store, including models, after asking."),
    ] = False,
    same_account: Annotated[
        bool,
        typer.Option("--same-account", help="Confirm that your API key is for the account that rented the instance."),
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Destroy instances and end billing, confirmed by the provider.

    An instance that is already gone counts as success.
    """
    output.ignore_output_errors()
    ended = destroy(
        run,
        is_all=is_all,
        kept=kept,
        stored=stored,
        same_account=same_account,
        agrees=lambda question: output.ask(question, yes=yes),
    )
    if ended is None:
        return
    output.emit("destroy/1", ended.to_dict())
    _show(ended)
    if ended.error is not None:
        raise ended.error


def _show(ended: Ended) -> None:
    left, lines = ended.left, ended.lines
    _say_left(left)
    if ended.is_resource:
        return
    if not lines:
        known = "No known instance was running." if ended.unasked else "Nothing was running; nothing is billing."
        output.say("Nothing else was running." if left else known)
        return
    dollars = {line.mark: at_most(line) + usd(line.spend_usd) for line in lines}
    output.table(
        ["instance", "provider", "dollars", "note"],
        [(line.instance_id or line.mark, line.provider, dollars[line.mark], line.note) for line in lines],
    )
    output.say("Destroyed, including volumes and keys, and confirmed by the provider. Receipt: homing ledger")
    for row in ended.rows:
        found = ended.kept[row.id]
        price = str(found) if found else "size unknown"
        output.say(f"Files of {row.id} remain in {row.store}: {price}")
        output.say(f"  List the files: homing store ls runs/{row.id} --store {row.store}")


def _say_left(left: list[Finding]) -> None:
    for each in left:
        rate = f", {usd(each.rate_usd_per_hour)}/h" if each.may_bill else ""
        why = ", marked to be kept" if each.kind == "kept" else ""
        output.say(f"Still exists: {called(each)}{why}{rate}. Destroy it: homing destroy {each.id}")
