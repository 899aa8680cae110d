"""Writes docs/reference/cli.md from the help of the verbs, so that the page cannot drift from the code.

python docs/make_cli_page.py          writes it
python docs/make_cli_page.py --check  exits 1 if the page is not what it would write
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import homing.cli
from homing.cli.run_verb import LazyVerbs
from homing.cli.verb_list import STORIES, VERBS

PAGE = Path(__file__).parent / "reference/cli.md"
HEAD = """# Command line

<!-- Written by docs/make_cli_page.py from the help of the verbs. Change the help, then run it. -->

The general form is `homing COMMAND [RUN] [OPTIONS]`. `homing COMMAND --help` prints the same text as this page. Results
go to stdout, messages to stderr. Every command accepts `-q`, `-v` and `--json`. With `--json`, a command prints one
JSON document, or one document per line if it streams. The `schema` field of a document has one of the names listed with
the command, or `homing.error/1`. See [exit codes](exit-codes.md).

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
        return [f"## {verb}", "", *about(verb, command, VERBS[verb]), *documents(verb)]
    lines = [f"## {verb}", "", VERBS[verb], "", *documents(verb)]
    for name, each in subcommands.items():
        lines += [f"### {verb} {name}", "", *about(f"{verb} {name}", each, "")]
    return lines


def documents(verb: str) -> list[str]:
    """The names of the JSON documents that the verb's module, or another module on its behalf, passes to `emit`."""
    package = Path(homing.cli.__file__ or "").parent
    names = emitted(package / "verbs" / f"{verb}.py")
    names |= {name for module in package.glob("*.py") for name in emitted(module) if name.split("-")[0] == verb}
    return [f"JSON documents: {', '.join(f'`homing.{name}`' for name in sorted(names))}", ""] if names else []


def emitted(module: Path) -> set[str]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    names = [call.args[0] for call in calls if call.func.attr in ("emit", "emit_all")]
    return {name.value for name in names if isinstance(name, ast.Constant)}


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
