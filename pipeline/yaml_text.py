"""YAML 1.2 text read into plain values: the line of every key and item, and all that is wrong.

Core schema, read from ruamel.yaml's events rather than through its constructor. That keeps the
lines and the text of every decimal, and nothing in a file can run code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

MAX_INTEGER_DIGITS = 4000  # below the length at which Python refuses to print an int
MAX_SHOWN = 60  # characters of a value that a message repeats

_MAX_DEPTH = 10
_MAX_ALIASED_VALUES = 1_000_000

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DECIMAL_INT = re.compile(r"[-+]?[0-9]+")
_OTHER_INT = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

KeyPath: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (key path, line counted from 1 or None) and what."""

    path: str
    line: int | None
    message: str

    def __str__(self) -> str:
        """The line of the error text that tells this problem."""
        where = [f"line {self.line}"] if self.line is not None else []
        where += [self.path] if self.path else []
        return ": ".join([", ".join(where), self.message]) if where else self.message


class Unreadable(Exception):
    """Reading cannot go on."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass
class _Open:
    """A mapping or list of which the end has not been read."""

    value: dict[Any, Any] | list[Any]
    anchor: str | None
    size_before: int
    lines: dict[Any, int]
    key: Any = None
    has_key: bool = False
    drop: bool = False  # the value to come belongs to a key that was refused


@dataclass
class Document:
    """One YAML document: its value, the line of each key and item, and what is wrong with it."""

    root: Any = None
    problems: list[Problem] = field(default_factory=list)
    _root_line: int = 1
    _lines: dict[int, dict[Any, int]] = field(default_factory=dict)  # by id of mapping or list
    _open: list[_Open] = field(default_factory=list)
    _anchors: dict[str, tuple[Any, int]] = field(default_factory=dict)  # value and its size
    _size: int = 0  # values read, an alias counted as all that it stands for
    _aliased: int = 0

    def line_of(self, path: KeyPath) -> int | None:
        """The line that the key path stands on, or the nearest line around it."""
        value, line = self.root, self._root_line
        for key in path:
            lines = self._lines[id(value)] if isinstance(value, dict | list) else {}
            if key not in lines:
                break
            line, value = lines[key], value[key]
        return line

    def read(self, text: str) -> None:
        """Read the only document of a text. Raises Unreadable where reading cannot go on."""
        documents = 0
        for event in _events(text):
            line = event.start_mark.line + 1
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._give_up(line, 'expected one YAML document, found another after "---"')
                if event.version not in (None, (1, 2)):
                    self._give_up(line, "expected YAML 1.2; remove the %YAML line")
            elif isinstance(event, CollectionEndEvent):
                self._close()
            elif isinstance(event, NodeEvent):
                self._take(event, line)

    def _take(self, event: Any, line: int) -> None:
        """Put a value, or the start of one, where it belongs."""
        self._size += 1
        if getattr(event, "tag", None) is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._problem(line, f"tags such as {quoted(tag)} are not allowed; write a plain value")
        if isinstance(event, AliasEvent):
            self._put(self._aliased_value(event.anchor, line), line)
            return
        self._anchors.pop(event.anchor, None)
        if isinstance(event, ScalarEvent):
            plain = event.style is None
            value = _plain_scalar(event.value) if plain else _with_pairs_joined(event.value)
            if plain and value == "<<" and self._wants_key():
                self._problem(line, 'merge keys ("<<") are not YAML 1.2; write the keys out')
                self._open[-1].has_key = self._open[-1].drop = True
            else:
                self._put(value, line)
            if event.anchor is not None:
                self._anchors[event.anchor] = value, 1
        elif isinstance(event, MappingStartEvent | SequenceStartEvent):
            if len(self._open) == _MAX_DEPTH:
                self._give_up(line, f"nested more than {_MAX_DEPTH} deep")
            value = {} if isinstance(event, MappingStartEvent) else []
            self._put(value, line)
            lines = self._lines[id(value)] = {}
            self._open.append(_Open(value, event.anchor, self._size, lines))

    def _close(self) -> None:
        closed = self._open.pop()
        if closed.anchor is not None:
            size = self._size - closed.size_before + 1
            self._anchors[closed.anchor] = closed.value, size

    def _aliased_value(self, anchor: str, line: int) -> Any:
        if anchor in self._anchors:
            value, size = self._anchors[anchor]
            self._size += size
            self._aliased += size
            if self._aliased > _MAX_ALIASED_VALUES:
                self._give_up(line, f"aliases stand for more than {_MAX_ALIASED_VALUES} values")
            return value
        if any(around.anchor == anchor for around in self._open):
            self._problem(line, f"{quoted('*' + anchor)} stands for a value that holds it")
        else:
            self._problem(
                line,
                f"{quoted('*' + anchor)} stands for nothing; "
                "write a text that begins with * in quotes",
            )
        return None

    def _wants_key(self) -> bool:
        around = self._open[-1] if self._open else None
        return around is not None and isinstance(around.value, dict) and not around.has_key

    def _put(self, value: Any, line: int) -> None:
        """Make a value the root, the next item, the next key or the value of the last key."""
        if not self._open:
            self.root, self._root_line = value, line
            return
        around = self._open[-1]
        if isinstance(around.value, list):
            around.lines[len(around.value)] = line
            around.value.append(value)
        elif around.has_key:
            if not around.drop:
                around.value[around.key] = value
            around.has_key = around.drop = False
        elif isinstance(value, dict | list):
            kind = "mapping" if isinstance(value, dict) else "list"
            self._give_up(line, f"expected a string as key, found a {kind}")
        else:
            around.key, around.has_key = value, True
            around.drop = value in around.lines
            if around.drop:
                first = around.lines[value]
                self._problem(line, f"given twice, first on line {first} and again on line {line}")
            else:
                around.lines[value] = line

    def _path(self) -> str:
        """The key path of what is being read."""
        path: list[Any] = []
        for around in self._open:
            last = around is self._open[-1]
            if isinstance(around.value, list):
                path.append(len(around.value) - (not last))
            elif around.has_key or not last:
                path.append(as_written(around.key))
        return path_text(tuple(path))

    def _problem(self, line: int, message: str) -> None:
        self.problems.append(Problem(self._path(), line, message))

    def _give_up(self, line: int, message: str) -> None:
        raise Unreadable(Problem(self._path(), line, message))


# What a scalar is.


def _plain_scalar(text: str) -> Any:
    """What an unquoted scalar is in the YAML 1.2 core schema; a decimal is taken from its text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _DECIMAL_INT.fullmatch(text) and len(text) <= MAX_INTEGER_DIGITS + 1:
        return int(text)
    if _OTHER_INT.fullmatch(text) and len(text) <= MAX_INTEGER_DIGITS:
        return int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        return Decimal(text.replace(".", ""))
    if _FLOAT.fullmatch(text):
        try:
            return Decimal(text)
        except InvalidOperation:  # an exponent past 10^18
            sign = "-" if re.search("[eE]-", text) else ""
            return Decimal(f"1e{sign}999999999999999999")
    return text


def _with_pairs_joined(text: str) -> str:
    """Text in which each surrogate pair, as JSON writers escape with, is one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _events(text: str) -> Iterator[Any]:
    """The events of a YAML text. Raises Unreadable where it is not YAML."""
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        began = error.context_mark.line + 1 if error.context_mark else None
        message = f"not valid YAML: {' '.join(filter(None, (error.problem, error.context)))}"
        if mark and began and began != mark.line + 1:
            message += f" that begins on line {began}"
        if "'\\t'" in message:
            message += "; indent with spaces"
        if "an alias" in message:
            message += "; write a text that begins with * in quotes"
        raise Unreadable(Problem("", mark.line + 1 if mark else None, message)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: character U+{error.character:04X} is not allowed"
        raise Unreadable(Problem("", line, message)) from None
    except Exception:  # the scanner lets others through, such as OverflowError for "\UFFFFFFFF"
        message = "not valid YAML: an escape sequence or directive that cannot be read"
        raise Unreadable(Problem("", None, message)) from None


# How messages name values and places.


def quoted(text: str) -> str:
    """Text in double quotes, shortened, with what a terminal cannot show escaped."""
    text = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
    return json.dumps(text, ensure_ascii=not text.isprintable())


def as_written(value: object) -> str:
    """A scalar as YAML writes it without quotes; numbers are shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 4 * MAX_SHOWN:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = str(value)
    if isinstance(value, Decimal | float | int) and len(text) > MAX_SHOWN:
        return text[:MAX_SHOWN] + "…"
    return text


def as_found(value: object) -> str:
    """What stands in the place of what was expected."""
    if isinstance(value, bool):
        return f"{as_written(value)} (a boolean)"
    if value is None:
        return as_written(value)
    if isinstance(value, str):
        return f"{quoted(value)} (a string)"
    if isinstance(value, int | float | Decimal):
        return as_written(value)
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"an object of type {type(value).__name__}"


def path_text(path: KeyPath) -> str:
    """A key path such as ``datasets.web.path[1]``: keys are strings, places in a list are ints.

    Keys that would not read well are quoted.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = len(part) <= MAX_SHOWN and re.fullmatch(r"[\w/*+@-]+", part)
            text += "." * bool(text) + (part if plain else quoted(part))
    return text
