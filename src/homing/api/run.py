"""`homing.Run`: one run, from the run file to the trained model, with the same steps as the command line.

    run = homing.Run.new("first", preset="tiny", text=["books/*.txt"])
    run.prep()
    run.launch(spend_limit=12, confirm=True)
    for event in run.watch():
        print(event.text)
    run.fetch()
    run.destroy()

Each method calls the same function as the verb of that name. Nothing here prompts: where the command line asks a
person, an argument must confirm (`confirm=True`, `force=True`), and without it a UsageError names the rate and the
limit.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homing.errors import NotChecked, UsageError

if TYPE_CHECKING:
    from homing.api.lookup.local_runs import Trained
    from homing.api.runs.plan_run import Planned
    from homing.cloud.home import Home
    from homing.cloud.ledger.ledger import RunRow
    from homing.cloud.providers.base import Offer
    from homing.cloud.watch.run_output import Report
    from homing.config.load import Loaded
    from homing.lm.data.prep import Progress

__all__ = ["Run", "Runs", "offers", "runs"]


class Run:
    """One run. `name` is a name, an id, NAME@RUN or the path of a run file, as on the command line."""

    def __init__(self, name: str, *, sets: Sequence[str] = (), smoke: bool = False) -> None:
        self.name, self.sets, self.is_smoke = str(name), list(sets), smoke

    @classmethod
    def new(
        cls,
        name: str,
        preset: str = "tiny",
        *,
        text: Sequence[str] = (),
        validation: Sequence[str] = (),
        chat: Sequence[str] = (),
        force: bool = False,
    ) -> Run:
        """Write runs/NAME.yaml from a preset or from open weights (hf:OWNER/NAME, ./FOLDER), like `homing new`."""
        from homing.api.data.new_run import new_run

        new_run(name, preset, text=list(text), validation=list(validation), chat=list(chat), force=force)
        return cls(name)

    @classmethod
    def from_file(cls, path_or_name: str | Path, *, sets: Sequence[str] = (), smoke: bool = False) -> Run:
        """Open a run file by its path or name. `sets`: changes such as "model.depth=8", as with --set."""
        run = cls(str(path_or_name), sets=sets, smoke=smoke)
        _ = run.config  # report mistakes in the run file now, not at the first use
        return run

    @property
    def config(self) -> Loaded:
        """The run file, read and resolved anew on each access."""
        from homing.config.load import load_run

        return load_run(self.name, self.sets, is_smoke=self.is_smoke, is_for_prep=True)

    # --- on this computer ---

    def prep(
        self, *, force: bool = False, on_progress: Callable[[Progress | None], None] | None = None
    ) -> dict[str, Any]:
        """Turn text into a tokenizer and token shards. Returns what `homing prep --json` prints."""
        from homing.api.data.prepare import prep_run

        done = prep_run(self.name, sets=self.sets, force=force, smoke=self.is_smoke, on_progress=on_progress)
        return done.document

    def verify(self, *, check_hashes: bool = False) -> dict[str, Any]:
        """Check sizes, memory and data, and run one training step. Returns the figures; problems raise DataError."""
        from homing.api.verify_before_launch import raise_problems, verify_run

        found = verify_run(self.name, self.sets, smoke=self.is_smoke, check_hashes=check_hashes)
        raise_problems(found)
        return found.document

    def train(
        self, *, fresh: bool = False, extend: int | None = None, on_line: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Train on this computer, and return when training ends. Calling this again resumes an unfinished run.

        `on_line` receives each line of the trainer's output.

        A run that fails, is interrupted or reaches a limit raises the error that `homing train` prints.
        """
        from homing.api.train_here import train_here

        def write(line: bytes) -> bool:
            assert on_line is not None, "only then it is used"
            on_line(line.decode("utf-8", "replace").rstrip("\n"))
            return True

        shown = write if on_line is not None else None
        done = train_here(self.name, self.sets, smoke=self.is_smoke, fresh=fresh, extend=extend, out=shown, err=shown)
        if done.error is not None:
            raise done.error
        return done.to_dict()

    def plan(
        self, *, spend_limit: Decimal | float | str | None = None, rate: Decimal | float | str | None = None
    ) -> Planned:
        """Return hours and dollars per offer, cheapest to finish first, or by list prices without an account.

        Rents nothing. `spend_limit`: also compute how much training this limit buys. `rate`: assume this hourly rate
        for every GPU, without querying providers.
        """
        from homing.api.lookup.find_runs import parse_limit
        from homing.api.runs.plan_run import plan_run

        def dollars(value: Decimal | float | str | None, called: str) -> Decimal | None:
            return parse_limit(None if value is None else str(value), called)

        limit, own_rate = dollars(spend_limit, "spend_limit"), dollars(rate, "rate")
        return plan_run(
            self.name, sets=self.sets, is_smoke=self.is_smoke, spend_limit_usd=limit, rate_usd_per_hour=own_rate
        )

    # --- on a rented instance ---

    def launch(
        self,
        *,
        spend_limit: Decimal | float | str | None = None,
        confirm: bool = False,
        resume: bool = False,
        one_guard: bool = False,
        no_spot: bool = False,
        allow: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Rent an instance, train on it, push the model and end billing. Returns after the first heartbeat.

        `spend_limit`: the maximum cost of the run in dollars; required here or as limits.spend in the run file.
        `confirm`: must be True; otherwise a UsageError names the rate and the limit, and nothing is rented.
        `allow`: what homing would otherwise refuse: "many-passes", "no-smoke" or "low-balance".
        """
        from homing.api.lookup.find_runs import parse_limit
        from homing.api.runs.launch_run import Confirmed, LaunchOptions, launch

        options = LaunchOptions(
            spend_limit_usd=parse_limit(None if spend_limit is None else str(spend_limit), "spend_limit"),
            sets=tuple(self.sets),
            is_smoke=self.is_smoke,
            resume=resume,
            one_guard=one_guard,
            no_spot=no_spot,
            allow=tuple(allow),
        )
        started = launch(self.name, options, answers=Confirmed(confirm=confirm))
        assert started is not None, "a refusal raises"
        self.name = started.to_dict()["run"]
        return started.to_dict()

    def watch(
        self, *, every_s: float = 30.0, trackers: Sequence[str] = (), tracker_name: str | None = None
    ) -> Iterator[Report]:
        """Yield events, samples and progress lines until the run ends; the limits are enforced meanwhile.

        Trackers that were requested earlier and have stopped start again. `trackers`: also log to these, such as
        "tensorboard" or "wandb". `tracker_name`: the name of the run in the trackers; default: the run id.
        """
        from homing.api.runs.watch_run import watch_run

        yield from watch_run(self.name, every_s=every_s, trackers=trackers, tracker_name=tracker_name)

    def stop(self, *, wait: bool = True, timeout_s: float = 600.0) -> None:
        """Save a checkpoint and end training at the next step."""
        from homing.api.runs.stop_run import stop_run

        stop_run(self.name, wait=wait, timeout_s=timeout_s)

    def fetch(self, *, checkpoint: str = "latest", to: str | Path | None = None, force: bool = False) -> Path:
        """Download the model from the store and verify every hash. Returns its folder."""
        from homing.api.runs.fetch_model import fetch_model

        place = Path(to) if to is not None else None
        return fetch_model(self.name, checkpoint=checkpoint, to=place, force=force).folder

    def destroy(self, *, force: bool = False) -> list[dict[str, Any]]:
        """Destroy the run's instances, and return the receipts once the provider has confirmed the end of billing.

        `force`: destroy even if data that was not pushed would be lost. Without it, a UsageError is raised instead.
        """
        from homing.api.runs.end_runs import destroy

        def agrees(question: str) -> bool:
            if not force:
                raise UsageError(
                    what="Destroying the instances now would lose data; nothing was destroyed.",
                    why=question,
                    fix="Save first: run.stop()   or destroy them anyway: run.destroy(force=True)",
                )
            return True

        ended = destroy(self.name, agrees=agrees)
        assert ended is not None, "a refusal raises"
        if ended.error is not None:
            raise ended.error
        return list(ended.to_dict()["receipts"])

    # --- information about the run ---

    def status(self) -> dict[str, Any]:
        """Return the current state: instances, spend and progress, as `homing status --json` prints it."""
        from homing.api.lookup.status import run_status

        return next(run_status(self.name)).document

    def metrics(self, *, as_frame: bool = False) -> Any:
        """Return one dict per reported step, or with `as_frame` a pandas DataFrame."""
        from homing.wire import file_names

        rows = self._lines(file_names.METRICS)
        if not as_frame:
            return rows
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as exc:
            raise UsageError("as_frame=True needs pandas.", fix="pip install pandas") from exc
        return pandas.DataFrame(rows)

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, oldest first."""
        from homing.wire import file_names

        return self._lines(file_names.EVENTS)

    def samples(self) -> dict[str, str]:
        """Return the texts that the model wrote during training, by file name."""
        from homing.store import run_key
        from homing.wire import file_names

        with self._home() as home:
            store, run_id = self._store(home)
            found = [entry.key for entry in store.list(run_key(run_id, file_names.SAMPLES, ""))]
            return {key.rpartition("/")[2]: store.read(key).decode("utf-8", "replace") for key in sorted(found)}

    def receipt(self) -> list[dict[str, Any]]:
        """Return the ledger lines of the run: every instance that was requested, and what it cost."""
        from homing.api.lookup.local_runs import Trained
        from homing.cloud.reconcile.run_status import dump_line

        with self._home() as home:
            found = self._find(home)
            return [] if isinstance(found, Trained) else [dump_line(line) for line in home.ledger.lines(found.id)]

    def report(self, to: str | Path | None = None, *, evals: Sequence[str | Path] = ()) -> Path:
        """Write one page about the run, as .html or .md, and return its path; `to` defaults to NAME.html.

        `evals`: results saved by `Model.eval(out=...)` or `homing eval --out`.
        """
        from homing.api.pages.write_report import report_run

        name = Path(self.name).name.removesuffix(".yaml")
        path = Path(to) if to is not None else Path(f"{name}.html")
        report_run(self.name, out=path, evals=[Path(each) for each in evals])
        return path

    def __repr__(self) -> str:
        changes = f", sets={self.sets!r}" if self.sets else ""
        return f"Run({self.name!r}{changes}{', smoke=True' if self.is_smoke else ''})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    # --- helpers ---

    def _home(self) -> AbstractContextManager[Home]:
        from homing.api.lookup.find_runs import open_home

        return open_home()

    def _find(self, home: Home) -> RunRow | Trained:
        from homing.api.lookup.find_runs import find_any

        return find_any(home, self.name)

    def _store(self, home: Home) -> tuple[Any, str]:
        from homing.api.lookup.local_runs import Trained, store_here

        found = self._find(home)
        return (store_here(home), found.run) if isinstance(found, Trained) else (home.store_of(found), found.id)

    def _lines(self, file: str) -> list[dict[str, Any]]:
        from homing.store import NotInStore, run_key

        with self._home() as home:
            store, run_id = self._store(home)
            try:
                text = store.read(run_key(run_id, file)).decode("utf-8", "replace")
            except NotInStore:
                return []
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Runs(list[Run]):
    """A list of all runs, shown as the table of `homing runs`."""

    def __init__(self, found: Iterable[Run], headers: list[str], rows: list[list[str]], notes: list[str]) -> None:
        super().__init__(found)
        self.headers, self.rows, self.notes = headers, rows, notes

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        table = [self.headers, *self.rows]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*(line.rstrip() for line in lines), *self.notes])

    def _repr_html_(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{row(self.headers, 'th')}{''.join(row(each, 'td') for each in self.rows)}</table>{notes}"


def runs(*, last: int = 30, all: bool = False) -> Runs:
    """List all runs, rented or trained here. Queries every provider for resources that may still cost money."""
    from homing.api.lookup.list_runs import HEADERS, billing_words, list_runs

    found = list_runs(last=last, is_all=all)
    ids = [*(status.run.id for status in found.runs), *(each.run for each in found.trained)]
    notes = [
        *(each for each in found.problems if not isinstance(each, NotChecked)),
        *billing_words(found.billing, found.things, found.problems),
    ]
    return Runs(map(Run, ids), HEADERS, found.rows, notes)


def offers(*, gpu: str | None = None, num_gpus: int = 1, providers: Sequence[str] = ()) -> list[Offer]:
    """Return what can be rented now, lowest rate first. Rents nothing. `num_gpus=0`: any number."""
    from homing.api.notices import say_problems
    from homing.api.runs.find_offers import find_offers

    found = find_offers(gpu=gpu, num_gpus=num_gpus, providers=providers)
    say_problems(found.problems)
    return found.offers
