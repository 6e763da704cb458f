"""The YAML file that a user writes, validated: every problem at once, each with its key and line.

YAML 1.2 core schema, read from ruamel.yaml's events rather than through its constructor. That
keeps the line of every key and the text of every decimal, and nothing in a file can run code.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
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

from .errors import MixError
from .shard import PROVENANCE

DEFAULT_SHARD_BYTES = 64 << 20
"""Size a shard is aimed at where neither batches_per_shard nor shard_bytes is given, in bytes."""

MAX_BATCH_SIZE = 2**31 - 1
MAX_DATASET_NAME = 200
MAX_INTEGER_DIGITS = 4000  # below the length at which Python refuses to print an int
MAX_DECIMAL_DIGITS = 100
PROVENANCE_COLUMNS = tuple(PROVENANCE.names)

_MAX_INTEGER = 10**MAX_INTEGER_DIGITS
_MAX_INT64 = 2**63 - 1
_MAX_DEPTH = 10
_MAX_ALIASED_VALUES = 1_000_000
_MAX_LEVEL = {"zstd": 22, "gzip": 9}
_SHOWN = 60
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]{1,3})", re.IGNORECASE)
_SIZE_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

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


class ConfigError(MixError, ValueError):
    """A configuration that cannot be used; ``problems`` and the text list all that is wrong."""

    def __init__(self, problems: Sequence[Problem], source: str = "<config>") -> None:
        super().__init__(problems, source)  # the arguments, so that the error pickles
        self.problems = list(problems)
        self.source = source

    def __str__(self) -> str:
        """Source and number of problems, then one line a problem."""
        count = len(self.problems)
        head = f"{self.source}: {count} problem{'' if count == 1 else 's'}"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and validate a YAML file; ``base`` is its folder.

    Raises ConfigError where the file cannot be read, is not UTF-8 or is not a valid config.
    """
    source = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text, found byte 0x{error.object[error.start]:02x} "
        message += f"at offset {error.start}; save the file as UTF-8"
    except FileNotFoundError:
        message = "no such file"
    except IsADirectoryError:
        message = "this is a folder; give the YAML file in it"
    except OSError as error:
        message = f"the file cannot be read: {error.strerror or error}"
    except ValueError:
        message = "no file can have this name"
    else:
        return parse_config(text, Path(path).absolute().parent, source)
    raise ConfigError([Problem("", None, message)], source)


def parse_config(text: str, base: str | os.PathLike[str], source: str = "<config>") -> Config:
    """Validate the text of a YAML file; ``base`` is the folder local paths are relative to.

    ``source`` is what errors call the text. Raises ConfigError.
    """
    document = _Document()
    try:
        document.read(text)
    except _Unreadable as error:
        raise ConfigError([*document.problems, error.problem], source) from None
    return _validate(document.root, base, source, document.line_of, document.problems)


def config_from_dict(mapping: Mapping[str, Any], base: str | os.PathLike[str]) -> Config:
    """Validate a configuration that is written in Python; ``base`` as in ``parse_config``.

    Weights may be int, Decimal or float (taken by its repr, so 0.1 is exactly 1/10), and paths may
    be path objects. Raises ConfigError; its problems have no lines.
    """
    return _validate(mapping, base, "<config>", lambda path: None, [])


# What fields accept. Each check raises _Refused with the sentence that a user reads.


class _Refused(ValueError):
    """A value is not usable; each argument is one sentence."""


class _RefusedKey(_Refused):
    """The same for the key of a mapping."""


def _shown(text: str) -> str:
    """Text in double quotes, shortened, with what a terminal cannot show escaped."""
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _written(value: object) -> str:
    """A scalar as YAML writes it without quotes; numbers are shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = str(value)
    if isinstance(value, Decimal | float | int) and len(text) > _SHOWN:
        return text[:_SHOWN] + "…"
    return text


def _found(value: object) -> str:
    """What stands in the place of what was expected."""
    if isinstance(value, bool):
        return f"{_written(value)} (a boolean)"
    if value is None:
        return _written(value)
    if isinstance(value, str):
        return f"{_shown(value)} (a string)"
    if isinstance(value, int | float | Decimal):
        return _written(value)
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"an object of type {type(value).__name__}"


@lru_cache(1024)  # one mistake is often made in every dataset
def _did_you_mean(word: str, known: tuple[str, ...]) -> str | None:
    """The known word that was probably meant, as a question."""
    plain = word[:_SHOWN].lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(plain, known, n=1)
    return f'did you mean "{close[0]}"?' if close else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(at_most: int = _MAX_INT64, at_least: int = 1) -> Callable[[Any], int]:
    """A check for whole numbers in a range."""

    def check(value: Any) -> int:
        if not _is_int(value) or value < at_least:
            raise _Refused(f"expected a whole number of at least {at_least}, found {_found(value)}")
        if value > at_most:
            raise _Refused(f"expected a whole number of at most {at_most}, found {_found(value)}")
        return int(value)

    return check


def _one_of(*choices: str) -> Callable[[Any], str]:
    """A check for one of a few words."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        hint = _did_you_mean(value, choices) if isinstance(value, str) else None
        text = f"expected one of {', '.join(choices)}; found {_found(value)}"
        raise _Refused(f"{text}; {hint}" if hint else text)

    return check


def _text(value: Any) -> str:
    """A string that names something: not blank, and every system can store it."""
    if not isinstance(value, str):
        hint = "; write it in quotes" if isinstance(value, int | float | Decimal) else ""
        raise _Refused(f"expected a string, found {_found(value)}{hint}")
    if not value.strip():
        raise _Refused(f"expected a string that is not empty, found {_found(value)}")
    if "\0" in value or not _encodes(value):
        raise _Refused(f"{_shown(value)} holds a character that no name can have")
    return value


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _location(value: Any) -> str:
    """A local path or URI, kept as written."""
    return _text(str(value) if isinstance(value, PurePath) else value)


def _key(value: Any) -> str:
    """The key of a mapping of names."""
    if not isinstance(value, str):
        raise _RefusedKey(_not_a_string_key(value))
    try:
        return _text(value)
    except _Refused as refused:
        raise _RefusedKey(*refused.args) from None


def _not_a_string_key(value: Any) -> str:
    text = f"expected a string as key, found {_found(value)}"
    if not isinstance(value, bool | int | float | Decimal):
        return text
    return f'{text}; write it in quotes: "{_written(value)}"'


def _dataset_name(value: Any) -> str:
    name = _key(value)
    if len(name) > MAX_DATASET_NAME:
        raise _RefusedKey(
            f"expected a dataset name of at most {MAX_DATASET_NAME} characters, found {len(name)}"
        )
    if not name.isprintable() and any(unicodedata.category(char) == "Cc" for char in name):
        raise _RefusedKey("a dataset name cannot hold control characters")
    return name


def _column_name(value: Any) -> str:
    name = _key(value)
    if name in PROVENANCE_COLUMNS:
        reserved = ", ".join(PROVENANCE_COLUMNS)
        raise _RefusedKey(f"reserved for provenance ({reserved}); choose another name")
    return name


def _mapping_of(what: str) -> Callable[[Any], dict[Any, Any]]:
    """A check for a mapping with at least one entry; ``what`` says from what to what."""

    def check(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping) or not value:
            raise _Refused(f"expected a mapping of {what}, at least one; found {_found(value)}")
        return dict(value)

    return check


def _listed(value: Any) -> tuple[Any, ...]:
    """One path or a list of them, as a tuple."""
    if isinstance(value, list | tuple):
        if not value:
            raise _Refused("expected at least one path, found an empty list")
        return tuple(value)
    if isinstance(value, str | PurePath):
        return (_location(value),)  # here, so that a problem is not said to be of path[0]
    hint = "; write it in quotes" if isinstance(value, int | float | Decimal) else ""
    raise _Refused(f"expected a path or a list of paths, found {_found(value)}{hint}")


def _listed_once(paths: tuple[str, ...]) -> tuple[str, ...]:
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise _Refused(*(f"{_shown(path)} is listed twice; list it once" for path in twice))
    return paths


def _weight(value: Any) -> int | Decimal:
    """A weight as written: int, or Decimal where a point or an exponent was written."""
    expected = "expected a whole number of at least 1 or a positive decimal such as 0.5"
    if isinstance(value, float):
        value = Decimal(float.__repr__(value))
    if _is_int(value):
        if value < 1:
            raise _Refused(f"{expected}, found {_found(value)}")
        if value >= _MAX_INTEGER:
            raise _Refused(f"expected at most {MAX_INTEGER_DIGITS} digits, found {_found(value)}")
        return int(value)
    if not isinstance(value, Decimal) or not value.is_finite() or value <= 0:
        raise _Refused(f"{expected}, found {_found(value)}")
    exponent = int(value.as_tuple().exponent)
    if value.adjusted() >= MAX_DECIMAL_DIGITS or -exponent > MAX_DECIMAL_DIGITS:
        raise _Refused(
            f"expected a decimal with at most {MAX_DECIMAL_DIGITS} digits before its point and "
            f"{MAX_DECIMAL_DIGITS} after it, found {_found(value)}"
        )
    return value


def _size(value: Any) -> int:
    """A number of bytes, or text such as 256MiB."""
    expected = "expected a whole number of bytes, at least 1, or a size such as 256MiB or 1GB"
    size = Fraction(value) if _is_int(value) else Fraction(0)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and match[2].lower() in _SIZE_UNITS:
        size = Fraction(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size < 1 or size.denominator != 1:
        raise _Refused(f"{expected}; found {_found(value)}")
    if size > _MAX_INT64:
        raise _Refused(f"expected at most {_MAX_INT64} bytes, found {_found(value)}")
    return int(size)


def _row_range(value: Any) -> tuple[int, int | None]:
    """[start, stop], counted from 0, stop not taken; null is the start or the end."""
    expected = "expected [start, stop], each a row number counted from 0 or null"
    if not isinstance(value, list | tuple):
        raise _Refused(f"{expected}; found {_found(value)}")
    if len(value) != 2:
        raise _Refused(f"{expected}; found a list of {len(value)}")
    refused = []
    for name, bound in zip(("start", "stop"), value, strict=True):
        try:
            _whole(at_least=0)(0 if bound is None else bound)
        except _Refused as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise _Refused(*refused)
    start, stop = int(value[0] or 0), value[1]
    if stop is not None and start >= stop:
        raise _Refused(f"expected start to be less than stop, found [{start}, {stop}]")
    return start, stop


Count: TypeAlias = Annotated[int, PlainValidator(_whole())]
Text: TypeAlias = Annotated[str, PlainValidator(_text)]
Location: TypeAlias = Annotated[str, PlainValidator(_location)]


class _Section(BaseModel):
    """A mapping of known keys, frozen, in which null for an optional key is as if left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        value = dict(value) if isinstance(value, cls) else value
        fields = cls.model_fields
        if not isinstance(value, Mapping):
            known = ", ".join(fields)
            raise _Refused(f"expected a mapping with keys among {known}; found {_found(value)}")
        return {
            key: item
            for key, item in value.items()
            if item is not None or key not in fields or fields[key].is_required()
        }


class DatasetConfig(_Section):
    """One dataset of the mix, as written."""

    path: Annotated[
        tuple[Location, ...], BeforeValidator(_listed), AfterValidator(_listed_once)
    ] = Field(description="a file, folder or glob, or a list of them")
    weight: Annotated[int | Decimal, PlainValidator(_weight)] = Field(
        description="the dataset's share, such as 3 or 0.5"
    )
    rows: Annotated[tuple[int, int | None], PlainValidator(_row_range)] = (0, None)
    columns: (
        Annotated[
            dict[Annotated[str, PlainValidator(_column_name)], Text],
            BeforeValidator(_mapping_of("our column names to the source's")),
        ]
        | None
    ) = None


class Config(_Section):
    """A validated configuration, made by ``load_config``, ``parse_config``, ``config_from_dict``.

    Paths and weights stand as written; local relative paths are relative to ``base``.
    """

    output: Location = Field(description="the folder or URI to write the mix to")
    batch_size: Annotated[int, PlainValidator(_whole(MAX_BATCH_SIZE))] = Field(
        description="a number of items, such as 512"
    )
    num_batches: Count | None = None
    on_exhausted: Annotated[
        Literal["error", "stop", "repeat"], PlainValidator(_one_of("error", "stop", "repeat"))
    ] = Field("error", validate_default=True)
    batches_per_shard: Count | None = None
    shard_bytes: Annotated[int, PlainValidator(_size)] | None = None
    batches_per_step: Count | None = None
    batches_per_row_group: Count | None = None
    compression: Annotated[
        Literal["zstd", "lz4", "snappy", "gzip", "none"],
        PlainValidator(_one_of("zstd", "lz4", "snappy", "gzip", "none")),
    ] = "zstd"
    compression_level: Count | None = Field(None, validate_default=True)
    datasets: Annotated[
        dict[Annotated[str, PlainValidator(_dataset_name)], DatasetConfig],
        BeforeValidator(_mapping_of("dataset names to datasets")),
    ] = Field(description="a mapping of names to datasets, each with path and weight")

    _base: Path = PrivateAttr(default_factory=Path)

    @property
    def base(self) -> Path:
        """The folder that local relative paths are relative to."""
        return self._base

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Weights in configured order: as written where all are written as integers, else all
        multiplied by the least power of ten that makes every one whole."""
        written = [Fraction(dataset.weight) for dataset in self.datasets.values()]
        denominator = math.lcm(*(weight.denominator for weight in written))
        scale = 1
        while scale % denominator:
            scale *= 10
        return tuple(int(weight * scale) for weight in written)

    def resolved(self) -> dict[str, Any]:
        """JSON-able: every key with its default filled in, ``weights`` for the weights.

        Integers from 2^53 are decimal strings. ``base`` is left out; paths stand as written.
        """
        config = self.model_dump()
        if self.batches_per_shard is None and self.shard_bytes is None:
            config["shard_bytes"] = DEFAULT_SHARD_BYTES
        for dataset, weight in zip(config["datasets"].values(), self.weights, strict=True):
            dataset["weight"] = weight
        resolved: dict[str, Any] = _jsonable(config)
        return resolved

    # A field's validator sees the fields above it that are valid, so what two fields say together
    # is reported beside what is wrong with others.

    @field_validator("on_exhausted")
    @classmethod
    def _ends(cls, value: str, info: ValidationInfo) -> str:
        if value == "error" and info.data.get("num_batches", 0) is None:
            raise _Refused(
                '"error" needs to know how long the mix is: give num_batches, or choose '
                "on_exhausted: stop or repeat"
            )
        return value

    @field_validator("shard_bytes", mode="before")
    @classmethod
    def _one_shard_size(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("batches_per_shard", "not valid") is not None:
            raise _Refused("given beside batches_per_shard; give one of the two")
        return value

    @field_validator("batches_per_step")
    @classmethod
    def _whole_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is None:
            return None
        refused = []
        for name in ("num_batches", "batches_per_shard"):
            batches = info.data.get(name)
            if batches is not None and batches % value:
                below = batches - batches % value
                nearest = f"{below} and {below + value}" if below else f"{value}"
                verb = "multiples are" if below else "multiple is"
                refused.append(
                    f"{name} ({batches}) is not a multiple of batches_per_step ({value}); "
                    f"the nearest {verb} {nearest}"
                )
        if refused:
            raise _Refused(*refused)
        return value

    @field_validator("batches_per_row_group")
    @classmethod
    def _within_shard(cls, value: int | None, info: ValidationInfo) -> int | None:
        limit = info.data.get("batches_per_shard")
        if value is not None and limit is not None and value > limit:
            raise _Refused(f"expected at most batches_per_shard ({limit}), found {value}")
        return value

    @field_validator("compression_level")
    @classmethod
    def _level(cls, value: int | None, info: ValidationInfo) -> int | None:
        compression = info.data.get("compression")
        if value is None:
            return 1 if compression == "zstd" else None
        if compression is None:  # not valid itself
            return value
        if compression not in _MAX_LEVEL:
            raise _Refused(f"{compression} has no levels, only zstd and gzip do; leave it out")
        if value > _MAX_LEVEL[compression]:
            raise _Refused(
                f"expected 1 to {_MAX_LEVEL[compression]} for {compression}, found {_found(value)}"
            )
        return value


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, int) and value >= 2**53 else value


# From pydantic's errors to problems.


def _validate(
    value: Any,
    base: str | os.PathLike[str],
    source: str,
    line_of: Callable[[KeyPath], int | None],
    found: Sequence[Problem],
) -> Config:
    """The config that ``value`` describes, or ConfigError with what was found and is found."""
    problems = list(found)
    config = None
    try:
        config = Config.model_validate(value)
    except ValidationError as error:
        known = {(problem.path, problem.line) for problem in found}
        problems += [
            problem
            for problem in _problems(error, line_of)
            if (problem.path, problem.line) not in known
        ]
    if config is None or problems:
        problems.sort(key=lambda problem: (problem.line is None, problem.line or 0))
        raise ConfigError(problems, source)
    config._base = Path(base)
    return config


def _problems(
    error: ValidationError, line_of: Callable[[KeyPath], int | None]
) -> Iterator[Problem]:
    """Pydantic's errors in our words."""
    for detail in error.errors(include_url=False):
        at: KeyPath = detail["loc"]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, _RefusedKey):
            at = (*at[:-2], detail["input"])  # from (.., key made a string or int, "[key]")
        elif detail["type"] == "invalid_key":
            at = (*at[:-1], detail["input"])
        indexed = at[2:3] == ("path",)
        path = _path_text(
            tuple(part if indexed and i == 3 else _written(part) for i, part in enumerate(at))
        )
        section = Config if len(at) == 1 else DatasetConfig
        if isinstance(cause, _Refused):
            messages = cause.args
        elif detail["type"] == "missing":
            messages = (f"missing; give {section.model_fields[at[-1]].description}",)
        elif detail["type"] in ("extra_forbidden", "invalid_key"):
            known = tuple(section.model_fields)
            hint = _did_you_mean(_written(at[-1]), known)
            messages = (f"unknown key; {hint or 'the keys here are ' + ', '.join(known)}",)
        else:
            messages = (f"not a value that can stand here: {_found(detail['input'])}",)
        for message in messages:
            yield Problem(path, line_of(at), message)


def _path_text(path: KeyPath) -> str:
    """A key path such as ``datasets.web.path[1]``: keys are strings, places in a list are ints.

    Keys that would not read well are quoted.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = len(part) <= _SHOWN and re.fullmatch(r"[\w/*+@-]+", part)
            text += "." * bool(text) + (part if plain else _shown(part))
    return text


# From YAML to plain values.

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DECIMAL_INT = re.compile(r"[-+]?[0-9]+")
_OTHER_INT = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


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


class _Unreadable(Exception):
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
class _Document:
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
        """Read the only document of a text. Raises _Unreadable where reading cannot go on."""
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
        if self.root is None and not self.problems:
            self._give_up(None, f"the file is empty; expected the keys {', '.join(_required())}")
        if not isinstance(self.root, dict):
            self._give_up(
                self._root_line, f"expected a mapping of keys to values, found {_found(self.root)}"
            )

    def _take(self, event: Any, line: int) -> None:
        """Put a value, or the start of one, where it belongs."""
        self._size += 1
        if getattr(event, "tag", None) is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._problem(line, f"tags such as {_shown(tag)} are not allowed; write a plain value")
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
            self._problem(line, f"{_shown('*' + anchor)} stands for a value that holds it")
        else:
            self._problem(
                line,
                f"{_shown('*' + anchor)} stands for nothing; "
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
                path.append(_written(around.key))
        return _path_text(tuple(path))

    def _problem(self, line: int, message: str) -> None:
        self.problems.append(Problem(self._path(), line, message))

    def _give_up(self, line: int | None, message: str) -> None:
        raise _Unreadable(Problem(self._path(), line, message))


def _required() -> list[str]:
    return [name for name, known in Config.model_fields.items() if known.is_required()]


def _events(text: str) -> Iterator[Any]:
    """The events of a YAML text. Raises _Unreadable where it is not YAML."""
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
        raise _Unreadable(Problem("", mark.line + 1 if mark else None, message)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: character U+{error.character:04X} is not allowed"
        raise _Unreadable(Problem("", line, message)) from None
    except Exception:  # the scanner lets others through, such as OverflowError for "\UFFFFFFFF"
        message = "not valid YAML: an escape sequence or directive that cannot be read"
        raise _Unreadable(Problem("", None, message)) from None
