"""Arrow IPC as a source: files, streams, and what ``datasets`` saves to disk.

Both are a run of messages, a schema, dictionaries and record batches; a file has a footer besides,
which says where they lie. So a file is scanned by its footer and the heads of its messages, and a
stream is read once from end to end; both are read back by their blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import pyarrow as pa
from pyarrow import fs

from . import Block, FileScan, Known, ReadOptions, SourceError, changed, reading, top_level
from .blocks import BLOCK_BYTES, check, from_row, stored_bytes

SUFFIXES: tuple[str, ...] = (".arrow", ".arrows", ".feather", ".ipc")

_MAGIC = b"ARROW1"
_CONTINUES = b"\xff\xff\xff\xff"
# Kinds of messages, as Message.fbs numbers them.
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_KIND, _MESSAGE_HEADER, _MESSAGE_BODY = 1, 2, 3
_READ_BYTES = 1 << 20
_PLACE = struct.Struct("<qi4xq")  # a Block of File.fbs: offset, size of metadata, size of body


@contextlib.contextmanager
def _opened(filesystem: fs.FileSystem, path: str) -> Iterator[pa.NativeFile]:
    """The open file; what goes wrong with it names it."""
    with (
        reading(path, "Arrow IPC", struct.error, IndexError),
        filesystem.open_input_file(path) as file,
    ):
        yield file


@dataclass(frozen=True)
class _Flat:
    """A table of a FlatBuffer: its fields are found by their number in the schema."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> _Flat:
        return cls(data, struct.unpack_from("<I", data)[0])

    def _field(self, number: int) -> int | None:
        table = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        size = struct.unpack_from("<H", self.data, table)[0]
        slot = 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, table + slot)[0] if slot < size else 0
        return self.at + offset if offset else None

    def number(self, number: int, kind: str) -> int:
        """An integer of a struct format, 0 where it is left out."""
        place = self._field(number)
        return 0 if place is None else int(struct.unpack_from(f"<{kind}", self.data, place)[0])

    def table(self, number: int) -> _Flat:
        """A table that this one refers to."""
        place = self._field(number)
        if place is None:
            raise IndexError(f"field {number} is missing")
        return _Flat(self.data, place + struct.unpack_from("<I", self.data, place)[0])

    def places(self, number: int) -> list[tuple[int, int, int]]:
        """A vector of places of messages: start, size of metadata, size of body."""
        place = self._field(number)
        if place is None:
            return []
        vector = place + struct.unpack_from("<I", self.data, place)[0]
        count = struct.unpack_from("<I", self.data, vector)[0]
        return [_PLACE.unpack_from(self.data, vector + 4 + 24 * i) for i in range(count)]


@dataclass(frozen=True)
class _Message:
    """The head of a message: its kind, sizes in bytes of head and body, and rows of a batch."""

    kind: int
    head: int
    body: int
    rows: int


def _head(start: bytes) -> int:
    """How many bytes the head of a message takes that starts with 8 given ones; 0 at the end."""
    if not start or start[:4] == b"\0\0\0\0":
        return 0
    old = start[:4] != _CONTINUES  # before Arrow 0.15 there was no such mark
    size = int.from_bytes(start[:4] if old else start[4:8], "little", signed=True)
    if len(start) < 8 or size < 0:
        raise IndexError(f"no message can start with {start!r}")
    return (4 if old else 8) + size if size else 0


def _message(head: bytes) -> _Message:
    flat = _Flat.root(head[8 if head[:4] == _CONTINUES else 4 :])
    kind = flat.number(_MESSAGE_KIND, "B")
    rows = flat.table(_MESSAGE_HEADER).number(0, "q") if kind == _RECORD_BATCH else 0
    return _Message(kind, len(head), flat.number(_MESSAGE_BODY, "q"), rows)


@dataclass
class _Blocks:
    """Blocks as messages come: batches are joined up to a size, dictionaries have no rows."""

    blocks: list[Block] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, message: _Message, start: int, data: bytes | None) -> None:
        """Take a message that lies at a byte of the file; its bytes where they are checked."""
        size = message.head + message.body
        last = self.blocks[-1] if self.blocks and message.rows and self.rows[-1] else None
        if last is not None and last.size < BLOCK_BYTES and last.start + last.size == start:
            crc = None if data is None else zlib.crc32(data, last.crc32 or 0)
            self.blocks[-1] = Block(last.start, last.size + size, crc)
            self.rows[-1] += message.rows
        elif message.kind == _DICTIONARY or message.rows:
            self.blocks.append(Block(start, size, None if data is None else zlib.crc32(data)))
            self.rows.append(message.rows)


def opens_anywhere(path: str) -> bool:
    """Always."""
    return True


def scan(filesystem: fs.FileSystem, path: str, options: ReadOptions) -> FileScan:
    """Rows, schema and blocks: of a file from its footer, of a stream in one pass.

    The digest is the sha256 of a file's footer and size, and of all of a stream's bytes.

    Raises:
        SourceError: the file is missing, truncated or no Arrow IPC.
    """
    with _opened(filesystem, path) as file:
        found = _Blocks()
        if _is_file(file):
            footer, digest = _footer(file, path)
            dictionaries = footer.places(_FOOTER_DICTIONARIES)
            for start, head, body in [*dictionaries, *footer.places(_FOOTER_BATCHES)]:
                message = _message(bytes(file.read_at(min(head, file.size()), start)))
                if (
                    message.body != body
                    or min(start, body) < 0
                    or start + head + body > file.size()
                ):
                    raise IndexError(f"no message lies at byte {start}, where the footer has one")
                found.add(message, start, None)
        else:
            digest = _scan_stream(file, found, path)
        schema = _schema(_schema_message(file))
        scanned = FileScan(
            num_rows=sum(found.rows),
            num_bytes=file.size(),
            digest=digest,
            schema=schema.remove_metadata(),
            column_bytes={},
            group_rows=tuple(found.rows),
            blocks=tuple(found.blocks),
        )
        sample = pa.Table.from_batches(islice(_batches(file, path, scanned, 0, None), 1), schema)
        return replace(scanned, column_bytes=stored_bytes(sample, scanned.num_rows))


def _is_file(file: pa.NativeFile) -> bool:
    return bool(file.read_at(len(_MAGIC), 0) == _MAGIC)


def _footer(file: pa.NativeFile, path: str) -> tuple[_Flat, str]:
    """The footer of a file, and the sha256 of it and the size.

    Raises:
        SourceError: the file does not end as an Arrow IPC file does.
    """
    size = file.size()
    tail = bytes(file.read_at(10, max(0, size - 10)))
    length = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != _MAGIC or not 0 < length <= size - 18:
        raise SourceError(
            f"{path}: expected an Arrow IPC file (its last bytes are {_MAGIC!r}), but it ends with "
            f"{tail[4:]!r} after {size:,} bytes; it may be truncated"
        )
    footer = bytes(file.read_at(length, size - 10 - length))
    return _Flat.root(footer), hashlib.sha256(footer + size.to_bytes(8, "little")).hexdigest()


def _scan_stream(file: pa.NativeFile, found: _Blocks, path: str) -> str:
    """Find the blocks of a stream; its sha256.

    Raises:
        SourceError: it ends within a message, or is no stream.
    """
    sha256, at, size = hashlib.sha256(), 0, file.size()
    file.seek(0)
    stream = pa.BufferedInputStream(file, _READ_BYTES)  # a store's requests are slow
    start = b""
    try:
        while length := _head(start := bytes(stream.read(8))):
            if at + length > size:
                raise IndexError("a message is cut off")
            head = start + bytes(stream.read(length - 8))
            message = _message(head)
            if not 0 <= message.body <= size - at - length:
                raise IndexError("a message is cut off")
            data = head + bytes(stream.read(message.body))
            sha256.update(data)
            found.add(message, at, data)
            at += len(data)
        if not at:
            raise IndexError("there is no message")
    except (IndexError, struct.error) as error:
        raise SourceError(
            f"{path}: expected an Arrow IPC file or stream, but after {at:,} of {size:,} bytes "
            f"{error}; it is truncated, or of another format"
        ) from error
    sha256.update(start)
    while rest := stream.read(_READ_BYTES):
        sha256.update(rest)
    stream.detach()
    return sha256.hexdigest()


def _schema_message(file: pa.NativeFile) -> bytes:
    start = 8 if _is_file(file) else 0
    length = _head(bytes(file.read_at(8, start)))
    if start + length > file.size():
        raise IndexError("the schema is cut off")
    return bytes(file.read_at(length, start))


def _schema(message: bytes) -> pa.Schema:
    return pa.ipc.open_stream(pa.BufferReader(message)).schema


def _batches(
    file: pa.NativeFile, path: str, known: Known, row: int, fields: list[int] | None
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on, with top-level columns by their numbers (None: all)."""
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    head, whole = _schema_message(file), _is_file(file)
    parts = zip(known.blocks, known.group_rows, strict=True)
    dictionaries = deque(block for block, rows in parts if not rows)
    for block, skip in from_row(known, row):
        # In a stream a dictionary holds for what follows it, until another takes its place.
        while dictionaries and (whole or dictionaries[0].start < block.start):
            head += _read(file, dictionaries.popleft(), path)
        message = pa.BufferReader(head + _read(file, block, path))
        for batch in pa.ipc.open_stream(message, options=options):
            # What offsets say is not checked by reading them, and a wrong one can end the process.
            batch.validate(full=True)
            if skip < batch.num_rows:
                yield batch.slice(skip)
            skip = max(0, skip - batch.num_rows)


def _read(file: pa.NativeFile, block: Block, path: str) -> bytes:
    data = bytes(file.read_at(block.size, block.start))
    check(data, block, path)
    return data


def read_from(
    filesystem: fs.FileSystem,
    path: str,
    known: Known,
    row: int,
    columns: pa.Schema,
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on; messages that lie wholly before it are not read.

    Raises:
        SourceChangedError: a file's footer, or a stream's size or checksums, are not the known.
        SourceError: the file cannot be read.
    """
    with _opened(filesystem, path) as file:
        if file.size() != known.num_bytes:
            raise changed(path, "a size of", f"{known.num_bytes:,} bytes", f"{file.size():,}")
        if _is_file(file) and (found := _footer(file, path)[1]) != known.digest:
            raise changed(path, "digest", f"{known.digest[:16]}..", f"{found[:16]}..")
        names = _schema(_schema_message(file)).names
        asked = {top_level(column, set(names)) for column in columns.names}
        fields = [place for place, name in enumerate(names) if name in asked]
        for batch in _batches(file, path, known, row, fields or None):
            rows = max(1, int(batch_bytes * batch.num_rows / max(1, batch.nbytes)))
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)
