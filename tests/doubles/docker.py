"""A `docker` that keeps state in a folder and builds nothing: for what homing says when Docker refuses.

    state.json   images, containers with their logs, pushed names        faults.json   command -> (exit code, its words)

The words are those of a real engine. What it cannot know, whether a Dockerfile builds, a real engine tells in
tests/e2e/test_image.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python} -IS
import hashlib, json, pathlib, sys
folder, argv = pathlib.Path({folder!r}), sys.argv[1:]
state = json.loads((folder / "state.json").read_text())
faults = json.loads((folder / "faults.json").read_text())
state["calls"].append(argv)

def leave(code, text=""):
    (folder / "state.json").write_text(json.dumps(state))
    print(text, file=sys.stderr if code else sys.stdout, flush=True)
    sys.exit(code)

verb = argv[0]
fault = faults.get(verb)
if fault and verb != "run":
    leave(*fault)
if verb == "version":
    leave(0, "28.2.2")
if verb == "build":
    image = argv[argv.index("-t") + 1]
    text = pathlib.Path(argv[-1], "Dockerfile").read_text()
    missing = [name for line in text.splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]
               if not pathlib.Path(argv[-1], name).exists()]
    if missing:
        leave(1, f"COPY failed: file not found in build context: {{missing}}")
    state["images"][image] = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    leave(0, "Step 1/7 : FROM base\\nSuccessfully tagged " + image)
if verb == "image":
    leave(0, state["images"][argv[-1]])
if verb == "ps":
    labels = [word.partition("label=")[2] for word in argv if word.startswith("label=")]
    leave(0, "\\n".join(name for name, made in state["containers"].items() if set(labels) <= set(made["labels"])))
if verb == "rm":
    state["containers"].pop(argv[-1], None)
    leave(0)
if verb == "run":
    name, label = argv[argv.index("--name") + 1], argv[argv.index("--label") + 1]
    if name in state["containers"]:
        leave(125, f'docker: Error response from daemon: Conflict. The container name "/{{name}}" is already in use.')
    code, said = fault or (0, "torch 2.13.0 numpy 2.4.6")
    state["containers"][name] = {{"labels": [label], "log": said}}
    leave(code, said)
if verb == "logs":
    leave(0, state["containers"][argv[-1]]["log"])
if verb == "push":
    state["pushed"].append(argv[-1])
    leave(0, "latest: digest: sha256:" + "7" * 64 + " size: 1234")
leave(1, f"docker: {{verb!r}} is not a docker command.")
"""


class Docker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "docker"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self._write("state.json", {"images": {}, "containers": {}, "pushed": [], "calls": []})
        self._write("faults.json", {})

    def fail(self, verb: str, words: str, code: int = 1) -> None:
        self._write("faults.json", {verb: [code, words]})

    def heal(self) -> None:
        self._write("faults.json", {})

    def hold(self, container: str, *labels: str) -> None:
        """A container that is there already."""
        state = self.state
        state["containers"][container] = {"labels": list(labels), "log": ""}
        self._write("state.json", state)

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    def calls(self, verb: str) -> list[list[str]]:
        return [call for call in self.state["calls"] if call[0] == verb]

    def _write(self, name: str, body: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(body))
