"""Writes docs/reference/cli.md from the help of the verbs, so that the page cannot drift from the code.

python docs/make_cli_page.py          writes it
python docs/make_cli_page.py --check  exits 1 if the page is not what it would write
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from homing.cli.call import LazyVerbs
from homing.cli.verb_list import STORIES, VERBS

PAGE = Path(__file__).parent / "reference/cli.md"
HEAD = """# Command line

<!-- Written by docs/make_cli_page.py from the help of the verbs. Change the help, then run it. -->

The general form is `homing COMMAND [RUN] [OPTIONS]`. `homing COMMAND --help` prints the same text as this page. Results
go to stdout, messages to stderr. Every command accepts `-q`, `-v` and `--json`. With `--json` it prints one JSON
document, or one document per line if it streams; each has a `schema` field. See [exit codes](exit-codes.md).

```bash
homing --help
homing plan --help
```

"""


def main() -> int:
    page = HEAD + "\n".join(line for group in STORIES.values() for verb in group for line in section(verb))
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def section(verb: str) -> list[str]:
    command = LazyVerbs().get_command(None, verb)
    subcommands: dict[str, Any] = getattr(command, "commands", {})
    if not subcommands:
        return [f"## {verb}", "", *about(verb, command, VERBS[verb])]
    lines = [f"## {verb}", "", VERBS[verb], ""]
    for name, each in subcommands.items():
        lines += [f"### {verb} {name}", "", *about(f"{verb} {name}", each, "")]
    return lines


def about(name: str, command: Any, otherwise: str) -> list[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["homing", name, *command.collect_usage_pieces(context)])
    lines = [" ".join((command.help or otherwise).split()), "", f"`{usage}`", ""]
    rows = [row(each, context) for each in command.params if getattr(each, "help", None)]
    if rows:
        lines += ["| argument or option | what it does |", "|---|---|", *rows, ""]
    return lines


def row(parameter: Any, context: Any) -> str:
    """As in the help: the flags with their value, then the text with its default."""
    name, text = parameter.get_help_record(context)
    name = re.sub(r" <(int|float)( range)?>", " N", name).replace(" <str>", "")
    return f"| `{cell(name)}` | {cell(text)} |"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
