"""Writes docs/acceptance.md from docs/acceptance.yaml and from the tests that are marked with its items.

python docs/make_acceptance_page.py          writes it
python docs/make_acceptance_page.py --check  exits 1 if the page is not what it would write

A test shows an item if it has `@pytest.mark.acceptance(7)`, or `@pytest.mark.acceptance(7, 41, "X3")` for several. The
markers are read from the source, so no test is imported or run.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "acceptance.yaml"
PAGE = ROOT / "docs" / "acceptance.md"
MARKER = "pytest.mark.acceptance"
NOT_YET = "not yet"
HEAD = """# Acceptance

<!-- Written by docs/make_acceptance_page.py from docs/acceptance.yaml and from the markers of the tests. -->

What homing does, item by item, with a command that shows it and the tests that fail if it stops being true.
**Missing** names the part of an item that homing does not do, or that no test or measurement has shown. Commands are
examples: `play` is a run file, `runs/play.yaml`. To list the tests of an item, search for its marker:
`grep -rnE 'mark.acceptance\\((.*, )?41[,)]' tests`. RunPod, Shadeform, AWS and Modal are tested against simulated
provider APIs.

"""


class MarkedTest(NamedTuple):
    """A test function and the items it is marked with."""

    file: str  # from the root of the repository
    name: str  # `test_x`, or `TestClass::test_x`
    numbers: tuple[str, ...]
    node: ast.FunctionDef
    holders: tuple[ast.Module | ast.ClassDef, ...]  # the module, and the class of a method


def main() -> int:
    page = write_page(load_sections(), find_marked_tests())
    if "--check" in sys.argv:
        return 0 if PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def load_sections() -> list[dict[str, Any]]:
    """The sections of the data file: `title` and `items`."""
    sections: list[dict[str, Any]] = YAML(typ="safe", pure=True).load(DATA.read_text(encoding="utf-8"))
    return sections


def find_marked_tests(folder: Path = ROOT / "tests") -> list[MarkedTest]:
    """Every function below `folder` with the marker, in the order of files and lines.

    Raises ValueError if a marker is anywhere else, or is not a call with plain numbers.
    """
    return [test for path in sorted(folder.rglob("*.py")) for test in _marked_tests_of(path, folder.parent)]


def write_page(sections: list[dict[str, Any]], tests: list[MarkedTest]) -> str:
    files_of: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        for number in test.numbers:
            files_of[number].append(test.file)
    parts = []
    for section in sections:
        lines = [f"## {section['title']}\n", "| no. | what homing does | command | tests |", "|---|---|---|---|"]
        for item in section["items"]:
            number = str(item["number"])
            cells = [number, _sentence(item), _commands(item), _tests(files_of[number])]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return HEAD + "\n".join(parts)


def _sentence(item: dict[str, Any]) -> str:
    missing = f" **Missing:** {item['missing']}" if "missing" in item else ""
    return f"{item['does']}{missing}"


def _commands(item: dict[str, Any]) -> str:
    return " ".join(f"`{command}`" for command in item.get("commands", [])) or NOT_YET


def _tests(files: list[str]) -> str:
    if not files:
        return NOT_YET
    count = "1 test" if len(files) == 1 else f"{len(files)} tests"
    return f"{count} in {', '.join(f'`{file}`' for file in dict.fromkeys(files))}"


def _marked_tests_of(path: Path, root: Path) -> list[MarkedTest]:
    tree, file, found = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).as_posix(), []
    holders = [(tree,), *((tree, node) for node in tree.body if isinstance(node, ast.ClassDef))]
    for holder in holders:
        for node in holder[-1].body:
            if not isinstance(node, ast.FunctionDef):
                continue
            markers = [each for each in node.decorator_list if ast.unparse(each).startswith(MARKER)]
            if not markers:
                continue
            name = "::".join([*(each.name for each in holder if isinstance(each, ast.ClassDef)), node.name])
            if len(markers) > 1:
                raise ValueError(f"{file}:{node.lineno}: {name} has several markers. Put all numbers into one")
            found.append(MarkedTest(file, name, _numbers(markers[0], f"{file}:{node.lineno}"), node, holder))
    # On a class, in `pytestmark` or on an inner function a marker would look as if it counted.
    uses = sum(isinstance(node, ast.Attribute) and ast.unparse(node) == MARKER for node in ast.walk(tree))
    if uses != len(found):
        raise ValueError(f"{file}: {MARKER} may only decorate test functions and methods of test classes")
    return sorted(found, key=lambda test: test.node.lineno)


def _numbers(marker: ast.expr, place: str) -> tuple[str, ...]:
    if isinstance(marker, ast.Call) and marker.args and not marker.keywords:
        values = [each.value for each in marker.args if isinstance(each, ast.Constant)]
        if len(values) == len(marker.args) and all(isinstance(value, int | str) for value in values):
            return tuple(str(value) for value in values)
    raise ValueError(f'{place}: write the numbers of items: {MARKER}(7) or {MARKER}(7, "X3")')


if __name__ == "__main__":
    sys.exit(main())
