"""The small files that say how text and turns become ids, copied from somebody's folder into a data folder.

tokenizer.json goes as it is. A template that lies in chat_template.jinja goes into tokenizer_config.json, so that
what travels to a machine and into every checkpoint stays two files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homing.errors import DataError
from homing.lm.chat.template import TEMPLATE
from homing.lm.prep.work import write_whole
from homing.wire.names import TOKENIZER, TOKENIZER_CONFIG

__all__ = ["take_papers"]


def take_papers(source: Path, target: Path) -> None:
    """From the folder `source` into `target`; what is the same already is left alone."""
    if not (source / TOKENIZER).is_file():
        raise DataError(
            what=f"There is no tokenizer in {source}.",
            why=f"{TOKENIZER} is not there, and none is trained in its place.",
            fix="Name a folder that has one: tokenizer.file, phases.0.init_from or model.from",
        )
    target.mkdir(parents=True, exist_ok=True)
    papers = {TOKENIZER: (source / TOKENIZER).read_bytes()}
    config = _config(source)
    if config:
        papers[TOKENIZER_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    for name, data in papers.items():
        if not (target / name).is_file() or (target / name).read_bytes() != data:
            write_whole(target / name, data)


def _config(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if (source / TOKENIZER_CONFIG).is_file():
        try:
            config = json.loads((source / TOKENIZER_CONFIG).read_bytes())
        except (ValueError, RecursionError) as exc:
            path = source / TOKENIZER_CONFIG
            raise DataError(f"{path} cannot be read.", why=str(exc), fix="Fetch it again.") from exc
    if (source / TEMPLATE).is_file():
        config["chat_template"] = (source / TEMPLATE).read_text(encoding="utf-8")
    return config
