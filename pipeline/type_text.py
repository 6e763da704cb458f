"""Arrow types as text, the way Arrow prints them."""

from __future__ import annotations

import re

import pyarrow as pa

from .errors import MixError

_UNITS = ("s", "ms", "us", "ns")
_PLAIN = {
    str(kind): kind
    for kind in (
        *(pa.null(), pa.bool_(), pa.date32(), pa.date64()),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64()),
        *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
        *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        *map(pa.timestamp, _UNITS),
        *map(pa.duration, _UNITS),
    )
} | {
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "date32": pa.date32(),
    "date64": pa.date64(),
}
_DECIMALS = {
    "decimal32": pa.decimal32,
    "decimal64": pa.decimal64,
    "decimal128": pa.decimal128,
    "decimal256": pa.decimal256,
}
_EXPECTED = (
    "a type such as int32, float64, bool, string, binary, date32, timestamp[us, tz=UTC], "
    "decimal128(9, 2), list<string>, struct<a: int32, b: string> or map<string, int64>"
)
_MAX_DEPTH = 40


class TypeTextError(MixError, ValueError):
    """A text that names no type."""


def parse_type(text: str) -> pa.DataType:
    """The type that a text names; ``str`` gives the same text for it.

    The name of a list's elements may be left out, and ``float64`` written for ``double``.

    Raises:
        TypeTextError: the text names no type; it shows how far it was understood.
    """
    parser = _Parser(text)
    kind = parser.kind()
    parser.must(r"$", "the end")
    return kind


class _Parser:
    """A place in the text of a type, and what is read from there on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def _error(self, expected: str, at: int) -> TypeTextError:
        read, rest = self._text[:at].rstrip()[-60:], self._text[at:].strip()
        found = repr(rest[:40]) if rest else "the end"
        after = f" after {read!r}" if read else ""
        return TypeTextError(f"expected {expected}{after}, found {found}")

    def _take(self, pattern: str) -> re.Match[str] | None:
        """What fits a pattern here, after any spaces; the place moves behind it."""
        match = re.compile(rf"\s*(?:{pattern})").match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def must(self, pattern: str, expected: str) -> re.Match[str]:
        """The same where nothing else may stand.

        Raises:
            TypeTextError: something else does.
        """
        match = self._take(pattern)
        if match is None:
            raise self._error(expected, self._at)
        return match

    def kind(self) -> pa.DataType:
        """The type that begins here."""
        begin = self._at
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} types inside each other", begin)
        word = self.must(r"([a-z][a-z0-9_]*(?:\[[a-z]+\])?)", _EXPECTED)[1]
        try:
            kind = self._named(word)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if isinstance(error, TypeTextError):
                raise
            raise self._error(f"another size ({error})", begin) from None
        if kind is None:
            raise self._error(_EXPECTED, begin)
        self._depth -= 1
        return kind

    def _named(self, word: str) -> pa.DataType | None:
        if word in _PLAIN:
            return _PLAIN[word]
        if word == "timestamp":
            unit, zone = self.must(
                r"\[(s|ms|us|ns),\s*tz=([^\]]+)\]", "[us] or [us, tz=UTC]"
            ).groups()
            return pa.timestamp(unit, zone.strip())
        if word in _DECIMALS:
            size = self.must(r"\(\s*(\d{1,3})\s*,\s*(-?\d{1,3})\s*\)", "(precision, scale)")
            return _DECIMALS[word](int(size[1]), int(size[2]))
        if word == "fixed_size_binary":
            return pa.binary(self._size())
        if word in ("list", "large_list"):
            element = self._element()
            return pa.list_(element) if word == "list" else pa.large_list(element)
        if word == "fixed_size_list":
            return pa.list_(self._element(), self._size())
        if word == "struct":
            return pa.struct(self._fields())
        return self._map() if word == "map" else None

    def _size(self) -> int:
        return int(self.must(r"\[\s*([1-9]\d{0,8})\s*\]", "[size]")[1])

    def _not_null(self) -> bool:
        return self._take(r"not null\b") is not None

    def _element(self) -> pa.Field:
        self.must("<", "<")
        name = self._take(r"([^\s<>,:\[\]()][^<>,:\[\]()]*?)\s*:")
        kind = self.kind()
        field = pa.field(name[1] if name else "element", kind, not self._not_null())
        self.must(">", "not null or >")
        return field

    def _fields(self) -> list[pa.Field]:
        self.must("<", "<")
        fields: list[pa.Field] = []
        while not self._take(">"):
            if fields:
                self.must(",", "not null, a comma or >")
            begin = self._at
            name = self.must(r"([^\s:<>,][^:<>,]*?)\s*:", "the name of a field and a colon")[1]
            if any(field.name == name for field in fields):
                raise self._error("each field once", begin)
            kind = self.kind()
            fields.append(pa.field(name, kind, not self._not_null()))
        return fields

    def _map(self) -> pa.DataType:
        self.must("<", "<")
        key = self.kind()
        self.must(",", "a comma")
        item = self.kind()
        name = self._take(r"\('([^']*)'\)")
        in_order = self._take(r",\s*keys_sorted\b") is not None
        self.must(">", ">")
        return pa.map_(key, pa.field(name[1], item) if name else item, in_order)
