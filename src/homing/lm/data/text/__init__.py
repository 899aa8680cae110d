"""Splits raw text into documents. File discovery is in `homing.find_source_files`.

    read_bytes a source, compressed or plain  -> blocks of bytes
    parquet    a Parquet file                 -> the text of its rows
    documents  blocks, JSON lines, rows       -> documents of bounded size
    split      a document's hash              -> train or val

These modules keep no more than a few blocks in memory, regardless of file size. A document is UTF-8 bytes, because
the tokenizer works on bytes, and decoding would take longer than reading.
"""

from homing.find_source_files import Source, find_sources
from homing.lm.data.text.documents import Cuts, documents_of
from homing.lm.data.text.split import SplitRule, document_hash

__all__ = ["Cuts", "Source", "SplitRule", "document_hash", "documents_of", "find_sources"]
