"""JSON Lines as a source: one object a line, plain or compressed.

Types are those of the whole file. Text stays text, whatever it looks like; whole numbers are int64
until one has a fraction. A file is read once from end to end, and from then on by its blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray
from pyarrow import fs

from ..arrow_types import is_list
from ..casts import cast
from . import Block, FileScan, Known, ReadOptions, SourceError, changed, reading
from .blocks import BLOCK_BYTES, check, from_row, stored_bytes

_PLAIN = (".jsonl", ".ndjson", ".json")
_CODECS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES: tuple[str, ...] = (*_PLAIN, *(name + end for name in _PLAIN for end in _CODECS))

_CHUNK_BYTES = 1 << 20
_NEWLINE, _OBJECT = ord("\n"), ord("{")
_BOM = b"\xef\xbb\xbf"
_SHOWN = 120
_MOST_NESTED = 60
_OTHERS = (
    (b"PAR1", "Parquet: give the file a name that ends in .parquet"),
    (b"ARROW1", "Arrow IPC: give the file a name that ends in .arrow"),
    (b"\xff\xff\xff\xff", "Arrow IPC: give the file a name that ends in .arrow"),
    (b"\x1f\x8b", "gzip: give the file a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "zstd: give the file a name that ends in .zst"),
    (b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16: save it as UTF-8"),
)
_EXACT = 2**53
"""Below this a float64 holds every whole number, and no other is rounded to it."""


def opens_anywhere(path: str) -> bool:
    """Whether a file has its text as it is; a compressed one is read from its beginning."""
    return not path.lower().endswith(tuple(_CODECS))


# Reading bytes.


class _Hashed(io.RawIOBase):
    """A stream that is hashed and counted as it is read."""

    def __init__(self, stream: pa.NativeFile) -> None:
        super().__init__()
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = bytes(self._stream.read(size))
        self.sha256.update(data)
        self.size += len(data)
        return data


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Name the file in what goes wrong while it is read."""
    try:
        with reading(path, "JSON Lines"):
            yield
    except RecursionError as error:
        raise SourceError(f"{path}: its lists or objects lie too deep inside each other") from error


def _decompressed(stream: Any, path: str) -> pa.NativeFile:
    """The text of a stream of a compressed file, whose name says how it is compressed."""
    codec = next(codec for end, codec in _CODECS.items() if path.lower().endswith(end))
    return pa.CompressedInputStream(stream, codec)


def _full(stream: Any, size: int) -> bytes:
    """So many bytes of a stream, fewer only at its end: a stream may give less at a time."""
    data = bytes(stream.read(size))
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _texts(stream: Any, max_line_bytes: int) -> Iterator[tuple[int, bytes, bool]]:
    """The texts of a stream that blocks are made of: place, bytes, and whether they are lines.

    A line that is too long comes as its beginning, and not as lines.
    """
    at, held, cut_off = 0, bytearray(), False
    while chunk := _full(stream, _CHUNK_BYTES):
        held += chunk
        while True:
            if cut_off:
                end = held.find(b"\n") + 1
                at += end or len(held)
                del held[: end or len(held)]
                cut_off = not end
            # Where a text ends hangs on places in the file alone.
            end = held.find(b"\n", BLOCK_BYTES - 1) + 1
            if end:
                yield at, bytes(held[:end]), True
                at += end
                del held[:end]
            elif len(held) - (held.rfind(b"\n") + 1) > max_line_bytes:
                end = held.rfind(b"\n") + 1
                if end:
                    yield at, bytes(held[:end]), True
                yield at + end, bytes(held[end : end + _SHOWN]), False
                at += end
                del held[:end]
                cut_off = True
            else:
                break
    if held and not cut_off:
        yield at, bytes(held), True


# Parsing.


def _parse(data: bytes | pa.Buffer, schema: pa.Schema, infer: bool) -> pa.Table:
    """Rows of a text, under the types of a schema; other fields are inferred or left out."""
    table = pa.json.read_json(
        pa.BufferReader(data),
        read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if infer else "ignore"
        ),
    )
    if infer:
        try:
            table.validate()
        except pa.ArrowInvalid:
            # While it infers, Arrow loses nulls that stand before the first value of a list.
            types = pa.schema([f.with_type(_stays_text(f.type)) for f in table.schema])
            return _parse(data, types, infer=False)
    return table


def parsed_type(kind: pa.DataType) -> pa.DataType:
    """The type that text is parsed as to become another one: Arrow's parser knows only some."""
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(parsed_type(f.type)).with_nullable(True) for f in kind])
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(parsed_type(kind.value_type))
    if pa.types.is_dictionary(kind):
        return parsed_type(kind.value_type)
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_float16(kind):
        return pa.float32()
    return kind


def _stays_text(kind: pa.DataType) -> pa.DataType:
    """An inferred type, with text for what only looked like a time."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_stays_text(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_stays_text(kind.value_type))
    return kind


class _Conflict(ValueError):
    """Two values of one column have types that no type takes both of."""

    def __init__(self, column: str, before: pa.DataType, found: pa.DataType) -> None:
        super().__init__(column, before, found)
        self.column, self.before, self.found = column, before, found


def _union(a: pa.DataType, b: pa.DataType, column: str) -> pa.DataType:
    """The type that takes values of two inferred ones. Raises _Conflict."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if {a, b} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return pa.struct(_union_fields(list(a), list(b), f"{column}."))
    if pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(_union(a.value_type, b.value_type, f"{column}[]"))
    raise _Conflict(column, a, b)


def _union_fields(a: list[pa.Field], b: list[pa.Field], parent: str = "") -> list[pa.Field]:
    known = {field.name: field.type for field in a}
    for new in b:
        kind = known.get(new.name)
        known[new.name] = new.type if kind is None else _union(kind, new.type, parent + new.name)
    return [pa.field(name, kind) for name, kind in known.items()]


def _numbers(array: pa.Array, path: str) -> Iterator[tuple[str, pa.Array]]:
    """The arrays of numbers inside of one, each with the path of its column."""
    if pa.types.is_struct(array.type):
        for inner in array.type:
            yield from _numbers(pc.struct_field(array, inner.name), f"{path}.{inner.name}")
    elif pa.types.is_list(array.type):
        yield from _numbers(array.flatten(), f"{path}[]")
    elif array.type in (pa.int64(), pa.float64()):
        yield path, array


# Scanning.


@dataclass
class _Lines:
    """Lines of a text: where each begins, and past its end; blank ones are left out.

    ``number`` is each one's number in the file, from 1; ``objects`` whether it begins as one does.
    """

    data: bytes
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    number: NDArray[np.int64]
    objects: NDArray[np.bool_]

    @classmethod
    def of(cls, data: bytes, first: int) -> _Lines:
        """Lines of a text that ends with a line; ``first`` is the number of its first."""
        text = np.frombuffer(data, np.uint8)
        stop = np.flatnonzero(text == _NEWLINE).astype(np.int64) + 1
        if not len(stop) or stop[-1] < len(data):
            stop = np.append(stop, len(data))
        start = np.concatenate([[0], stop[:-1]])
        objects = text[start] == _OBJECT
        keep = np.ones(len(start), bool)
        # Most lines begin with their object; what other lines are is looked at one by one.
        for odd in np.flatnonzero(~objects).tolist():
            line = data[start[odd] : stop[odd]].strip()
            keep[odd], objects[odd] = bool(line), line.startswith(b"{")
        number = first + np.arange(len(start))
        return cls(data, start[keep], stop[keep], number[keep], objects[keep])

    def __len__(self) -> int:
        return len(self.start)

    def text(self, first: int, stop: int) -> bytes:
        """The bytes of some consecutive lines."""
        return self.data[self.start[first] : self.stop[stop - 1]]


@dataclass
class _Scanner:
    """Finds the types, the good lines and the blocks of one file, text after text."""

    path: str
    options: ReadOptions
    types: list[pa.Field] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    bad_lines: int = 0
    sample: pa.Table | None = None
    order: list[str] = field(default_factory=list)
    # The greatest whole number of each column of numbers, and the line by which it was read.
    greatest: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.options.schema
        self._given = pa.schema([(name, parsed_type(kind)) for name, kind in given.items()])
        try:
            _parse(b"{}", self._given, infer=True)
        except pa.ArrowException as error:
            raise SourceError(
                f"{self.path}: `schema` has a type that JSON Lines cannot be read as: {error}"
            ) from error
        # Of these the parser has seen only that they are text, or a list of any length.
        parsed = {field.name: field.type for field in self._given}
        self._cast = {name: kind for name, kind in given.items() if parsed[name] != kind}
        self._limit = f"it is longer than max_line_bytes, {self.options.max_line_bytes:,}"
        self._sought = {name for f in self._given for name in (f.name, *_names(f.type))}
        self._seen: set[str] = set()

    def take(self, data: bytes, at: int, first_line: int) -> int:
        """Scan a text that lies at a byte of the file; the number of its lines."""
        if at == 0 and data.startswith(_BOM):
            data, at = data[len(_BOM) :], len(_BOM)
        lines = _Lines.of(data, first_line)
        begin = end = 0
        for first, stop, table in self._good(lines, 0, len(lines)):
            self._learn(lines, first, stop, table)
            count = table.num_rows
            if first == end and end > begin:
                # Halves of one run, with no bad line between them.
                self.blocks.pop()
                count += self.rows.pop()
            else:
                begin = first
            end = stop
            text = lines.text(begin, end)
            place = at + int(lines.start[begin])
            self.blocks.append(Block(place, len(text), zlib.crc32(text)))
            self.rows.append(count)
        self._seen |= {name for name in self._sought - self._seen if _quoted(name) in data}
        return data.count(b"\n")

    def too_long(self, number: int, start: bytes) -> None:
        """Refuse or count a line that is longer than the options allow."""
        self._bad(number, start, self._limit)

    def schema(self) -> pa.Schema:
        """The types of the whole file.

        Raises:
            SourceError: a column has whole numbers that its type would round, or no type.
        """
        given = self.options.schema
        types = {
            field.name: self._present(given[field.name]) if field.name in given else field.type
            for field in self.types
            if field.name not in given or field.name in self._seen
        }
        # As the first line has them: the parser puts given columns before all others.
        first = [name for name in self.order if name in types]
        schema = pa.schema([(name, types[name]) for name in dict.fromkeys([*first, *types])])
        kinds = dict(_paths(list(schema)))
        for path, kind in kinds.items():
            if pa.types.is_struct(kind) and not kind.num_fields:
                raise SourceError(
                    f"{self.path}: column {path!r} holds only empty objects, which tell no type; "
                    f"give column {_top(path)!r} one by `schema`, or take it out"
                )
            if path.count(".") + path.count("[]") >= _MOST_NESTED:
                raise SourceError(
                    f"{self.path}: column {_top(path)!r} has lists or objects more than "
                    f"{_MOST_NESTED} deep inside each other"
                )
        for path, (value, line) in self.greatest.items():
            if value >= _EXACT and kinds.get(path) == pa.float64():
                raise SourceError(
                    f"{self.path}: column {path!r} is float64, since some of its numbers have a "
                    f"fraction, an exponent or more than 64 bits, but by line {line:,} it has one "
                    f"of about {value:.17g}, of which float64 may lose digits; say "
                    f"`schema: {{{_top(path)}: ..}}`, with float64 if that is right, else with a "
                    "type that holds all of them"
                )
        return schema

    def _present(self, kind: pa.DataType) -> pa.DataType:
        """A given type without those fields of structs whose names the file does not have."""
        if pa.types.is_struct(kind):
            fields = [f.with_type(self._present(f.type)) for f in kind if f.name in self._seen]
            return pa.struct(fields)
        if pa.types.is_list(kind):
            return pa.list_(self._present(kind.value_type))
        return kind

    def _good(self, lines: _Lines, first: int, stop: int) -> Iterator[tuple[int, int, pa.Table]]:
        """Runs of good lines, each as it parses; bad ones are refused, or counted and left out.

        A run that does not parse is halved until the line is found that is to blame.
        """
        if first == stop:
            return
        why = "expected one JSON object a line"
        longest = (lines.stop[first:stop] - lines.start[first:stop]).max()
        if longest > self.options.max_line_bytes + 1:
            why = self._limit
        elif lines.objects[first:stop].all():
            text = lines.text(first, stop)
            try:
                text.decode()
                table = _parse(text, self._given, infer=True)
                for name, kind in self._cast.items():
                    cast(table[name].combine_chunks(), kind)
            except UnicodeDecodeError as error:
                why = f"expected UTF-8, found byte 0x{error.object[error.start]:02x}"
            except pa.ArrowException as error:
                why = _told(error)
            else:
                if table.num_rows == stop - first:
                    yield first, stop, table
                    return
                why = "expected one JSON object a line, found more than one"
        if stop - first == 1:
            text = lines.text(first, stop)
            self._bad(int(lines.number[first]), text, why + _hint(text))
            return
        middle = (first + stop) // 2
        yield from self._good(lines, first, middle)
        yield from self._good(lines, middle, stop)

    def _bad(self, number: int, line: bytes, why: str) -> None:
        if not self.options.skip_bad_lines:
            shown = line.strip()[:_SHOWN].decode(errors="backslashreplace")
            more = ".." if len(line.strip()) > _SHOWN else ""
            raise SourceError(
                f"{self.path}: line {number:,} cannot be read: {why}; the line is {shown!r}{more}; "
                "repair it, or say on_bad_line: skip to leave such lines out"
            )
        self.bad_lines += 1

    def _learn(self, lines: _Lines, first: int, stop: int, table: pa.Table) -> None:
        """Take the types and the greatest numbers of a run into account."""
        found = [field.with_type(_stays_text(field.type)) for field in table.schema]
        given = set(self._given.names)
        last = int(lines.number[stop - 1])
        try:
            self.types = _union_fields(self.types, found)
        except _Conflict as conflict:
            number = self._first_conflict(lines, first, stop)
            raise SourceError(
                f"{self.path}: column {conflict.column!r} is {conflict.found} in line {number:,}, "
                f"but {conflict.before} before it; a column has one type: repair the file, or "
                "leave the column out of it"
            ) from None
        if self.sample is None:
            self.sample = table
            self.order = list(json.loads(lines.text(first, first + 1)))
        for name, column in zip(table.column_names, table.columns, strict=True):
            if name in given:
                continue
            for path, numbers in _numbers(column.combine_chunks(), name):
                value = _greatest(numbers)
                if value > self.greatest.get(path, (0, 0))[0]:
                    self.greatest[path] = value, last

    def _first_conflict(self, lines: _Lines, first: int, stop: int) -> int:
        """Number of the first line of a run whose types do not go with those before it."""
        types = self.types
        for line in range(first, stop):
            table = _parse(lines.text(line, line + 1), self._given, infer=True)
            found = [field.with_type(_stays_text(field.type)) for field in table.schema]
            try:
                types = _union_fields(types, found)
            except _Conflict:
                return int(lines.number[line])
        return int(lines.number[stop - 1])


def _told(error: pa.ArrowException) -> str:
    """What the parser says of a single line, in our words where its own are not clear."""
    said = re.sub(r"^JSON parse error: | in row \d+$", "", str(error))
    found = re.fullmatch(r"Column\(/?(.*)\) changed from (\w+) to (\w+)", said)
    if found is None:
        return said
    where = f"column {found[1].replace('/', '.')!r} has" if found[1] else "found"
    return f"{where} {found[3]} where {found[2]} was expected"


def _quoted(name: str) -> bytes:
    """A key as it stands in a file."""
    return json.dumps(name, ensure_ascii=False).encode()


def _hint(line: bytes) -> str:
    """What a line that is no object may come of."""
    for start, form in _OTHERS:
        if line.startswith(start):
            return f"; this looks like {form}"
    text = line.strip()
    if text.startswith(b"["):
        return "; this looks like one array: write its elements a line each"
    if text == b"{" or (text.startswith(b"{") and text.endswith((b",", b"{", b"["))):
        return "; this looks like an object over several lines: write it on one"
    return ""


def _top(path: str) -> str:
    """The top-level column of a path of ours."""
    return re.split(r"\.|\[\]", path)[0]


def _names(kind: pa.DataType) -> Iterator[str]:
    """Names of all fields of the structs inside of a type."""
    if pa.types.is_struct(kind):
        for inner in kind:
            yield inner.name
            yield from _names(inner.type)
    elif pa.types.is_list(kind):
        yield from _names(kind.value_type)


def _greatest(numbers: pa.Array) -> int:
    """The greatest absolute value among those that are whole; 0 where there is none."""
    bounds = pc.min_max(numbers)
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is None:
        return 0
    if pa.types.is_integer(numbers.type):
        return int(max(-low, high))
    if max(-low, high) < _EXACT:
        return 0  # nothing that could be rounded, and the common case
    values = numbers.to_numpy(zero_copy_only=False)
    whole = np.abs(values[np.isfinite(values) & (values == np.floor(values))])
    return int(whole.max()) if len(whole) else 0


def _paths(fields: list[pa.Field], parent: str = "") -> Iterator[tuple[str, pa.DataType]]:
    for one in fields:
        name, kind = parent + one.name, one.type
        while pa.types.is_list(kind):
            name, kind = f"{name}[]", kind.value_type
        if pa.types.is_struct(kind):
            yield from _paths(list(kind), f"{name}.")
        yield name, kind


def scan(filesystem: fs.FileSystem, path: str, options: ReadOptions) -> FileScan:
    """Rows, types, blocks and digest (sha256 of the file as it is stored), in one pass.

    Raises:
        SourceError: the file is missing or damaged; a line is no JSON object or too long and bad
            lines are not skipped; values of one column have no common type.
    """
    scanner = _Scanner(path, options)
    with _reading(path), filesystem.open_input_stream(path, compression=None) as stream:
        hashed = _Hashed(stream)
        text = (
            hashed if opens_anywhere(path) else _decompressed(pa.PythonFile(hashed, mode="r"), path)
        )
        line = 1
        for at, data, whole in _texts(text, options.max_line_bytes):
            if whole:
                line += scanner.take(data, at, line)
            else:
                scanner.too_long(line, data)
                line += 1
    num_rows = sum(scanner.rows)
    sample = scanner.sample
    return FileScan(
        num_rows=num_rows,
        num_bytes=hashed.size,
        digest=hashed.sha256.hexdigest(),
        schema=scanner.schema(),
        column_bytes={} if sample is None else stored_bytes(sample, num_rows),
        group_rows=tuple(scanner.rows),
        blocks=tuple(scanner.blocks),
        bad_lines=scanner.bad_lines,
    )


# Reading.


def read_from(
    filesystem: fs.FileSystem,
    path: str,
    known: Known,
    row: int,
    columns: pa.Schema,
    batch_bytes: int,
) -> Iterator[pa.RecordBatch]:
    """Record batches from a row on; a compressed file is read from its beginning for them.

    Raises:
        SourceChangedError: size or checksums are not those that were planned.
        SourceError: the file cannot be read.
    """
    schema = pa.schema(_nested([(tuple(column.name.split(".")), column) for column in columns]))
    dotted = [column for column in columns if "." in column.name]
    for column in dotted:
        schema = schema.append(column.with_type(parsed_type(column.type)))
    with _reading(path), filesystem.open_input_file(path) as file:
        if file.size() != known.num_bytes:
            raise changed(path, "a size of", f"{known.num_bytes:,} bytes", f"{file.size():,}")
        stream = None if opens_anywhere(path) else _decompressed(file, path)
        at = 0
        for block, skip in from_row(known, row):
            if stream is None:
                data = bytes(file.read_at(block.size, block.start))
            else:
                _pass_over(stream, block.start - at)
                data = _full(stream, block.size)
                at = block.start + len(data)
            check(data, block, path)
            for piece in _pieces(data, skip, batch_bytes):
                table = _parse(piece, schema, infer=False)
                # Asked for by name and by path: a key with a dot in it stands only where it is.
                lacking = [c.name for c in dotted if table[c.name].null_count == len(table)]
                yield from table.drop_columns(lacking).to_batches()


def _nested(columns: list[tuple[tuple[str, ...], pa.Field]]) -> list[pa.Field]:
    """Fields, of structs where paths lead into them, that hold the columns at the paths."""
    heads: dict[str, list[tuple[tuple[str, ...], pa.Field]]] = {}
    for path, column in columns:
        heads.setdefault(path[0], []).append((path[1:], column))
    result = []
    for head, inner in heads.items():
        whole = [column.type for path, column in inner if not path]
        kind = parsed_type(whole[0]) if whole else pa.struct(_nested(inner))
        result.append(pa.field(head, kind))
    return result


def _pass_over(stream: pa.NativeFile, count: int) -> None:
    while count and (data := stream.read(min(count, _CHUNK_BYTES))):
        count -= len(data)


def _pieces(data: bytes, skip: int, batch_bytes: int) -> Iterator[pa.Buffer]:
    """A block's lines without its first ``skip`` rows, about ``batch_bytes`` at a time."""
    begin = int(_Lines.of(data, 1).start[skip]) if skip else 0
    text = pa.py_buffer(data)
    while begin < len(data):
        end = data.find(b"\n", begin + batch_bytes - 1) + 1 or len(data)
        yield text.slice(begin, end - begin)
        begin = end
