"""Help text of one verb with readable placeholders: RUN, FILE and N instead of {RUN}, <list[str]> and <int range>."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = ["Verb"]

# Type name in typer's help -> placeholder. A choice is shown as its values.
_WORDS = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH", "file": "FILE", "dir": "DIR"}


class Verb(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_in_usage(each) for each in self.get_params(ctx) if _is_shown_argument(each))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments, options = [], []
        parameters: list[Any] = self.get_params(ctx)  # Any: typer bundles click under a private name
        for each in parameters:
            if _is_shown_argument(each):
                arguments.append((_name(each), each.get_help_record(ctx)[1].removesuffix("[required]").rstrip()))
            elif each.param_type_name == "option":
                if not each.metavar and not each.is_flag:
                    each.metavar = _word(each.display_type(ctx))
                options.append(each.get_help_record(ctx))
        for title, records in (("Arguments", arguments), ("Options", [each for each in options if each])):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _is_shown_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument" and not parameter.hidden


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _in_usage(argument: Any) -> str:
    name = _name(argument)
    several = "..." if argument.nargs != 1 and "..." not in name else ""
    return f"{name}{several}" if argument.required else f"[{name}{several}]"


def _word(typed: str) -> str:
    """Return the placeholder for typer's `<list[str]>`, `<int range>` or `<auto|always|never>`."""
    label = typed.strip("<>").removeprefix("list[").removesuffix("]").removesuffix(" range")
    return _WORDS.get(label, label)
