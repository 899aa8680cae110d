"""Writes docs/reference/run-file.md from the schema, so that the page cannot drift from the code.

python docs/make_run_file_page.py          writes it
python docs/make_run_file_page.py --check  exits 1 if the page is not what it would write
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "reference/run-file.md"
HEAD = """# The run file

<!-- Written by docs/make_run_file_page.py from the schema. Change the schema, then run it. -->

One file, `runs/NAME.yaml`, describes the whole run. A run file is written in YAML; TOML and JSON files are recognized
by their extension. `homing new NAME --from PRESET` writes a run file with comments, `homing explain KEY` explains a
key, and `homing plan NAME --resolved` prints every value and where it came from. `--set` overrides the run file, and
the run file overrides the defaults. homing reports all mistakes at once, with the file, the line, the nearest key and
the allowed range.

```bash
homing new --list
homing explain
homing explain model.depth
homing explain --schema > homing.schema.json
```

The last command writes the JSON schema of the run file. An editor with a YAML language server completes the keys and
marks mistakes if the first line of the run file is `# yaml-language-server: $schema=../homing.schema.json`.

"""


def main() -> int:
    page = HEAD + presets() + keys()
    if "--check" in sys.argv:
        return 0 if PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def presets() -> str:
    rows = homing("new", "--list")["presets"]
    lines = ["## Presets\n", "| preset | parameters | layers | width | context | vocabulary | for |"]
    lines.append("|---|--:|--:|--:|--:|--:|---|")
    for row in rows:
        numbers = " | ".join(f"{row[key]:,}" for key in ("num_params", "num_layers", "width", "context", "vocab_size"))
        lines.append(f"| `{row['preset']}` | {numbers} | {row['about']} |")
    return "\n".join(lines) + "\n\n"


def keys() -> str:
    explained = homing("explain")
    lines = []
    for section, text in explained["sections"].items():
        title = f"`{section}`" if section else "The top"
        lines += [f"## {title}\n", f"{text}\n", "| key | means | type | default | allowed |", "|---|---|---|---|---|"]
        for key in (key for key in explained["keys"] if key["section"] == section):
            cells = [f"`{key['name']}`", key["about"], key["kind"], key["default"], key["allowed"]]
            lines.append("| " + " | ".join(str(cell or "").replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def homing(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "homing.cli", *arguments, "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return document


if __name__ == "__main__":
    sys.exit(main())
