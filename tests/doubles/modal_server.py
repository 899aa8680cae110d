"""The Modal double as a process of its own: there for whoever is killed.

python -m tests.doubles.modal_server FOLDER
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from tests.doubles import modal as modal_double

from homing.world import World

SERVER = "modal.json"  # in FOLDER: the environment that leads to it


def main() -> int:
    folder = Path(sys.argv[1])
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with modal_double.running(folder / "boxes", {"/opt/homing": "{box}/root"}) as modal:
        World().write(folder / SERVER, json.dumps(modal.environment).encode())
        over.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
