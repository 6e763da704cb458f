"""The YAML file that a user writes, validated: all problems at once, each with key and line."""

from __future__ import annotations

import difflib
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pyarrow as pa
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

from .errors import MixError
from .shard import PROVENANCE
from .type_text import TypeTextError, parse_type
from .yaml_text import (
    MAX_INTEGER_DIGITS,
    MAX_SHOWN,
    Document,
    KeyPath,
    Problem,
    Unreadable,
    as_found,
    as_written,
    path_text,
    quoted,
)

DEFAULT_SHARD_BYTES = 64 << 20
"""Size a shard is aimed at where neither batches_per_shard nor shard_bytes is given, in bytes."""

MAX_BATCH_SIZE = 2**31 - 1
MAX_EPOCHS = 2**31 - 1  # an epoch is an int32
MAX_DATASET_NAME = 200
MAX_DECIMAL_DIGITS = 100
PROVENANCE_COLUMNS = tuple(PROVENANCE.names)
DEFAULT_LINE_BYTES = 64 << 20

_MAX_INTEGER = 10**MAX_INTEGER_DIGITS
_MAX_INT64 = 2**63 - 1
_MIN_LINE_BYTES, MAX_LINE_BYTES = 1 << 10, 1 << 30
_MISSING = ("error", "null", "drop")
_MAX_LEVEL = {"zstd": 22, "gzip": 9}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]{1,3})", re.IGNORECASE)
_SIZE_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


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
    document = Document()
    try:
        document.read(text)
    except Unreadable as error:
        raise ConfigError([*document.problems, error.problem], source) from None
    if document.root is None and not document.problems:
        message = f"the file is empty; expected the keys {', '.join(_required(WeightedConfig))}"
        raise ConfigError([Problem("", None, message)], source)
    if not isinstance(document.root, dict):
        message = f"expected a mapping of keys to values, found {as_found(document.root)}"
        problem = Problem("", document.line_of(()), message)
        raise ConfigError([*document.problems, problem], source)
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


@lru_cache(1024)  # one mistake is often made in every dataset
def _did_you_mean(word: str, known: tuple[str, ...]) -> str | None:
    """The known word that was probably meant, as a question."""
    plain = word[:MAX_SHOWN].lower().replace("-", "_").replace(" ", "_")
    close = difflib.get_close_matches(plain, known, n=1)
    return f'did you mean "{close[0]}"?' if close else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(at_most: int = _MAX_INT64, at_least: int = 1) -> Callable[[Any], int]:
    """A check for whole numbers in a range."""

    def check(value: Any) -> int:
        if not _is_int(value) or value < at_least:
            raise _Refused(
                f"expected a whole number of at least {at_least}, found {as_found(value)}"
            )
        if value > at_most:
            raise _Refused(f"expected a whole number of at most {at_most}, found {as_found(value)}")
        return int(value)

    return check


def _one_of(*choices: str) -> Callable[[Any], str]:
    """A check for one of a few words."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        hint = _did_you_mean(value, choices) if isinstance(value, str) else None
        text = f"expected one of {', '.join(choices)}; found {as_found(value)}"
        raise _Refused(f"{text}; {hint}" if hint else text)

    return check


def _text(value: Any) -> str:
    """A string that names something: not blank, and every system can store it."""
    if not isinstance(value, str):
        hint = "; write it in quotes" if isinstance(value, int | float | Decimal) else ""
        raise _Refused(f"expected a string, found {as_found(value)}{hint}")
    if not value.strip():
        raise _Refused(f"expected a string that is not empty, found {as_found(value)}")
    if "\0" in value or not _encodes(value):
        raise _Refused(f"{quoted(value)} holds a character that no name can have")
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
    text = f"expected a string as key, found {as_found(value)}"
    if not isinstance(value, bool | int | float | Decimal):
        return text
    return f'{text}; write it in quotes: "{as_written(value)}"'


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
            raise _Refused(f"expected a mapping of {what}, at least one; found {as_found(value)}")
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
    raise _Refused(f"expected a path or a list of paths, found {as_found(value)}{hint}")


def _listed_once(paths: tuple[str, ...]) -> tuple[str, ...]:
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise _Refused(*(f"{quoted(path)} is listed twice; list it once" for path in twice))
    return paths


def _weight(value: Any) -> int | Decimal:
    """A weight as written: int, or Decimal where a point or an exponent was written."""
    expected = "expected a whole number of at least 1 or a positive decimal such as 0.5"
    if isinstance(value, float):
        value = Decimal(float.__repr__(value))
    if _is_int(value):
        if value < 1:
            raise _Refused(f"{expected}, found {as_found(value)}")
        if value >= _MAX_INTEGER:
            raise _Refused(f"expected at most {MAX_INTEGER_DIGITS} digits, found {as_found(value)}")
        return int(value)
    if not isinstance(value, Decimal) or not value.is_finite() or value <= 0:
        raise _Refused(f"{expected}, found {as_found(value)}")
    exponent = int(value.as_tuple().exponent)
    if value.adjusted() >= MAX_DECIMAL_DIGITS or -exponent > MAX_DECIMAL_DIGITS:
        raise _Refused(
            f"expected a decimal with at most {MAX_DECIMAL_DIGITS} digits before its point and "
            f"{MAX_DECIMAL_DIGITS} after it, found {as_found(value)}"
        )
    return value


def byte_size(value: Any) -> int:
    """A number of bytes, or text such as 256MiB."""
    expected = "expected a whole number of bytes, at least 1, or a size such as 256MiB or 1GB"
    size = Fraction(value) if _is_int(value) else Fraction(0)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and match[2].lower() in _SIZE_UNITS:
        size = Fraction(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size < 1 or size.denominator != 1:
        raise _Refused(f"{expected}; found {as_found(value)}")
    if size > _MAX_INT64:
        raise _Refused(f"expected at most {_MAX_INT64} bytes, found {as_found(value)}")
    return int(size)


def _line_bytes(value: Any) -> int:
    """A size that a line can have."""
    size = byte_size(value)
    if not _MIN_LINE_BYTES <= size <= MAX_LINE_BYTES:
        raise _Refused(f"expected 1KiB to 1GiB, found {as_found(value)}")
    return size


def _type(value: Any) -> pa.DataType:
    """An Arrow type, written as Arrow prints it."""
    if isinstance(value, pa.DataType):
        return value
    quotes = "; a type with a comma or a colon in it is written in quotes"
    if isinstance(value, Mapping | list):
        raise _Refused(f"expected a type, found {as_found(value)}{quotes}")
    text = _text(value)
    try:
        return parse_type(text)
    except TypeTextError as error:
        cut = sum(map(text.count, "([<")) > sum(map(text.count, ")]>"))
        raise _Refused(f"{error}{quotes if cut else ''}") from None


def _missing_columns(value: Any) -> str:
    """What is done about missing columns; YAML takes the bare word null for its own."""
    return _one_of(*_MISSING)("null" if value is None else value)


def _row_range(value: Any) -> tuple[int, int | None]:
    """[start, stop], counted from 0, stop not taken; null is the start or the end."""
    expected = "expected [start, stop], each a row number counted from 0 or null"
    if not isinstance(value, list | tuple):
        raise _Refused(f"{expected}; found {as_found(value)}")
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


def _one_of_two(value: Any, other: str, info: ValidationInfo) -> bool:
    """Whether a key or the one above it is given. Raises _Refused where both are."""
    beside = info.data.get(other, "not valid")
    if value is not None and beside is not None:
        raise _Refused(f"given beside {other}; give one of the two")
    return value is not None or beside is not None


Text: TypeAlias = Annotated[str, PlainValidator(_text)]
Location: TypeAlias = Annotated[str, PlainValidator(_location)]
Count: TypeAlias = Annotated[int, PlainValidator(_whole())]
Epochs: TypeAlias = Annotated[int, PlainValidator(_whole(MAX_EPOCHS))]
Natural: TypeAlias = Annotated[int, PlainValidator(_whole(at_least=0))]
BatchSize: TypeAlias = Annotated[
    int,
    PlainValidator(_whole(MAX_BATCH_SIZE)),
    Field(description="a number of items, such as 512"),
]


class _Section(BaseModel):
    """A mapping of known keys, frozen, in which null for an optional key is as if left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        fields = {known.alias or name: known for name, known in cls.model_fields.items()}
        if isinstance(value, cls):
            value = value.model_dump(by_alias=True)
        if not isinstance(value, Mapping):
            known = ", ".join(_keys(cls))
            raise _Refused(f"expected a mapping with keys among {known}; found {as_found(value)}")
        return {
            key: item
            for key, item in value.items()
            if item is not None
            or key not in fields
            or fields[key].is_required()
            or key == "missing_columns"  # null is one of its words
        }


def _required(section: type[_Section]) -> list[str]:
    return [name for name, known in section.model_fields.items() if known.is_required()]


def _keys(section: type[_Section]) -> tuple[str, ...]:
    """The keys of a section, those that must be given first."""
    written = [known.alias or name for name, known in section.model_fields.items()]
    return tuple(dict.fromkeys([*_required(section), *written]))


Paths: TypeAlias = Annotated[
    tuple[Location, ...],
    BeforeValidator(_listed),
    AfterValidator(_listed_once),
    Field(description="a file, folder or glob, or a list of them"),
]
RowRange: TypeAlias = Annotated[tuple[int, int | None], PlainValidator(_row_range)]
Columns: TypeAlias = Annotated[
    dict[Annotated[str, PlainValidator(_column_name)], Text],
    BeforeValidator(_mapping_of("our column names to the source's")),
]


Types: TypeAlias = Annotated[
    dict[Annotated[str, PlainValidator(_key)], Annotated[pa.DataType, PlainValidator(_type)]],
    BeforeValidator(_mapping_of("the source's column names to types")),
]


class UnweightedDatasetConfig(_Section):
    """One dataset of a mix that knows no weights, as written.

    ``types`` is written ``schema``: the types that columns of the source are given.
    """

    path: Paths
    rows: RowRange = (0, None)
    columns: Columns | None = None
    types: Types | None = Field(None, alias="schema")
    max_line_bytes: Annotated[int, PlainValidator(_line_bytes)] = DEFAULT_LINE_BYTES
    on_bad_line: Annotated[Literal["error", "skip"], PlainValidator(_one_of("error", "skip"))] = (
        "error"
    )


class DatasetConfig(UnweightedDatasetConfig):
    """One dataset of a weighted mix, as written."""

    weight: Annotated[int | Decimal, PlainValidator(_weight)] = Field(
        description="the dataset's share, such as 3 or 0.5"
    )


_Dataset = TypeVar("_Dataset", DatasetConfig, UnweightedDatasetConfig)
Datasets: TypeAlias = Annotated[
    dict[Annotated[str, PlainValidator(_dataset_name)], _Dataset],
    BeforeValidator(_mapping_of("dataset names to datasets")),
]


class _Mix(_Section):
    """What is said of a mix whatever its mixture."""

    output: Location = Field(description="the folder or URI to write the mix to")
    mixture: str
    num_batches: Count | None = None
    batches_per_shard: Count | None = None
    shard_bytes: Annotated[int, PlainValidator(byte_size)] | None = None
    batches_per_step: Count | None = None
    batches_per_row_group: Count | None = None
    missing_columns: Annotated[
        Literal["error", "null", "drop"], PlainValidator(_missing_columns)
    ] = "error"
    compression: Annotated[
        Literal["zstd", "lz4", "snappy", "gzip", "none"],
        PlainValidator(_one_of("zstd", "lz4", "snappy", "gzip", "none")),
    ] = "zstd"
    compression_level: Count | None = Field(None, validate_default=True)

    _base: Path = PrivateAttr(default_factory=Path)

    @property
    def base(self) -> Path:
        """The folder that local relative paths are relative to."""
        return self._base

    def resolved(self) -> dict[str, Any]:
        """JSON-able: every key with its default filled in.

        Integers from 2^53 are decimal strings. ``base`` is left out; paths stand as written.
        """
        config = self.model_dump(by_alias=True)
        if self.batches_per_shard is None and self.shard_bytes is None:
            config["shard_bytes"] = DEFAULT_SHARD_BYTES
        resolved: dict[str, Any] = _jsonable(config)
        return resolved

    # A field's validator sees the fields above it that are valid, so what two fields say together
    # is reported beside what is wrong with others.

    @field_validator("shard_bytes", mode="before")
    @classmethod
    def _one_shard_size(cls, value: Any, info: ValidationInfo) -> Any:
        _one_of_two(value, "batches_per_shard", info)
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
            most = _MAX_LEVEL[compression]
            raise _Refused(f"expected 1 to {most} for {compression}, found {as_found(value)}")
        return value


class WeightedConfig(_Mix):
    """A mix in which every batch holds its datasets in the proportion of their weights."""

    mixture: Literal["weighted"] = "weighted"
    batch_size: BatchSize
    on_exhausted: Annotated[
        Literal["error", "stop", "repeat"], PlainValidator(_one_of("error", "stop", "repeat"))
    ] = Field("error", validate_default=True)
    datasets: Datasets[DatasetConfig] = Field(
        description="a mapping of names to datasets, each with path and weight"
    )

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
        """As for every mix, with ``weights`` for what was written."""
        config = super().resolved()
        for dataset, weight in zip(config["datasets"].values(), self.weights, strict=True):
            dataset["weight"] = _jsonable(weight)
        return config

    @field_validator("on_exhausted")
    @classmethod
    def _ends(cls, value: str, info: ValidationInfo) -> str:
        if value == "error" and info.data.get("num_batches", 0) is None:
            raise _Refused(
                '"error" needs to know how long the mix is: give num_batches, or choose '
                "on_exhausted: stop or repeat"
            )
        return value


class FrameBudgetConfig(_Mix):
    """A mix of batches of items of similar length, each within a budget of frames.

    ``length_column`` and ``length_of`` name columns as the shards call them.
    """

    mixture: Literal["frame_budget"] = "frame_budget"
    frame_budget: Count = Field(
        description="the most a batch may take, its items times its longest length, such as 16000"
    )
    pool_size: Count = Field(
        description="how many items are sorted by length together, such as 4096"
    )
    max_items: Count | None = None
    seed: Natural = 0
    stream: Natural = 0
    length_column: Text | None = None
    length_of: Text | None = Field(None, validate_default=True)
    on_too_long: Annotated[Literal["error", "drop"], PlainValidator(_one_of("error", "drop"))] = (
        "error"
    )
    epochs: Epochs | None = Field(None, validate_default=True)
    datasets: Datasets[UnweightedDatasetConfig] = Field(
        description="a mapping of names to datasets, each with path"
    )

    @field_validator("length_of", mode="before")
    @classmethod
    def _one_length(cls, value: Any, info: ValidationInfo) -> Any:
        if not _one_of_two(value, "length_column", info):
            raise _Refused(
                "missing; give length_column, a column that holds the length of each item, or "
                "length_of, a column of lists or texts whose length is taken"
            )
        return value

    @field_validator("epochs", mode="before")
    @classmethod
    def _one_epoch_by_default(cls, value: Any, info: ValidationInfo) -> Any:
        return value if _one_of_two(value, "num_batches", info) else 1


class ReservoirConfig(_Mix):
    """A mix whose every item is drawn at random from a few sources that are open at once."""

    mixture: Literal["reservoir"] = "reservoir"
    batch_size: BatchSize
    max_simultaneous: Count = Field(description="how many sources are open at once, such as 16")
    seed: Natural = 0
    passes: Epochs | None = Field(None, validate_default=True)
    datasets: Datasets[UnweightedDatasetConfig] = Field(
        description="a mapping of names to datasets, each with path"
    )

    @field_validator("passes", mode="before")
    @classmethod
    def _ends(cls, value: Any, info: ValidationInfo) -> Any:
        if not _one_of_two(value, "num_batches", info):
            raise _Refused(
                "missing; give passes, how often every source is read, or num_batches, how long "
                "the mix is"
            )
        return value


Config: TypeAlias = WeightedConfig | FrameBudgetConfig | ReservoirConfig
"""A validated configuration, made by ``load_config``, ``parse_config``, ``config_from_dict``.

Paths and weights stand as written; local relative paths are relative to ``base``.
"""

_KINDS: dict[str, type[Config]] = {
    "weighted": WeightedConfig,
    "frame_budget": FrameBudgetConfig,
    "reservoir": ReservoirConfig,
}
_WHY_NO_WEIGHT = {
    "frame_budget": "an epoch holds every item once",
    "reservoir": "every open source is as likely as the next",
}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, pa.DataType):
        return str(value)
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
    known = {(problem.path, problem.line) for problem in found}
    config, refused = _read(value, line_of)
    problems = [*found, *(item for item in refused if (item.path, item.line) not in known)]
    if config is None or problems:
        problems.sort(key=lambda problem: (problem.line is None, problem.line or 0))
        raise ConfigError(problems, source)
    config._base = Path(base)
    return config


def _read(
    value: Any, line_of: Callable[[KeyPath], int | None]
) -> tuple[Config | None, list[Problem]]:
    """The config of the mixture that ``value`` names, or what is wrong with it."""
    written = value.get("mixture") if isinstance(value, Mapping) else None
    try:
        mixture = "weighted" if written is None else _one_of(*_KINDS)(written)
    except _Refused as refused:
        # Keys cannot be judged without a mixture, but what no mixture takes is wrong anyway.
        tried = [_read({**value, "mixture": kind}, line_of)[1] for kind in _KINDS]
        always = set.intersection(*map(set, tried))
        problem = Problem("mixture", line_of(("mixture",)), str(refused))
        return None, [problem, *(item for item in tried[0] if item in always)]
    try:
        return _KINDS[mixture].model_validate(value), []
    except ValidationError as error:
        return None, list(_problems(error, mixture, line_of))


def _problems(
    error: ValidationError, mixture: str, line_of: Callable[[KeyPath], int | None]
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
        path = path_text(
            tuple(part if indexed and i == 3 else as_written(part) for i, part in enumerate(at))
        )
        section: type[_Section] = _KINDS[mixture]
        if len(at) > 1:
            section = DatasetConfig if mixture == "weighted" else UnweightedDatasetConfig
        if isinstance(cause, _Refused):
            messages = cause.args
        elif detail["type"] == "missing":
            messages = (f"missing; give {section.model_fields[at[-1]].description}",)
        elif detail["type"] in ("extra_forbidden", "invalid_key"):
            messages = (_not_known(at, section, mixture),)
        else:
            messages = (f"not a value that can stand here: {as_found(detail['input'])}",)
        for message in messages:
            yield Problem(path, line_of(at), message)


def _not_known(at: KeyPath, section: type[_Section], mixture: str) -> str:
    """What is said of a key that its section does not have."""
    key = at[-1]
    if len(at) > 1 and key == "weight":
        why = _WHY_NO_WEIGHT[mixture]
        return f"weight has no place in a {mixture} mixture: {why}; leave it out"
    owners = [name for name, kind in _KINDS.items() if key in kind.model_fields]
    if len(at) == 1 and owners:
        return f"{key} belongs to mixture: {' or '.join(owners)}; this one is {mixture}"
    known = _keys(section)
    hint = _did_you_mean(as_written(key), known)
    return f"unknown key; {hint or 'the keys here are ' + ', '.join(known)}"
