"""Reads Parquet files row by row: the text of one column, or whole rows.

    texts_of(reading, column)   row number and text, as UTF-8 bytes that are not validated yet
    rows_of(reading)            row number and fields

Reads one row group after the other, only the columns needed, page by page: memory is bounded by a few rows and pages,
however large a row group is. Rows are numbered from 1, like lines.

Parquet cannot distinguish an absent field from a null one, because every row has every column. In conversations, fields
that a turn does not have are usually left out, so null fields are treated as absent.

The reader is pyarrow, an optional extra, imported here alone and only when such a file is opened: training never needs
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from homing.errors import DataError
from homing.lm.data.text.parquet_sizes import Group, check_pages
from homing.lm.data.text.read_bytes import Reading
from homing.lm.data.text.size_limits import check_unpacked
from homing.text_sources import Source

__all__ = ["rows_of", "texts_of"]

_BATCH_BYTES = 1 << 20  # per batch of rows, estimated by the mean of their row group
_ROWS_BYTES = 16 << 20  # per batch of rows, if each had the largest value of a dictionary
_MOST_ROWS = 512  # per batch: with repeated texts, a row group declares far fewer bytes than its rows have
_PAGES_BYTES = 1 << 20  # read ahead in a column
_MOST_NAMED = 20  # columns listed in an error


def texts_of(reading: Reading, column: str) -> Iterator[tuple[int, bytes]]:
    import pyarrow as pa

    path, num_bytes = reading.source.path, 0
    with _open(reading) as table:
        _check_column(table.schema_arrow, column, path)
        for first, batch in _batches(reading, table, [column]):
            texts = batch.column(column).cast(pa.large_binary()).to_pylist()
            for number, text in enumerate(texts, start=first):
                if text is None:
                    raise DataError(
                        what=f"{path}:{number}: no text: column {column!r} is null.",
                        why="Each row must have text.",
                        fix="Write the file again without these rows.",
                    )
                num_bytes += len(text)
                check_unpacked(path, reading.source.num_bytes, num_bytes)
                yield number, text


def rows_of(reading: Reading) -> Iterator[tuple[int, dict[str, Any] | UnicodeDecodeError]]:
    """Yield (row number, fields). If a row's text is not UTF-8, yield the UnicodeDecodeError instead of its fields."""
    with _open(reading) as table:
        for first, batch in _batches(reading, table, _worded(table.schema_arrow)):
            try:
                yield from enumerate(map(_without_nulls, batch.to_pylist()), start=first)
            except UnicodeDecodeError:
                yield from ((first + place, _row(batch.slice(place, 1))) for place in range(len(batch)))


def _row(batch: Any) -> dict[str, Any] | UnicodeDecodeError:
    try:
        fields: dict[str, Any] = _without_nulls(batch.to_pylist()[0])
    except UnicodeDecodeError as exc:
        return exc
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _open(reading: Reading) -> Iterator[Any]:
    """Open a separate file handle, because pyarrow seeks; `Reading` hashes the file through its own."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    source = reading.source
    try:
        with (
            pa.OSFile(source.path) as file,
            # pre_buffer would hold whole columns of a row group in memory.
            ParquetFile(file, pre_buffer=False, buffer_size=_PAGES_BYTES, page_checksum_verification=True) as table,
        ):
            if not table.metadata.num_rows:
                raise DataError(f"{source.path} is empty.", why="It has 0 rows.", fix="Remove it from the list.")
            yield table
    except (pa.ArrowException, ValueError, OSError) as exc:
        raise _damaged(source, exc) from exc


def _worded(schema: Any) -> list[str]:
    """Return all columns except temporal ones.

    They do not matter in conversations, and Python lacks nanoseconds and some time zones.
    """
    import pyarrow.types as kinds

    return list(dict.fromkeys(field.name for field in schema if not kinds.is_temporal(field.type)))


def _batches(reading: Reading, table: Any, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield batches of rows, with the number of the first."""
    done, num_rows = 0, table.metadata.num_rows
    for number, group in enumerate(check_pages(reading.source.path)):
        wanted = {
            "batch_size": _rows_at_once(table.metadata.row_group(number), group),
            "row_groups": [number],
            "columns": columns,
            "use_threads": False,  # another thread processes what this one reads
        }
        for batch in table.iter_batches(**wanted):
            first, done = done + 1, done + len(batch)
            # By rows, not by bytes: of a file with several columns only a part is ever read.
            reading.num_bytes_read = reading.source.num_bytes * min(done, num_rows) // num_rows
            yield first, batch
    if done != num_rows:
        raise ValueError(f"Its metadata says {num_rows:,} rows, but it has {done:,}.")


def _rows_at_once(group: Any, pages: Group) -> int:
    # Use all columns even if one is needed: querying a single one in a damaged footer makes pyarrow abort the process.
    each = max(group.total_byte_size // max(group.num_rows, 1), 1)
    most = min(_MOST_ROWS, _ROWS_BYTES // max(pages.largest_row_bytes, 1))
    return int(max(min(_BATCH_BYTES // each, most), 1))


def _check_column(schema: Any, column: str, path: str) -> None:
    import pyarrow.types as kinds

    if schema.names.count(column) > 1:
        problem = f"more than one column {column!r}"
    elif column in schema.names:
        kind = schema.field(column).type
        plain = kind.value_type if kinds.is_dictionary(kind) else kind
        if kinds.is_string(plain) or kinds.is_large_string(plain) or kinds.is_string_view(plain):
            return
        problem = f"column {column!r} is not text, but {kind}"
    else:
        problem = f"no column {column!r}"
    more = ", ..." if len(schema.names) > _MOST_NAMED else ""
    raise DataError(
        what=f"{path}: {problem}; columns found: {', '.join(schema.names[:_MOST_NAMED]) or 'none'}{more}.",
        why="One column must hold the text of each row.",
        fix="Set the column: data.text_field, or --text-field",
    )


def _damaged(source: Source, exc: Exception) -> DataError:
    if isinstance(exc, OSError) and exc.errno:  # a disk error; pyarrow's own have no errno
        return DataError(
            f"{source.path} cannot be read to the end.", why=exc.strerror or str(exc), fix="Check the disk."
        )
    return DataError(
        what=f"{source.path} is not a complete Parquet file.",
        why=(str(exc) or type(exc).__name__).splitlines()[0],
        fix="Download the file again, or remove it from the list.",
    )
