"""Strict when we write, lenient when we read."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional  # noqa: UP035  (the codec must read these on Python 3.8)

import pytest

import homing
from homing.wire import codec
from homing.wire.control_files import Control
from homing.wire.event_lines import Event


@dataclass
class Inner:
    x: float


@codec.record("probe", 1)
@dataclass
class Probe:
    name: str
    count: int = 3
    inner: Optional[Inner] = None  # noqa: UP045
    many: List[Inner] = field(default_factory=list)  # noqa: UP006
    by_name: Dict[str, int] = field(default_factory=dict)  # noqa: UP006


def test_what_is_written_reads_back_equal() -> None:
    probe = Probe("a", 5, Inner(1.5), [Inner(2.0)], {"k": 1})
    assert codec.loads(Probe, codec.dumps(probe)) == probe


def test_a_writer_refuses_a_value_of_the_wrong_type() -> None:
    with pytest.raises(codec.WireError, match="count"):
        codec.dumps(Probe("a", count="5"))  # type: ignore[arg-type]
    with pytest.raises(codec.WireError, match="count"):
        codec.dumps(Probe("a", count=True))
    with pytest.raises(codec.WireError, match="many"):
        codec.dumps(Probe("a", many=[3]))  # type: ignore[list-item]


def test_a_writer_refuses_what_json_cannot_say() -> None:
    with pytest.raises(codec.WireError, match="finite"):
        codec.dumps(Inner(float("nan")))
    with pytest.raises(codec.WireError):
        codec.dumps(Event(0.0, "agent", "k", "t", data={"a": object()}))


def test_a_reader_ignores_keys_of_a_newer_version_and_fills_defaults() -> None:
    read = codec.loads(Probe, '{"schema": "homing.probe/9", "name": "a", "later": {"y": 1}}')
    assert read == Probe("a")


def test_a_reader_names_the_path_of_what_it_cannot_use() -> None:
    with pytest.raises(codec.WireError, match=r"Probe\.many\[1\]\.x"):
        codec.loads(Probe, '{"name": "a", "many": [{"x": 1}, {"x": "2"}]}')
    with pytest.raises(codec.WireError, match=r"Probe\.name is missing"):
        codec.loads(Probe, "{}")
    with pytest.raises(codec.WireError, match="not JSON"):
        codec.loads(Probe, "{")
    with pytest.raises(codec.WireError, match=r"homing\.control/1"):
        codec.loads(Probe, codec.dumps(Control()))


@pytest.mark.usefixtures("_no_garbage_collection")
def test_everything_that_runs_on_an_image_parses_as_python_3_8() -> None:
    root = Path(homing.__file__).parent
    files = [root / "world/machine.py", root / "instance/bootstrap.py", *root.glob("wire/*.py")]
    files += root.glob("instance/agent/*.py")
    assert len(files) > 20
    for file in files:
        ast.parse(file.read_text(), feature_version=(3, 8))
