"""Renders one chat template in a separate process: a line of JSON in, a line of JSON out.

    argv: memory limit in bytes. First line in: {"source", "names", "now"} -> {"ready": true} or {"fault": ...}
    then  {"messages", "tools", "add_generation_prompt", "marks"}    -> {"text": ...} or {"fault": ...}

A third-party template may loop forever or allocate gigabytes while it is compiled or rendered. Here that is harmless,
because this process has a memory limit, `template` limits the time it may take, and it exits when its parent does.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import sys
from typing import Any

from homing.lm.data.chat.messages import Fault
from homing.lm.data.chat.template import Rendering


def main() -> None:
    most = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    rendering: Rendering | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if rendering is None:
                now = datetime.datetime.fromisoformat(asked["now"])
                rendering = Rendering(asked["source"], asked["names"], now)
                say({"ready": True})
            else:
                text = rendering.render(
                    asked["messages"],
                    asked["tools"],
                    add_generation_prompt=asked["add_generation_prompt"],
                    marks=tuple(asked["marks"]),
                )
                say({"text": text})
        except Fault as fault:
            say({"fault": fault.text})
        except MemoryError:
            say({"memory": True})


if __name__ == "__main__":
    main()
