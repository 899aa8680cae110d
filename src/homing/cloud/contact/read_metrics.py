"""Reads a run's metrics.jsonl: all lines of a short file, or the lines that a curve needs from a long one.

    MetricLog         new lines on each call, for curves and for the state of a run
    newest_metrics    the last lines and the last validation, for a table of many runs

    metrics.jsonl --in blocks--> from each of a thousand blocks: first line, smallest and largest loss (rl: reward);
                                 every validation (only first, best and last if there are many), each phase change;
                                 the first and last lines of the file                              --> [Metric]

Each Metric is one line of the file. Nothing is averaged. A file of a million lines is read once, in one pass, and never
held in memory in full if the store supports partial reads. In a file larger than _EXAMINED bytes, only an evenly
spread sample is searched for the smallest and largest loss, because parsing every number would take longer than a user
would wait for the page to load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from homing.store import NotInStore, Store
from homing.store.base import Ranged
from homing.wire import codec
from homing.wire.event_lines import Metric

__all__ = ["MetricLog", "newest_metrics"]

_ALL_BYTES = 1 << 20  # files up to this size, a few thousand lines, are returned in full
_BLOCKS = 1000  # the file is divided into this many blocks, and lines for the curve are taken from each
_EXAMINED = 24 << 20
_PIECE = 1 << 17  # bytes per read; larger reads would exceed the CPU cache and take twice as long
_TAIL_BYTES = 8 << 20
_LATEST_BYTES = 1 << 15  # for a table: about a hundred lines, read for each run
_ENDS = 20  # number of lines to keep at the beginning and at the end of the file
_MOST_VALIDATIONS = 4  # per block

_Read = Callable[[int, int], bytes]  # reads a part of the file: (offset, number of bytes) -> its bytes

_LOSS = re.compile(rb'"loss": (-?[0-9][0-9.eE+-]*)')
_REWARD = re.compile(rb'"reward": (-?[0-9][0-9.eE+-]*)')
_VALIDATION = b'"val_loss": '
# Matches a validation loss that is not null. The pattern starts at the v of the field's name, not at the quote before
# it, because quotes are far more frequent than v's and the search would be slower.
_VALIDATED = re.compile(_VALIDATION[1:] + b"[^n]")
_PHASE = re.compile(rb'"phase": "([^"]*)"')


class MetricLog:
    """Reads a run's metrics, and returns each one once.

    A trainer that goes back to a checkpoint truncates the file, and a resumed attempt may start a new one. If the last
    line read is no longer at its offset, reading starts over. A final line without a newline is still being written
    and is not returned.
    """

    def __init__(self, store: Store, key: str, *, is_curve: bool = True) -> None:
        """Read the lines needed to draw a curve or, with `is_curve=False`, those that show the run's current state.

        In the latter case, only the beginning of a long file, the first lines of the last phase and the last
        _TAIL_BYTES are read.
        """
        self._store, self._key, self._is_curve = store, key, is_curve
        self._offset = 0
        self._last = b""  # the last line read, which ends at _offset

    def fresh(self) -> list[Metric]:
        """Return new metrics since the last call, in file order.

        Unreadable lines, which were cut off by a crash, are skipped.
        """
        try:
            size, read = _open(self._store, self._key)
        except NotInStore:
            return []
        if self._last and read(self._offset - len(self._last), len(self._last)) != self._last:
            self._offset, self._last = 0, b""
        start, num_bytes = self._offset, max(0, size - self._offset)
        lines: list[bytes] = []
        block = b""
        if not self._is_curve and num_bytes > _TAIL_BYTES:
            lines, self._offset = _beginnings(read, start, size)
            start, num_bytes = self._offset, size - self._offset
        is_short = num_bytes <= _ALL_BYTES
        step = _PIECE if is_short else min(_PIECE, num_bytes // _BLOCKS)
        every = max(1, num_bytes // step // _BLOCKS)
        for number, block in enumerate(_blocks(read, start, size, step)):
            if is_short:
                lines += block.splitlines()
            else:
                share = _EXAMINED // _BLOCKS if number % every == 0 else 0
                lines += _picked(block, share, is_first=number == 0)
            self._offset += len(block)
        if block:
            self._last = block[block.rfind(b"\n", 0, -1) + 1 :]
            if not is_short:
                data = read(max(start, self._offset - _PIECE), min(_PIECE, self._offset - start))
                ends = data.splitlines()[-_ENDS:]
                known = set(ends)
                lines = [*(line for line in lines if line not in known), *ends]
        return [metric for line in lines if (metric := _metric(line)) is not None]


def newest_metrics(store: Store, key: str) -> list[Metric]:
    """Return the last lines of the file and, before them, the last validation if it is further up, in file order.

    Only the end of the file is read, so that a table of a hundred long runs is quick.
    """
    try:
        size, read = _open(store, key)
    except NotInStore:
        return []
    lines = _whole_lines(read, size, _LATEST_BYTES)[-_ENDS:]
    if not any(_VALIDATED.search(line) for line in lines):
        earlier = _whole_lines(read, size, _TAIL_BYTES // 4)
        lines = [*[line for line in earlier if _VALIDATED.search(line)][-1:], *lines]
    return [metric for line in lines if (metric := _metric(line)) is not None]


def _whole_lines(read: _Read, size: int, num_bytes: int) -> list[bytes]:
    """Return the lines within the last bytes of the file, without a first or last line that is cut off."""
    start = max(0, size - num_bytes)
    data = read(start, size - start)
    return data[: data.rfind(b"\n") + 1].splitlines()[1 if start else 0 :]


def _open(store: Store, key: str) -> tuple[int, _Read]:
    """Return the file's size and a function that reads parts of it."""
    if isinstance(store, Ranged):
        return store.num_bytes(key), lambda start, number: store.read_part(key, start, number)
    data = store.read(key)
    return len(data), lambda start, number: data[start : start + number]


def _beginnings(read: _Read, start: int, end: int) -> tuple[list[bytes], int]:
    """Return the first lines of the file and of its last phase, and the offset at which to continue reading."""
    head = read(start, _ALL_BYTES // 4)
    lines = head[: head.rfind(b"\n") + 1].splitlines()[:_ENDS]
    after, tail = _line_after(read, end - _TAIL_BYTES, end)
    last = _phase_of(read(max(tail, end - _ALL_BYTES // 4), _ALL_BYTES // 4))
    if after and lines and _phase_of(after) == last != _phase_of(lines[0]):
        # The last phase began somewhere between the head and the tail, so bisect to find its first line.
        low, high = start, tail
        while high - low > _ALL_BYTES // 4:
            middle = (low + high) // 2
            low, high = (low, middle) if _phase_of(_line_after(read, middle, end)[0]) == last else (middle, high)
        around = read(low, high - low + _ALL_BYTES // 4).splitlines()[1:-1]
        lines += [line for line in around if _phase_of(line) == last][:_ENDS]
    return lines, tail


def _line_after(read: _Read, place: int, end: int) -> tuple[bytes, int]:
    """Return the first whole line that begins after this offset, and the offset of that line."""
    data = read(place, min(_ALL_BYTES // 4, end - place))
    begin = data.find(b"\n") + 1
    stop = data.find(b"\n", begin)
    return data[begin : stop if stop >= 0 else len(data)], place + begin


def _phase_of(text: bytes) -> bytes:
    """Return the phase of the last line in `text`, or b"" if no line has a phase."""
    found = _PHASE.findall(text)
    return found[-1] if found else b""


def _blocks(read: _Read, start: int, end: int, step: int) -> Iterator[bytes]:
    """Yield whole lines, about `step` bytes at a time, leaving out anything after the last newline."""
    at, longer = start, step
    while at < end:
        data = read(at, min(longer, end - at))
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut]
            at, longer = at + cut, step
        elif at + len(data) >= end or len(data) < longer:  # the last line is incomplete, or the file was truncated
            return
        else:
            longer *= 2


def _picked(block: bytes, examined: int, *, is_first: bool) -> list[bytes]:
    """Return selected lines of a block, in order.

    `examined` is the number of bytes to search for the smallest and largest loss or reward. If it is 0, only
    validations, phase changes and, in the first block, the first lines are returned.
    """
    starts = {*_validations(block), *_changes(block)}
    if examined:
        starts |= {0, *_extremes(block, examined)}
    if is_first:
        at = 0
        for _ in range(_ENDS):
            starts.add(at)
            at = block.find(b"\n", at) + 1
            if not 0 < at < len(block):
                break
    return [block[start : block.find(b"\n", start)] for start in sorted(starts)]


def _line_at(block: bytes, place: int) -> int:
    return block.rfind(b"\n", 0, place) + 1


def _extremes(block: bytes, examined: int) -> list[int]:
    figure = _REWARD if block.find(b'"reward": ', 0, examined) >= 0 else _LOSS
    found = []
    for match in figure.finditer(block, 0, max(1, examined)):
        try:
            found.append((float(match[1]), match.start()))
        except ValueError:
            continue
    return [_line_at(block, place) for _, place in (min(found), max(found))] if found else []


def _validations(block: bytes) -> list[int]:
    places = [match.start() - 1 for match in _VALIDATED.finditer(block)]
    found = [place for place in places if block.startswith(_VALIDATION, max(0, place))]
    if len(found) > _MOST_VALIDATIONS:
        found = [found[0], min(found, key=lambda place: _value(block, place)), found[-1]]
    return [_line_at(block, place) for place in found]


def _value(block: bytes, place: int) -> float:
    begin = place + len(_VALIDATION)
    try:
        return float(block[begin : begin + 40].split(b",")[0].split(b"}")[0])
    except ValueError:
        return float("inf")


def _changes(block: bytes) -> list[int]:
    """Return the offsets of the last line of each phase that ends in this block and of the next phase's first line."""
    first, last = _PHASE.search(block), _PHASE.search(block, _line_at(block, len(block) - 1))
    if first is None or last is None or first[1] == last[1]:
        return []
    found, before = list[int](), first
    for match in _PHASE.finditer(block):
        if match[1] != before[1]:
            found += [_line_at(block, before.start()), _line_at(block, match.start())]
        before = match
    return found


def _metric(line: bytes) -> Metric | None:
    try:
        return codec.loads(Metric, line)
    except codec.WireError:
        return None
