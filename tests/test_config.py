"""The configuration file: what it accepts, what it resolves to and what every refusal says."""

from __future__ import annotations

import json
import pickle
import string
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import (
    DEFAULT_SHARD_BYTES,
    Config,
    ConfigError,
    DatasetConfig,
    FrameBudgetConfig,
    Problem,
    ReservoirConfig,
    UnweightedDatasetConfig,
    WeightedConfig,
    config_from_dict,
    load_config,
    parse_config,
)

HEAD = "output: out/\nbatch_size: 512\non_exhausted: repeat\n"
WEB = "datasets:\n  web: {path: data/web/*.parquet, weight: 3}\n"
MINIMAL = HEAD + WEB

DESIGN = """\
# mix.yaml (local paths are relative to this file)
output: out/
batch_size: 512
num_batches: 10000
on_exhausted: repeat          # error | stop | repeat
batches_per_shard: 64
# batches_per_step: 8         # each rank takes whole batches
datasets:
  web:   {path: data/web/*.parquet, weight: 3}
  code:  {path: data/code/, weight: 2, rows: [1000, null]}
  books: {path: [data/books-a.jsonl.gz, data/books-b.jsonl.gz], weight: 1, columns: {text: body}}
"""


FRAME_BUDGET = """\
output: out/
mixture: frame_budget
frame_budget: 16000
pool_size: 4096
length_column: frames
datasets:
  web: {path: data/web/*.parquet}
"""
RESERVOIR = """\
output: out/
mixture: reservoir
batch_size: 512
max_simultaneous: 4
passes: 2
datasets:
  web: {path: data/web/*.parquet}
"""

RESOLVED_WEB = {
    "path": ["data/web/*.parquet"],
    "rows": [0, None],
    "columns": None,
    "schema": None,
    "max_line_bytes": 64 << 20,
    "on_bad_line": "error",
}


def read(text: str) -> Config:
    return parse_config(text, Path("."))


def problems(text: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.problems
    assert "pydantic" not in str(caught.value)
    assert "http" not in str(caught.value)
    return caught.value.problems


def problem(text: str) -> Problem:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def top(line: str) -> str:
    """The only problem's message where one line, the fourth, is added to a valid file."""
    found = problem(HEAD + line + "\n" + WEB)
    assert (found.path, found.line) == (line.split(":")[0], 4)
    return found.message


def of_dataset(entry: str, key: str = "") -> str:
    """The only problem's message where an entry is added to a valid dataset."""
    found = problem(HEAD + f"datasets:\n  web:\n    path: web\n    weight: 3\n    {entry}\n")
    assert (found.path, found.line) == (f"datasets.web.{key or entry.split(':')[0]}", 8)
    return found.message


def of_weight(weight: str) -> str:
    found = problem(HEAD + f"datasets:\n  web:\n    path: web\n    weight: {weight}\n")
    assert (found.path, found.line) == ("datasets.web.weight", 7)
    return found.message


def of_path(path: str, key: str = "datasets.web.path") -> str:
    found = problem(HEAD + f"datasets:\n  web:\n    weight: 3\n    path: {path}\n")
    assert (found.path, found.line) == (key, 7)
    return found.message


def weights(*written: str) -> tuple[int, ...]:
    entries = (f"  d{i}: {{path: x, weight: {text}}}\n" for i, text in enumerate(written))
    return read(HEAD + "datasets:\n" + "".join(entries)).weights


def as_dict(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "output": "out/",
        "batch_size": 512,
        "on_exhausted": "repeat",
        "datasets": {"web": {"path": "web", "weight": 3}},
    }
    return config | changes


# What is accepted


def test_the_file_of_the_design_is_read() -> None:
    config = read(DESIGN)
    assert config.output == "out/"
    assert config.batch_size == 512
    assert config.num_batches == 10000
    assert config.on_exhausted == "repeat"
    assert config.batches_per_shard == 64
    assert list(config.datasets) == ["web", "code", "books"]
    assert config.datasets["web"].path == ("data/web/*.parquet",)
    assert config.datasets["code"].rows == (1000, None)
    assert config.datasets["books"].path == ("data/books-a.jsonl.gz", "data/books-b.jsonl.gz")
    assert config.datasets["books"].columns == {"text": "body"}
    assert config.weights == (3, 2, 1)


def test_defaults_are_filled_in() -> None:
    config = read(MINIMAL)
    assert config.num_batches is None
    assert config.batches_per_shard is None
    assert config.shard_bytes is None
    assert config.batches_per_step is None
    assert config.batches_per_row_group is None
    assert config.compression == "zstd"
    assert config.compression_level == 1
    assert config.datasets["web"].rows == (0, None)
    assert config.datasets["web"].columns is None
    assert config.datasets["web"].types is None
    assert config.datasets["web"].max_line_bytes == 64 << 20
    assert config.datasets["web"].on_bad_line == "error"
    assert config.missing_columns == "error"


def test_on_exhausted_is_error_by_default() -> None:
    text = f"output: o\nbatch_size: 1\nnum_batches: 7\n{WEB}"
    assert read(text).on_exhausted == "error"


def test_null_for_an_optional_key_is_the_same_as_leaving_it_out() -> None:
    optional = [
        "num_batches",
        "batches_per_shard",
        "shard_bytes",
        "batches_per_step",
        "batches_per_row_group",
        "compression",
        "compression_level",
    ]
    nulls = "".join(f"{key}: null\n" for key in optional)
    web = "datasets:\n  web: {path: data/web/*.parquet, weight: 3, rows: , columns: ~"
    web += ", schema: , max_line_bytes: ~, on_bad_line: null}\n"
    assert read(HEAD + nulls + web) == read(MINIMAL)
    with_default = f"output: o\nbatch_size: 1\nnum_batches: 7\non_exhausted: null\n{WEB}"
    assert read(with_default).on_exhausted == "error"


def test_a_config_is_frozen() -> None:
    config = read(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.batch_size = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.datasets["web"].weight = 3  # type: ignore[misc]


def test_a_config_pickles_and_compares() -> None:
    config = read(DESIGN)
    assert config.weights == (3, 2, 1)
    again = pickle.loads(pickle.dumps(config))
    assert again == config == read(DESIGN)
    assert again.base == config.base
    assert again != parse_config(DESIGN, Path("elsewhere"))


def test_an_output_may_be_a_uri() -> None:
    text = MINIMAL.replace("out/", "gs://bucket/mix/")
    assert read(text).output == "gs://bucket/mix/"


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1", 1),
        ("1048576", 2**20),
        ("256MiB", 256 * 2**20),
        ("512 KiB", 512 * 2**10),
        ("1GB", 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2tib", 2**41),
        ("10 B", 10),
        ("0.5 kB", 500),
        ("3PB", 3 * 10**15),
    ],
)
def test_shard_bytes_takes_bytes_and_decimal_and_binary_units(written: str, size: int) -> None:
    assert read(HEAD + f"shard_bytes: {written}\n" + WEB).shard_bytes == size


@pytest.mark.parametrize(
    ("compression", "level", "resolved"),
    [
        ("zstd", None, 1),
        ("zstd", 22, 22),
        ("gzip", None, None),
        ("gzip", 9, 9),
        ("lz4", None, None),
        ("snappy", None, None),
        ("none", None, None),
    ],
)
def test_the_compression_level_is_resolved(
    compression: str, level: int | None, resolved: int | None
) -> None:
    config = config_from_dict(as_dict(compression=compression, compression_level=level), ".")
    assert (config.compression, config.compression_level) == (compression, resolved)


def test_steps_that_divide_shards_and_the_mix_are_accepted() -> None:
    layout = "num_batches: 10000\nbatches_per_step: 8\nbatches_per_shard: 64\n"
    assert read(HEAD + layout + "batches_per_row_group: 64\n" + WEB).batches_per_step == 8


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ("[0, 1]", (0, 1)),
        ("[null, 5]", (0, 5)),
        ("[5, null]", (5, None)),
        ("[null, null]", (0, None)),
        ("[~, ]", None),
    ],
)
def test_rows_take_null_for_start_and_end(
    written: str, rows: tuple[int, int | None] | None
) -> None:
    text = HEAD + f"datasets: {{web: {{path: web, weight: 3, rows: {written}}}}}\n"
    if rows is None:
        assert problem(text).message.endswith("found a list of 1")
    else:
        assert read(text).datasets["web"].rows == rows


def test_two_of_our_columns_may_come_from_one_of_the_source() -> None:
    text = (
        HEAD + "datasets: {web: {path: web, weight: 3, columns: {a: body, b: body, mix: mix_row}}}"
    )
    assert read(text).datasets["web"].columns == {"a": "body", "b": "body", "mix": "mix_row"}


def test_schema_gives_columns_of_the_source_a_type() -> None:
    text = HEAD + "datasets:\n  web:\n    path: x\n    weight: 1\n    schema:\n"
    text += "      a.b: int32\n      price: decimal128(9, 2)\n      at: timestamp[us, tz=UTC]\n"
    text += '      mix_row: "struct<a: float64, b: list<string>>"\n'
    web = read(text).datasets["web"]
    assert web.types == {
        "a.b": pa.int32(),
        "price": pa.decimal128(9, 2),
        "at": pa.timestamp("us", tz="UTC"),
        "mix_row": pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))]),
    }
    given = as_dict(datasets={"web": {"path": "x", "weight": 1, "schema": web.types}})
    assert config_from_dict(given, ".").datasets["web"].types == web.types
    assert read(text).resolved()["datasets"]["web"]["schema"] == {
        "a.b": "int32",
        "price": "decimal128(9, 2)",
        "at": "timestamp[us, tz=UTC]",
        "mix_row": "struct<a: double, b: list<element: string>>",
    }
    assert pickle.loads(pickle.dumps(read(text))) == read(text)


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("null", "null"),
        ("'null'", "null"),
        ("~", "null"),
        ("drop", "drop"),
        ("error", "error"),
    ],
)
def test_null_is_a_word_for_missing_columns(written: str, policy: str) -> None:
    assert read(HEAD + f"missing_columns: {written}\n" + WEB).missing_columns == policy
    value = None if written == "null" else policy
    config = config_from_dict(as_dict(missing_columns=value), ".")
    assert config.missing_columns == policy
    assert config.resolved()["missing_columns"] == policy


@pytest.mark.parametrize("text", [FRAME_BUDGET, RESERVOIR])
def test_every_mixture_takes_what_is_said_of_reading(text: str) -> None:
    said = "schema: {a: int8}, max_line_bytes: 1MiB, on_bad_line: skip}"
    config = read("missing_columns: drop\n" + text.replace("*.parquet}", f"*.parquet, {said}"))
    assert config.missing_columns == "drop"
    web = config.datasets["web"]
    assert (web.types, web.max_line_bytes, web.on_bad_line) == ({"a": pa.int8()}, 1 << 20, "skip")


def test_dataset_names_may_be_any_text() -> None:
    names = ["web/en", "données", "数据", "a.b", "with space", "-", "2024", "🙂", "x" * 200]
    lines = "".join(f"  {json.dumps(name)}: {{path: x, weight: 1}}\n" for name in names)
    assert list(read(HEAD + "datasets:\n" + lines).datasets) == names


def test_the_same_mapping_gives_the_same_config_as_the_file() -> None:
    mapping = {
        "output": "out/",
        "batch_size": 512,
        "num_batches": 10000,
        "on_exhausted": "repeat",
        "batches_per_shard": 64,
        "datasets": {
            "web": {"path": PurePosixPath("data/web/*.parquet"), "weight": 3},
            "code": {"path": "data/code/", "weight": 2, "rows": (1000, None)},
            "books": DatasetConfig(
                path=("data/books-a.jsonl.gz", "data/books-b.jsonl.gz"),
                weight=1,
                columns={"text": "body"},
            ),
        },
    }
    assert config_from_dict(mapping, Path(".")) == read(DESIGN)


def test_a_mapping_need_not_be_a_dict() -> None:
    class Settings(Mapping[str, Any]):
        def __init__(self, **items: Any) -> None:
            self.items_ = items

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __iter__(self) -> Any:
            return iter(self.items_)

        def __len__(self) -> int:
            return len(self.items_)

    web = Settings(web=Settings(path="web", weight=3))
    assert config_from_dict(Settings(**as_dict(datasets=web)), ".") == config_from_dict(
        as_dict(), "."
    )


# Weights


def test_integer_weights_stay_as_written() -> None:
    assert weights("10", "20", "30") == (10, 20, 30)
    assert weights("0x10", "0o10", "010", "+7") == (16, 8, 10, 7)


def test_decimal_weights_are_multiplied_by_the_least_power_of_ten() -> None:
    assert weights("0.1", "0.25", "3") == (10, 25, 300)
    assert weights("0.5", "0.50") == (5, 5)
    assert weights("2.0", "3") == (2, 3)
    assert weights("1e-3", "1") == (1, 1000)
    assert weights("1e3", "1.5E+1", ".5") == (10000, 150, 5)
    assert weights("20.0", "30") == (20, 30)


def test_decimals_are_taken_from_the_text_and_never_from_a_float() -> None:
    assert weights("0.1", "0.1000000000000000055511151231257827") == (
        1000000000000000000000000000000000,
        1000000000000000055511151231257827,
    )


def test_what_was_written_is_kept_beside_the_resolved_weights() -> None:
    config = read(HEAD + "datasets: {a: {path: x, weight: 0.10}, b: {path: x, weight: 3}}")
    assert config.datasets["a"].weight == Decimal("0.1")
    assert str(config.datasets["a"].weight) == "0.10"
    assert config.datasets["b"].weight == 3
    assert config.weights == (1, 30)


def test_weights_past_64_bits_are_exact() -> None:
    huge = 10**300 + 1
    assert weights(str(2**64 + 1), str(huge)) == (2**64 + 1, huge)
    assert weights(str(huge), "0.001") == (huge * 1000, 1)


def test_the_largest_weights_can_be_written_to_json() -> None:
    text = "9" * 4000
    config = read(
        HEAD + f"datasets: {{a: {{path: x, weight: {text}}}, b: {{path: x, weight: 1e-100}}}}"
    )
    assert json.loads(json.dumps(config.resolved()))["datasets"]["a"]["weight"] == text + "0" * 100


def test_weights_in_python_may_be_int_decimal_or_float_by_its_repr() -> None:
    datasets = {
        "a": {"path": "x", "weight": 0.1},
        "b": {"path": "x", "weight": Decimal("0.25")},
        "c": {"path": "x", "weight": 3},
        "d": {"path": "x", "weight": 1e-2},
    }
    assert config_from_dict(as_dict(datasets=datasets), ".").weights == (10, 25, 300, 1)


EXPECTED_WEIGHT = "expected a whole number of at least 1 or a positive decimal such as 0.5, found "


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("0", "0"),
        ("-3", "-3"),
        ("0.0", "0.0"),
        ("-0.5", "-0.5"),
        ('"3"', '"3" (a string)'),
        ("3%", '"3%" (a string)'),
        ("1_000", '"1_000" (a string)'),
        ("true", "true (a boolean)"),
        ("null", "null"),
        (".nan", "NaN"),
        (".inf", "Infinity"),
        ("-.INF", "-Infinity"),
        ("[3]", "a list"),
        ("{}", "an empty mapping"),
        ("2024-01-01", '"2024-01-01" (a string)'),
    ],
)
def test_a_weight_that_is_no_positive_number_is_refused(written: str, found: str) -> None:
    assert of_weight(written) == EXPECTED_WEIGHT + found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "3", True, None, b"3", {3}])
def test_a_weight_in_python_that_is_no_positive_number_is_refused(value: Any) -> None:
    datasets = {"web": {"path": "x", "weight": value}}
    with pytest.raises(ConfigError, match=r"datasets\.web\.weight: " + EXPECTED_WEIGHT):
        config_from_dict(as_dict(datasets=datasets), ".")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("1e-400", "1E-400"),
        ("1e9999", "1E+9999"),
        ("1e99999999999999999999999", "1E+999999999999999999"),
        ("1e-99999999999999999999999", "1E-999999999999999999"),
        ("0." + "0" * 100 + "1", "1E-101"),
        ("1e100", "1E+100"),
    ],
)
def test_a_decimal_weight_with_too_many_digits_is_refused(written: str, found: str) -> None:
    assert of_weight(written) == (
        "expected a decimal with at most 100 digits before its point and 100 after it, "
        f"found {found}"
    )


def test_an_integer_weight_with_too_many_digits_is_refused() -> None:
    assert "at most 100 digits" in of_weight("1" * 5000)
    with pytest.raises(ConfigError, match="at most 4000 digits, found a number of about 5001 dig"):
        config_from_dict(as_dict(datasets={"web": {"path": "x", "weight": 10**5000}}), ".")


# Top-level keys


@pytest.mark.parametrize("key", ["batch_size", "num_batches", "batches_per_shard"])
@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("0", "0"),
        ("-1", "-1"),
        ('"512"', '"512" (a string)'),
        ("512.0", "512.0"),
        ("yes", '"yes" (a string)'),
        ("true", "true (a boolean)"),
        ("[1]", "a list"),
        ("{a: 1}", "a mapping"),
    ],
)
def test_counts_are_whole_numbers_of_at_least_1(key: str, written: str, found: str) -> None:
    text = f"output: o\non_exhausted: stop\n{key}: {written}\n{WEB}"
    if key != "batch_size":
        text = f"batch_size: 1\n{text}"
    assert problem(text).path == key
    assert problem(text).message == f"expected a whole number of at least 1, found {found}"


def test_counts_have_an_upper_bound() -> None:
    text = MINIMAL.replace("512", "2147483648")
    assert problem(text) == Problem(
        "batch_size", 2, "expected a whole number of at most 2147483647, found 2147483648"
    )
    assert read(MINIMAL.replace("512", "2147483647")).batch_size == 2**31 - 1
    assert top(f"num_batches: {2**63}").startswith(
        f"expected a whole number of at most {2**63 - 1}, found {2**63}"
    )


def test_output_is_a_string_that_is_not_empty() -> None:
    def message(written: str) -> str:
        found = problem(MINIMAL.replace("out/", written))
        assert (found.path, found.line) == ("output", 1)
        return found.message

    assert message('""') == 'expected a string that is not empty, found "" (a string)'
    assert message('" "') == 'expected a string that is not empty, found " " (a string)'
    assert message("") == "expected a string, found null"
    assert message("3") == "expected a string, found 3; write it in quotes"
    assert message("false") == "expected a string, found false (a boolean); write it in quotes"
    assert message("[a]") == "expected a string, found a list"
    assert message(r'"a\0b"') == r'"a\u0000b" holds a character that no name can have'


def test_on_exhausted_error_needs_num_batches_and_says_the_way_out() -> None:
    expected = (
        '"error" needs to know how long the mix is: give num_batches, or choose '
        "on_exhausted: stop or repeat"
    )
    text = f"output: o\nbatch_size: 1\non_exhausted: error\n{WEB}"
    assert problem(text) == Problem("on_exhausted", 3, expected)
    assert problem(text.replace("on_exhausted: error\n", "")) == Problem(
        "on_exhausted", 1, expected
    )
    assert problem(text + "num_batches: 0\n").path == "num_batches"


def test_on_exhausted_is_one_of_three_words() -> None:
    expected = "expected one of error, stop, repeat; found "
    assert problem(MINIMAL.replace("repeat", "Repeat")).message == (
        expected + '"Repeat" (a string); did you mean "repeat"?'
    )
    assert problem(MINIMAL.replace("repeat", "wrap")).message == expected + '"wrap" (a string)'
    assert problem(MINIMAL.replace("repeat", "3")).message == expected + "3"
    assert problem(MINIMAL.replace("repeat", "[stop]")).message == expected + "a list"


def test_compression_is_one_of_five_words() -> None:
    assert top("compression: zst") == (
        'expected one of zstd, lz4, snappy, gzip, none; found "zst" (a string); '
        'did you mean "zstd"?'
    )


def test_the_compression_level_fits_the_compression() -> None:
    def message(compression: str, level: str) -> str:
        lines = f"compression: {compression}\ncompression_level: {level}\n"
        found = problem(HEAD + lines + WEB)
        assert (found.path, found.line) == ("compression_level", 5)
        return found.message

    assert message("zstd", "23") == "expected 1 to 22 for zstd, found 23"
    assert message("gzip", "10") == "expected 1 to 9 for gzip, found 10"
    assert message("zstd", "0") == "expected a whole number of at least 1, found 0"
    for compression in ("lz4", "snappy", "none"):
        assert message(compression, "1") == (
            f"{compression} has no levels, only zstd and gzip do; leave it out"
        )
    both = problems(HEAD + "compression: zip\ncompression_level: 30\n" + WEB)
    assert [found.path for found in both] == ["compression"]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("0", "0"),
        ("-5", "-5"),
        ("1.5", "1.5"),
        ("0.5B", '"0.5B" (a string)'),
        ("256 M", '"256 M" (a string)'),
        ("1 furlong", '"1 furlong" (a string)'),
        ("MiB", '"MiB" (a string)'),
        ("-1MiB", '"-1MiB" (a string)'),
        ("true", "true (a boolean)"),
        ("[1]", "a list"),
    ],
)
def test_shard_bytes_is_a_size(written: str, found: str) -> None:
    assert top(f"shard_bytes: {written}") == (
        "expected a whole number of bytes, at least 1, or a size such as 256MiB or 1GB; "
        f"found {found}"
    )


def test_shard_bytes_has_an_upper_bound() -> None:
    assert top("shard_bytes: 99999PB") == (
        f'expected at most {2**63 - 1} bytes, found "99999PB" (a string)'
    )


@pytest.mark.parametrize("batches", ["64", "nonsense"])
@pytest.mark.parametrize("size", ["1GB", "nonsense"])
def test_only_one_shard_size_can_be_given(batches: str, size: str) -> None:
    found = problems(HEAD + f"batches_per_shard: {batches}\nshard_bytes: {size}\n" + WEB)
    expected = Problem("shard_bytes", 5, "given beside batches_per_shard; give one of the two")
    assert found[-1] == expected


def test_num_batches_that_is_no_multiple_of_a_step_names_the_nearest() -> None:
    def message(num_batches: int) -> str:
        found = problem(HEAD + f"num_batches: {num_batches}\nbatches_per_step: 8\n" + WEB)
        assert (found.path, found.line) == ("batches_per_step", 5)
        return found.message

    assert message(100) == (
        "num_batches (100) is not a multiple of batches_per_step (8); "
        "the nearest multiples are 96 and 104"
    )
    assert message(7) == (
        "num_batches (7) is not a multiple of batches_per_step (8); the nearest multiple is 8"
    )


def test_a_step_never_straddles_shards() -> None:
    layout = "num_batches: 100\nbatches_per_shard: 12\nbatches_per_step: 8\n"
    assert [str(found) for found in problems(HEAD + layout + WEB)] == [
        "line 6, batches_per_step: num_batches (100) is not a multiple of batches_per_step (8); "
        "the nearest multiples are 96 and 104",
        "line 6, batches_per_step: batches_per_shard (12) is not a multiple of batches_per_step "
        "(8); the nearest multiples are 8 and 16",
    ]


def test_a_row_group_is_not_larger_than_a_shard() -> None:
    found = problem(HEAD + "batches_per_row_group: 65\nbatches_per_shard: 64\n" + WEB)
    assert found == Problem(
        "batches_per_row_group", 4, "expected at most batches_per_shard (64), found 65"
    )
    assert read(HEAD + "batches_per_row_group: 65\n" + WEB).batches_per_row_group == 65


def test_missing_keys_say_what_to_give() -> None:
    assert [str(found) for found in problems("on_exhausted: stop\n")] == [
        "line 1, output: missing; give the folder or URI to write the mix to",
        "line 1, batch_size: missing; give a number of items, such as 512",
        "line 1, datasets: missing; give a mapping of names to datasets, each with path and weight",
    ]
    assert [
        str(found) for found in problems(HEAD + "datasets:\n  a: {weight: 1}\n  b: {path: x}")
    ] == [
        "line 5, datasets.a.path: missing; give a file, folder or glob, or a list of them",
        "line 6, datasets.b.weight: missing; give the dataset's share, such as 3 or 0.5",
    ]


def test_unknown_keys_suggest_the_nearest() -> None:
    assert top("num-batches: 3") == 'unknown key; did you mean "num_batches"?'
    assert top("Compresion: none") == 'unknown key; did you mean "compression"?'
    assert of_dataset("wieght: 3") == 'unknown key; did you mean "weight"?'
    assert of_dataset("xyz:") == (
        "unknown key; the keys here are "
        "path, weight, rows, columns, schema, max_line_bytes, on_bad_line"
    )
    assert top("base: elsewhere").startswith("unknown key; the keys here are output, batch_size, ")
    assert top("3: a").startswith("unknown key; ")


def test_datasets_is_a_mapping_with_at_least_one() -> None:
    expected = "expected a mapping of dataset names to datasets, at least one; found "
    for written, found in [("", "null"), ("{}", "an empty mapping"), ("[a]", "a list"), ("3", "3")]:
        assert problem(HEAD + f"datasets: {written}\n") == Problem("datasets", 4, expected + found)


# Datasets


def test_a_dataset_is_a_mapping() -> None:
    for written, found in [("web/*.parquet", '"web/*.parquet" (a string)'), ("", "null")]:
        assert problem(HEAD + f"datasets:\n  web: {written}\n") == Problem(
            "datasets.web",
            5,
            "expected a mapping with keys among path, weight, rows, columns, schema, "
            f"max_line_bytes, on_bad_line; found {found}",
        )


def test_paths_are_strings_listed_once() -> None:
    expected = "expected a path or a list of paths, found "
    assert of_path("") == expected + "null"
    assert of_path("2024") == expected + "2024; write it in quotes"
    assert of_path("{a: b}") == expected + "a mapping"
    assert of_path("[]") == "expected at least one path, found an empty list"
    assert of_path('""') == 'expected a string that is not empty, found "" (a string)'
    assert of_path("[a, b, a]") == '"a" is listed twice; list it once'
    assert of_path("[a, 3]", "datasets.web.path[1]") == (
        "expected a string, found 3; write it in quotes"
    )
    assert of_path("[a, [b]]", "datasets.web.path[1]") == "expected a string, found a list"


def test_every_path_that_is_listed_twice_is_named() -> None:
    text = HEAD + "datasets: {web: {weight: 3, path: [a, b, a, b, c]}}"
    assert [found.message for found in problems(text)] == [
        '"a" is listed twice; list it once',
        '"b" is listed twice; list it once',
    ]


def test_an_item_of_a_list_has_its_own_line() -> None:
    text = HEAD + "datasets:\n  web:\n    weight: 3\n    path:\n    - a\n    - 7\n"
    assert (problem(text).path, problem(text).line) == ("datasets.web.path[1]", 9)


def test_rows_are_start_and_stop() -> None:
    expected = "expected [start, stop], each a row number counted from 0 or null; found "
    assert of_dataset("rows: 5") == expected + "5"
    assert of_dataset("rows: [5]") == expected + "a list of 1"
    assert of_dataset("rows: [1, 2, 3]") == expected + "a list of 3"
    assert of_dataset("rows: {start: 3}") == expected + "a mapping"
    assert of_dataset("rows: [5, 5]") == "expected start to be less than stop, found [5, 5]"
    assert of_dataset("rows: [null, 0]") == "expected start to be less than stop, found [0, 0]"
    assert of_dataset("rows: [-1, 5]") == ("start: expected a whole number of at least 0, found -1")
    assert of_dataset("rows: [0, 1.5]") == (
        "stop: expected a whole number of at least 0, found 1.5"
    )
    both = problems(HEAD + "datasets: {web: {path: x, weight: 3, rows: [a, true]}}")
    assert [found.message for found in both] == [
        'start: expected a whole number of at least 0, found "a" (a string)',
        "stop: expected a whole number of at least 0, found true (a boolean)",
    ]


def test_columns_map_our_names_to_the_sources() -> None:
    expected = "expected a mapping of our column names to the source's, at least one; found "
    assert of_dataset("columns: {}") == expected + "an empty mapping"
    assert of_dataset("columns: [text]") == expected + "a list"
    assert of_dataset("columns: {text: 3}", "columns.text") == (
        "expected a string, found 3; write it in quotes"
    )
    assert of_dataset("columns: {text: ''}", "columns.text") == (
        'expected a string that is not empty, found "" (a string)'
    )
    assert of_dataset("columns: {'': text}", 'columns.""') == (
        'expected a string that is not empty, found "" (a string)'
    )
    assert of_dataset("columns: {2024: text}", "columns.2024") == (
        'expected a string as key, found 2024; write it in quotes: "2024"'
    )


def test_a_type_is_written_as_arrow_prints_it() -> None:
    expected = "expected a mapping of the source's column names to types, at least one; found "
    assert of_dataset("schema: {}") == expected + "an empty mapping"
    assert of_dataset("schema: int8") == expected + '"int8" (a string)'
    said = of_dataset("schema: {x: strin}", "schema.x")
    assert said.startswith("expected a type such as int32, ")
    assert said.endswith("found 'strin'")
    quotes = "; a type with a comma or a colon in it is written in quotes"
    cut = problems(HEAD + "datasets: {web: {path: x, weight: 3, schema: {x: decimal128(9, 2)}}}")
    assert (cut[0].path, cut[0].message) == (
        "datasets.web.schema.x",
        f"expected (precision, scale) after 'decimal128', found '(9'{quotes}",
    )
    assert of_dataset("schema: {x: {a: int8}}", "schema.x") == (
        f"expected a type, found a mapping{quotes}"
    )
    assert of_dataset("schema: {x: 3}", "schema.x") == (
        "expected a string, found 3; write it in quotes"
    )
    assert of_dataset("schema: {3: int8}", "schema.3") == (
        'expected a string as key, found 3; write it in quotes: "3"'
    )


def test_what_is_said_of_lines_is_a_size_and_one_of_two_words() -> None:
    assert of_dataset("max_line_bytes: 1023") == "expected 1KiB to 1GiB, found 1023"
    assert of_dataset("max_line_bytes: 2GiB") == 'expected 1KiB to 1GiB, found "2GiB" (a string)'
    assert of_dataset("max_line_bytes: much").startswith("expected a whole number of bytes")
    assert of_dataset("on_bad_line: skipp") == (
        'expected one of error, skip; found "skipp" (a string); did you mean "skip"?'
    )


def test_missing_columns_is_one_of_three_words() -> None:
    assert top("missing_columns: nul") == (
        'expected one of error, null, drop; found "nul" (a string); did you mean "null"?'
    )
    assert top("missing_columns: 0") == "expected one of error, null, drop; found 0"


@pytest.mark.parametrize("name", ["mix_batch", "mix_dataset", "mix_row", "mix_epoch"])
def test_provenance_columns_are_reserved(name: str) -> None:
    assert of_dataset(f"columns: {{{name}: text}}", f"columns.{name}") == (
        "reserved for provenance (mix_batch, mix_dataset, mix_row, mix_epoch); choose another name"
    )


@pytest.mark.parametrize(
    ("written", "path", "message"),
    [
        ('""', '""', 'expected a string that is not empty, found "" (a string)'),
        (r'"a\tb"', r'"a\tb"', "a dataset name cannot hold control characters"),
        (r'"a\x85b"', r'"a\u0085b"', "a dataset name cannot hold control characters"),
        ("2024", "2024", 'expected a string as key, found 2024; write it in quotes: "2024"'),
        ("1.5", '"1.5"', 'expected a string as key, found 1.5; write it in quotes: "1.5"'),
        (
            "true",
            "true",
            'expected a string as key, found true (a boolean); write it in quotes: "true"',
        ),
        ("~", "null", "expected a string as key, found null"),
    ],
)
def test_a_dataset_name_that_is_no_text_is_refused(written: str, path: str, message: str) -> None:
    found = problem(HEAD + f"datasets:\n  {written}: {{path: x, weight: 1}}\n")
    assert found == Problem(f"datasets.{path}", 5, message)


def test_a_dataset_name_has_at_most_200_characters() -> None:
    found = problem(HEAD + f"datasets:\n  {'x' * 201}: {{path: x, weight: 1}}\n")
    assert found.message == "expected a dataset name of at most 200 characters, found 201"
    assert found.path == f'datasets."{"x" * 60}…"'


# Mixtures


def problems_of(base: str, changes: Mapping[str, str | None]) -> list[str]:
    """Of a valid file in which some top-level lines are replaced, added (above datasets) or left
    out; each as its error text tells it."""
    head, datasets = base.split("datasets:")
    kept = [line for line in head.splitlines() if line.split(":")[0] not in changes]
    new = [f"{key}: {value}" for key, value in changes.items() if value is not None]
    return [str(found) for found in problems("\n".join([*kept, *new, "datasets:"]) + datasets)]


def test_a_mixture_is_weighted_unless_the_file_says_another() -> None:
    assert type(read(MINIMAL)) is WeightedConfig
    assert read(MINIMAL) == read("mixture: weighted\n" + MINIMAL) == read("mixture:\n" + MINIMAL)
    assert type(read(FRAME_BUDGET)) is FrameBudgetConfig
    assert type(read(RESERVOIR)) is ReservoirConfig
    for text in (MINIMAL, FRAME_BUDGET, RESERVOIR):
        assert isinstance(read(text), Config)


def test_a_frame_budget_mixture_has_its_defaults() -> None:
    config = read(FRAME_BUDGET)
    assert isinstance(config, FrameBudgetConfig)
    assert config.mixture == "frame_budget"
    assert (config.frame_budget, config.pool_size, config.max_items) == (16000, 4096, None)
    assert (config.seed, config.stream) == (0, 0)
    assert (config.length_column, config.length_of) == ("frames", None)
    assert config.on_too_long == "error"
    assert (config.epochs, config.num_batches) == (1, None)
    assert config.datasets == {"web": UnweightedDatasetConfig(path=("data/web/*.parquet",))}


def test_a_frame_budget_mixture_takes_all_of_its_keys() -> None:
    text = FRAME_BUDGET.replace("length_column: frames", "length_of: text\nnum_batches: 100") + (
        "max_items: 64\nseed: 7\nstream: 3\non_too_long: drop\nbatches_per_shard: 20\n"
        "batches_per_step: 4\nbatches_per_row_group: 2\ncompression: lz4\n"
    )
    assert read(text).resolved() == {
        "output": "out/",
        "mixture": "frame_budget",
        "frame_budget": 16000,
        "pool_size": 4096,
        "max_items": 64,
        "seed": 7,
        "stream": 3,
        "length_column": None,
        "length_of": "text",
        "on_too_long": "drop",
        "epochs": None,
        "num_batches": 100,
        "batches_per_shard": 20,
        "shard_bytes": None,
        "batches_per_step": 4,
        "batches_per_row_group": 2,
        "compression": "lz4",
        "compression_level": None,
        "missing_columns": "error",
        "datasets": {"web": RESOLVED_WEB},
    }


def test_a_reservoir_mixture_resolves_with_its_defaults() -> None:
    assert read(RESERVOIR).resolved() == {
        "output": "out/",
        "mixture": "reservoir",
        "batch_size": 512,
        "max_simultaneous": 4,
        "seed": 0,
        "passes": 2,
        "num_batches": None,
        "batches_per_shard": None,
        "shard_bytes": DEFAULT_SHARD_BYTES,
        "batches_per_step": None,
        "batches_per_row_group": None,
        "compression": "zstd",
        "compression_level": 1,
        "missing_columns": "error",
        "datasets": {"web": RESOLVED_WEB},
    }
    endless = read(RESERVOIR.replace("passes: 2", "num_batches: 9"))
    assert isinstance(endless, ReservoirConfig)
    assert (endless.passes, endless.num_batches) == (None, 9)


@pytest.mark.parametrize("text", [FRAME_BUDGET, RESERVOIR])
def test_every_mixture_keeps_base_and_pickles(text: str) -> None:
    config = parse_config(text, "somewhere")
    assert config.base == Path("somewhere")
    assert pickle.loads(pickle.dumps(config)) == config != read(text)


def test_a_mapping_may_hold_datasets_without_weights() -> None:
    mapping = {
        "output": "out/",
        "mixture": "reservoir",
        "batch_size": 512,
        "max_simultaneous": 4,
        "passes": 2,
        "datasets": {"web": UnweightedDatasetConfig(path=("data/web/*.parquet",))},
    }
    assert config_from_dict(mapping, ".") == read(RESERVOIR)


EXPECTED_MIXTURE = "expected one of weighted, frame_budget, reservoir; found "


def test_a_misspelt_mixture_is_one_problem_and_its_keys_are_none() -> None:
    for text in (FRAME_BUDGET, RESERVOIR, "output: o\nmixture: x\nseed: 1\n" + WEB):
        line = text.splitlines()[1]
        assert problem(text.replace(line, "mixture: frame_budgt")) == Problem(
            "mixture",
            2,
            EXPECTED_MIXTURE + '"frame_budgt" (a string); did you mean "frame_budget"?',
        )


@pytest.mark.parametrize(("written", "found"), [("3", "3"), ("[reservoir]", "a list")])
def test_a_mixture_is_a_word(written: str, found: str) -> None:
    assert top(f"mixture: {written}") == EXPECTED_MIXTURE + found


def test_what_is_wrong_in_every_mixture_is_told_beside_a_misspelt_one() -> None:
    text = RESERVOIR.replace("reservoir", "pool").replace("output: out/", "compresion: lz4")
    text = text.replace("path: data/web/*.parquet", "paths: x, weight: 0, rows: 5")
    assert [str(found) for found in problems(text)] == [
        "line 1, output: missing; give the folder or URI to write the mix to",
        'line 1, compresion: unknown key; did you mean "compression"?',
        f'line 2, mixture: {EXPECTED_MIXTURE}"pool" (a string)',
        "line 7, datasets.web.path: missing; give a file, folder or glob, or a list of them",
        "line 7, datasets.web.rows: expected [start, stop], each a row number counted from 0 or "
        "null; found 5",
        'line 7, datasets.web.paths: unknown key; did you mean "path"?',
    ]


@pytest.mark.parametrize(
    ("base", "key", "owners", "mixture"),
    [
        (MINIMAL, "frame_budget", "frame_budget", "weighted"),
        (MINIMAL, "pool_size", "frame_budget", "weighted"),
        (MINIMAL, "max_items", "frame_budget", "weighted"),
        (MINIMAL, "stream", "frame_budget", "weighted"),
        (MINIMAL, "length_column", "frame_budget", "weighted"),
        (MINIMAL, "length_of", "frame_budget", "weighted"),
        (MINIMAL, "on_too_long", "frame_budget", "weighted"),
        (MINIMAL, "epochs", "frame_budget", "weighted"),
        (MINIMAL, "max_simultaneous", "reservoir", "weighted"),
        (MINIMAL, "passes", "reservoir", "weighted"),
        (MINIMAL, "seed", "frame_budget or reservoir", "weighted"),
        (FRAME_BUDGET, "batch_size", "weighted or reservoir", "frame_budget"),
        (FRAME_BUDGET, "on_exhausted", "weighted", "frame_budget"),
        (FRAME_BUDGET, "passes", "reservoir", "frame_budget"),
        (RESERVOIR, "on_exhausted", "weighted", "reservoir"),
        (RESERVOIR, "pool_size", "frame_budget", "reservoir"),
        (RESERVOIR, "epochs", "frame_budget", "reservoir"),
    ],
)
def test_a_key_of_another_mixture_says_to_which_it_belongs(
    base: str, key: str, owners: str, mixture: str
) -> None:
    (found,) = problems_of(base, {key: "1"})
    assert found.endswith(f", {key}: {key} belongs to mixture: {owners}; this one is {mixture}")


def test_a_key_of_no_mixture_is_unknown_in_each() -> None:
    assert problem(FRAME_BUDGET + "pol_size: 3\n").message == (
        'unknown key; did you mean "pool_size"?'
    )
    assert problem(RESERVOIR + "xyz: 3\n").message.startswith(
        "unknown key; the keys here are output, batch_size, max_simultaneous, datasets, mixture, "
    )
    for key in ("wieght", "pool_size"):
        assert problem(RESERVOIR.replace("path:", f"{key}: 3, path:")).message == (
            "unknown key; the keys here are "
            "path, rows, columns, schema, max_line_bytes, on_bad_line"
        )


@pytest.mark.parametrize(
    ("text", "mixture", "why"),
    [
        (FRAME_BUDGET, "frame_budget", "an epoch holds every item once"),
        (RESERVOIR, "reservoir", "every open source is as likely as the next"),
    ],
)
@pytest.mark.parametrize("weight", ["3", "0", "null"])
def test_a_weight_has_no_place_beside_weighted(
    text: str, mixture: str, why: str, weight: str
) -> None:
    assert problem(text.replace("web: {", f"web: {{weight: {weight}, ")) == Problem(
        "datasets.web.weight",
        7,
        f"weight has no place in a {mixture} mixture: {why}; leave it out",
    )


def test_what_a_mixture_needs_is_told_where_it_is_missing() -> None:
    assert [str(found) for found in problems("mixture: frame_budget\n")] == [
        "line 1, output: missing; give the folder or URI to write the mix to",
        "line 1, frame_budget: missing; give the most a batch may take, its items times its "
        "longest length, such as 16000",
        "line 1, pool_size: missing; give how many items are sorted by length together, such as "
        "4096",
        "line 1, length_of: missing; give length_column, a column that holds the length of each "
        "item, or length_of, a column of lists or texts whose length is taken",
        "line 1, datasets: missing; give a mapping of names to datasets, each with path",
    ]
    assert [str(found) for found in problems("mixture: reservoir\n")] == [
        "line 1, output: missing; give the folder or URI to write the mix to",
        "line 1, batch_size: missing; give a number of items, such as 512",
        "line 1, max_simultaneous: missing; give how many sources are open at once, such as 16",
        "line 1, passes: missing; give passes, how often every source is read, or num_batches, "
        "how long the mix is",
        "line 1, datasets: missing; give a mapping of names to datasets, each with path",
    ]


@pytest.mark.parametrize(
    ("base", "first", "second", "values"),
    [
        (FRAME_BUDGET, "length_column", "length_of", ("frames", "text")),
        (FRAME_BUDGET, "num_batches", "epochs", ("8", "1")),
        (RESERVOIR, "num_batches", "passes", ("8", "1")),
    ],
)
def test_only_one_of_two_keys_that_say_the_same_can_be_given(
    base: str, first: str, second: str, values: tuple[str, str]
) -> None:
    (found,) = problems_of(base, {first: values[0], second: values[1]})
    assert found.endswith(f", {second}: given beside {first}; give one of the two")
    not_valid = problems_of(base, {first: "[]", second: "[]"})
    assert not_valid[1].endswith(f", {second}: given beside {first}; give one of the two")
    assert len(not_valid) == 2


@pytest.mark.parametrize(
    ("base", "first", "second"),
    [
        (FRAME_BUDGET, "length_column", "length_of"),
        (FRAME_BUDGET, "num_batches", "epochs"),
        (RESERVOIR, "num_batches", "passes"),
    ],
)
def test_a_key_that_is_not_valid_is_not_called_missing_too(
    base: str, first: str, second: str
) -> None:
    (found,) = problems_of(base, {first: "[]", second: None})
    assert f", {first}: expected " in found
    (found,) = problems_of(base, {first: None, second: "[]"})
    assert f", {second}: expected " in found


@pytest.mark.parametrize(
    ("base", "key", "least"),
    [
        (FRAME_BUDGET, "frame_budget", 1),
        (FRAME_BUDGET, "pool_size", 1),
        (FRAME_BUDGET, "max_items", 1),
        (FRAME_BUDGET, "seed", 0),
        (FRAME_BUDGET, "stream", 0),
        (FRAME_BUDGET, "epochs", 1),
        (RESERVOIR, "batch_size", 1),
        (RESERVOIR, "max_simultaneous", 1),
        (RESERVOIR, "seed", 0),
        (RESERVOIR, "passes", 1),
    ],
)
def test_numbers_of_a_mixture_are_whole_and_have_a_least(base: str, key: str, least: int) -> None:
    for written, found in [
        (str(least - 1), str(least - 1)),
        ("1.0", "1.0"),
        ("a", '"a" (a string)'),
    ]:
        (told,) = problems_of(base, {key: written})
        assert told.endswith(f", {key}: expected a whole number of at least {least}, found {found}")
    head, datasets = base.split("datasets:")
    lines = [line for line in head.splitlines() if not line.startswith(f"{key}:")]
    accepted = read("\n".join([*lines, f"{key}: {least}", "datasets:"]) + datasets)
    assert accepted.resolved()[key] == least


@pytest.mark.parametrize(("base", "key"), [(FRAME_BUDGET, "epochs"), (RESERVOIR, "passes")])
def test_epochs_can_be_counted_in_32_bits(base: str, key: str) -> None:
    (found,) = problems_of(base, {key: str(2**31)})
    assert found.endswith(
        f", {key}: expected a whole number of at most 2147483647, found 2147483648"
    )


@pytest.mark.parametrize("key", ["length_column", "length_of"])
def test_a_length_column_is_a_name(key: str) -> None:
    (found,) = problems_of(FRAME_BUDGET, {"length_column": None, key: "3"})
    assert found.endswith(f", {key}: expected a string, found 3; write it in quotes")


def test_on_too_long_is_one_of_two_words() -> None:
    assert problem(FRAME_BUDGET + "on_too_long: dorp\n").message == (
        'expected one of error, drop; found "dorp" (a string); did you mean "drop"?'
    )


@pytest.mark.parametrize("text", [FRAME_BUDGET, RESERVOIR.replace("passes: 2\n", "")])
def test_a_step_divides_what_is_given_in_batches_in_every_mixture(text: str) -> None:
    layout = "num_batches: 100\nbatches_per_shard: 12\nbatches_per_step: 8\n"
    assert [found.message for found in problems(text + layout)] == [
        "num_batches (100) is not a multiple of batches_per_step (8); "
        "the nearest multiples are 96 and 104",
        "batches_per_shard (12) is not a multiple of batches_per_step (8); "
        "the nearest multiples are 8 and 16",
    ]


def test_all_problems_of_a_mixture_are_listed_at_once() -> None:
    text = """\
output: out/
mixture: frame_budget
batch_size: 512
frame_budget: 0
on_exhausted: repeat
length_column: frames
length_of: text
epochs: 2
num_batches: 10
compression: lz4
compression_level: 3
datasets:
  web: {path: web, weight: 3}
  code: {columns: {mix_row: text}}
"""
    assert [str(found) for found in problems(text)] == [
        "line 1, pool_size: missing; give how many items are sorted by length together, such as "
        "4096",
        "line 3, batch_size: batch_size belongs to mixture: weighted or reservoir; this one is "
        "frame_budget",
        "line 4, frame_budget: expected a whole number of at least 1, found 0",
        "line 5, on_exhausted: on_exhausted belongs to mixture: weighted; this one is frame_budget",
        "line 7, length_of: given beside length_column; give one of the two",
        "line 8, epochs: given beside num_batches; give one of the two",
        "line 11, compression_level: lz4 has no levels, only zstd and gzip do; leave it out",
        "line 13, datasets.web.weight: weight has no place in a frame_budget mixture: an epoch "
        "holds every item once; leave it out",
        "line 14, datasets.code.path: missing; give a file, folder or glob, or a list of them",
        "line 14, datasets.code.columns.mix_row: reserved for provenance (mix_batch, mix_dataset, "
        "mix_row, mix_epoch); choose another name",
    ]


# All problems at once


def test_all_problems_are_listed_at_once_with_their_lines() -> None:
    text = """\
output: out/
batch_size: "512"
num_batches: 100
batches_per_step: 8
datasets:
  web:
    path: [data/web, data/web]
    wieght: 3
  2024: {path: x, weight: 0, rows: [9, 3]}
  code:
    weight: -.inf
    columns: {mix_row: text, body: 3}
shard_size: 3
batches_per_shard: 4
shard_bytes: 1GB
compression: lz4
compression_level: 3
"""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, ".", "mix.yaml")
    assert str(caught.value) == (
        """\
mix.yaml: 14 problems
  line 2, batch_size: expected a whole number of at least 1, found "512" (a string)
  line 4, batches_per_step: num_batches (100) is not a multiple of batches_per_step (8); \
the nearest multiples are 96 and 104
  line 4, batches_per_step: batches_per_shard (4) is not a multiple of batches_per_step (8); \
the nearest multiple is 8
  line 6, datasets.web.weight: missing; give the dataset's share, such as 3 or 0.5
  line 7, datasets.web.path: "data/web" is listed twice; list it once
  line 8, datasets.web.wieght: unknown key; did you mean "weight"?
  line 9, datasets.2024: expected a string as key, found 2024; write it in quotes: "2024"
  line 9, datasets.2024.rows: expected start to be less than stop, found [9, 3]
  line 9, datasets.2024.weight: expected a whole number of at least 1 or a positive decimal \
such as 0.5, found 0
  line 10, datasets.code.path: missing; give a file, folder or glob, or a list of them
  line 11, datasets.code.weight: expected a whole number of at least 1 or a positive decimal \
such as 0.5, found -Infinity
  line 12, datasets.code.columns.mix_row: reserved for provenance (mix_batch, mix_dataset, \
mix_row, mix_epoch); choose another name
  line 12, datasets.code.columns.body: expected a string, found 3; write it in quotes
  line 13, shard_size: unknown key; did you mean "shard_bytes"?
  line 15, shard_bytes: given beside batches_per_shard; give one of the two
  line 17, compression_level: lz4 has no levels, only zstd and gzip do; leave it out"""
    ).replace("14 problems", "16 problems")


def test_problems_of_a_mapping_have_no_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"batch_size": 0, "on_exhausted": "stop", "datasets": {"a": {}}}, ".")
    assert str(caught.value) == (
        """\
<config>: 4 problems
  output: missing; give the folder or URI to write the mix to
  batch_size: expected a whole number of at least 1, found 0
  datasets.a.path: missing; give a file, folder or glob, or a list of them
  datasets.a.weight: missing; give the dataset's share, such as 3 or 0.5"""
    )


def test_what_is_no_mapping_is_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match="expected a mapping with keys among output, batch_size"):
        config_from_dict([1], ".")  # type: ignore[arg-type]


def test_a_single_problem_is_not_said_in_the_plural() -> None:
    with pytest.raises(ConfigError, match=r"^<config>: 1 problem\n  line 2, batch_size: "):
        read(MINIMAL.replace("512", "0"))


def test_a_config_error_is_a_value_error_that_pickles() -> None:
    error = ConfigError([Problem("a.b", 3, "no"), Problem("", None, "never")], "mix.yaml")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError)
    assert again.problems == error.problems
    assert str(again) == "mix.yaml: 2 problems\n  line 3, a.b: no\n  never"


# YAML


def test_a_yaml_1_1_reader_would_turn_these_names_into_other_things() -> None:
    names = ["no", "on", "off", "yes", "y", "n", "Yes", "2024-01-01", "1:30", "1_000", "0b1", "="]
    lines = "".join(f"  {name}: {{path: {name}, weight: 1}}\n" for name in names)
    config = read(HEAD + "datasets:\n" + lines)
    assert list(config.datasets) == names
    assert [dataset.path[0] for dataset in config.datasets.values()] == names


def test_leading_zeros_are_decimal_as_in_yaml_1_2() -> None:
    assert read(MINIMAL.replace("512", "0512")).batch_size == 512


def test_quotes_make_a_string_of_anything() -> None:
    config = read(HEAD + "datasets: {'true': {path: \"null\", weight: 1}}")
    assert config.datasets["true"].path == ("null",)


def test_a_yaml_1_2_directive_and_document_marks_are_accepted() -> None:
    assert read(f"%YAML 1.2\n---\n{MINIMAL}...\n") == read(MINIMAL)


def test_a_yaml_1_1_directive_is_refused() -> None:
    assert problem(f"%YAML 1.1\n---\n{MINIMAL}").message == (
        "expected YAML 1.2; remove the %YAML line"
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_refused(text: str) -> None:
    assert problem(text).message == (
        "the file is empty; expected the keys output, batch_size, datasets"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- a\n- b\n", "a list"),
        ("just text\n", '"just text" (a string)'),
        ("# first\n\n3\n", "3"),
    ],
)
def test_a_document_that_is_no_mapping_is_refused(text: str, found: str) -> None:
    assert problem(text).message == f"expected a mapping of keys to values, found {found}"


def test_a_null_that_is_wrong_itself_is_not_called_an_empty_file() -> None:
    assert [found.message for found in problems("!!null null\n")] == [
        'tags such as "!!null" are not allowed; write a plain value',
        "expected a mapping of keys to values, found null",
    ]


def test_several_documents_are_refused() -> None:
    found = problem(f"{MINIMAL}---\n{MINIMAL}")
    assert found == Problem("", 6, 'expected one YAML document, found another after "---"')


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    text = HEAD + "batch_size: 3\ndatasets:\n  a: {path: x, weight: 1}\n  b: {path: x, weight: 1}\n"
    text += "  a:\n    path: y\n    weight: 1\n    weight: 2\n"
    assert [str(found) for found in problems(text)] == [
        "line 4, batch_size: given twice, first on line 2 and again on line 4",
        "line 8, datasets.a: given twice, first on line 6 and again on line 8",
        "line 11, datasets.a.weight: given twice, first on line 10 and again on line 11",
    ]


def test_a_duplicate_key_does_not_hide_what_else_is_wrong() -> None:
    assert [found.path for found in problems("batch_size: 0\n" + MINIMAL)] == [
        "batch_size",
        "batch_size",
    ]


@pytest.mark.parametrize(
    "tagged",
    ["!!python/object/apply:os.system [ls]", "!!python/name:os.system x", "!!python/tuple [1]"],
)
def test_python_tags_are_refused(tagged: str) -> None:
    text = HEAD + f"datasets:\n  web:\n    path: x\n    weight: {tagged}\n"
    assert [(found.path, found.line) for found in problems(text)] == [("datasets.web.weight", 7)]
    assert problems(text)[0].message == (
        f'tags such as "{tagged.split()[0]}" are not allowed; write a plain value'
    )


@pytest.mark.parametrize("tagged", ["!!str a", "! a", "!mine {a: b}", "!<tag:x,1:y> a"])
def test_other_tags_are_refused_too(tagged: str) -> None:
    assert "are not allowed; write a plain value" in of_path(tagged)


def test_anchors_and_aliases_are_accepted() -> None:
    text = HEAD + "datasets:\n  a: &a {path: &p x, weight: 1, columns: &c {text: body}}\n"
    text += "  b: {path: *p, weight: 2, columns: *c}\n  c: *a\n"
    datasets = read(text).datasets
    assert datasets["b"] == DatasetConfig(path=("x",), weight=2, columns={"text": "body"})
    assert datasets["c"] == datasets["a"]


def test_an_alias_may_be_a_key() -> None:
    text = HEAD + "datasets: {a: {path: &x y, weight: 1}, *x : {path: z, weight: 1}}"
    assert list(read(text).datasets) == ["a", "y"]


def test_a_problem_behind_an_alias_has_the_line_it_was_written_on() -> None:
    text = HEAD + "datasets:\n  a: &a\n    path: x\n    weight: 0\n  b: *a\n"
    assert [(found.path, found.line) for found in problems(text)] == [
        ("datasets.a.weight", 7),
        ("datasets.b.weight", 7),
    ]


def test_an_alias_that_stands_for_nothing_may_be_a_glob_without_quotes() -> None:
    assert of_path("*.parquet") == (
        '"*.parquet" stands for nothing; write a text that begins with * in quotes'
    )


def test_an_alias_of_what_holds_it_is_refused() -> None:
    assert of_path("&a [x, *a]", "datasets.web.path[1]") == (
        '"*a" stands for a value that holds it'
    )


def test_merge_keys_are_refused() -> None:
    text = HEAD + "datasets:\n  a: &a {path: x, weight: 1}\n  b:\n    <<: *a\n    weight: 2\n"
    assert [str(found) for found in problems(text)] == [
        "line 6, datasets.b.path: missing; give a file, folder or glob, or a list of them",
        'line 7, datasets.b: merge keys ("<<") are not YAML 1.2; write the keys out',
    ]


def test_an_alias_bomb_does_not_hang() -> None:
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 100))
    began = time.process_time()
    found = problems(f"l0: &l0 [x, x]\n{levels}{MINIMAL}")
    assert found[-1].message == "aliases stand for more than 1000000 values"
    assert time.process_time() - began < 2


def test_an_alias_bomb_within_the_schema_does_not_hang() -> None:
    columns = ", ".join(f"c{i}: x" for i in range(1500))
    datasets = "".join(f"  d{i}: {{path: x, weight: 1, columns: *c}}\n" for i in range(1500))
    text = HEAD + f"datasets:\n  d: {{path: x, weight: 1, columns: &c {{{columns}}}}}\n{datasets}"
    assert problem(text).message == "aliases stand for more than 1000000 values"


def test_deep_nesting_is_refused() -> None:
    assert problem("a: " + "[" * 100_000).message == "nested more than 10 deep"
    assert problem("a: " + "{a: " * 5000).message == "nested more than 10 deep"


def test_a_key_that_is_no_scalar_is_refused() -> None:
    assert problem(HEAD + "datasets: {{ jinja }}\n") == Problem(
        "datasets", 4, "expected a string as key, found a mapping"
    )
    assert problem("? [a]\n: b\n").message == "expected a string as key, found a list"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: b: c\n", 1, "not valid YAML: mapping values are not allowed here"),
        (
            "output: o\nbatch_size: 3\n\tdatasets: x\n",
            3,
            "not valid YAML: found character '\\t' that cannot start any token "
            "while scanning for the next token; indent with spaces",
        ),
        (
            "a: 'x\n\nb: 1\n",
            4,
            "not valid YAML: found unexpected end of stream while scanning a quoted scalar "
            "that begins on line 1",
        ),
        ("a: 1\nb: \x01\n", 2, "not valid YAML: character U+0001 is not allowed"),
        (
            'a: "\\UFFFFFFFF"\n',
            None,
            "not valid YAML: an escape sequence or directive that cannot be read",
        ),
    ],
)
def test_a_text_that_is_no_yaml_is_refused_with_its_line(
    text: str, line: int | None, message: str
) -> None:
    assert problem(text) == Problem("", line, message)


def test_a_glob_that_yaml_cannot_read_gets_a_hint() -> None:
    text = HEAD + "datasets: {web: {weight: 3, path: *}}"
    assert problem(text).message.endswith("; write a text that begins with * in quotes")


def test_problems_found_before_the_text_ends_being_yaml_are_listed_too() -> None:
    found = problems("output: a\noutput: b\ndatasets: [\n")
    assert [item.path for item in found] == ["output", ""]


# Files


def test_base_is_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mix.yaml").write_text(MINIMAL)
    assert load_config(tmp_path / "mix.yaml").base == tmp_path
    assert load_config(str(tmp_path / "mix.yaml")).datasets["web"].path == ("data/web/*.parquet",)
    monkeypatch.chdir(tmp_path)
    assert load_config("mix.yaml").base == tmp_path
    assert parse_config(MINIMAL, "somewhere").base == Path("somewhere")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_config(tmp_path / "mix.yaml").batch_size == 512


def write_latin_1(folder: Path) -> Path:
    (folder / "mix.yaml").write_bytes("output: données\n".encode("latin-1"))
    return folder / "mix.yaml"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.yaml", "no such file"),
        (lambda folder: folder, "this is a folder; give the YAML file in it"),
        (lambda folder: folder / "a\0b", "no file can have this name"),
        (
            write_latin_1,
            "expected UTF-8 text, found byte 0xe9 at offset 12; save the file as UTF-8",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems == [Problem("", None, message)]
    assert str(caught.value) == f"{path}: 1 problem\n  {message}"


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"mix\.yaml: 1 problem"):
        load_config(tmp_path / "mix.yaml")


# Resolved


def test_resolved_fills_in_every_default() -> None:
    assert read(MINIMAL).resolved() == {
        "output": "out/",
        "mixture": "weighted",
        "batch_size": 512,
        "num_batches": None,
        "on_exhausted": "repeat",
        "batches_per_shard": None,
        "shard_bytes": DEFAULT_SHARD_BYTES,
        "batches_per_step": None,
        "batches_per_row_group": None,
        "missing_columns": "error",
        "compression": "zstd",
        "compression_level": 1,
        "datasets": {
            "web": {**RESOLVED_WEB, "weight": 3},
        },
    }
    assert read(DESIGN).resolved()["shard_bytes"] is None


def test_resolved_is_the_same_wherever_the_file_lies_and_keeps_order() -> None:
    here, there = parse_config(DESIGN, "/a/b").resolved(), parse_config(DESIGN, "/c").resolved()
    assert json.dumps(here) == json.dumps(there)
    assert list(here["datasets"]) == ["web", "code", "books"]
    assert "/a/b" not in json.dumps(here)


def test_resolved_writes_integers_past_53_bits_as_strings() -> None:
    text = HEAD + f"num_batches: {2**60}\ndatasets:\n"
    text += f"  a: {{path: x, weight: {2**53}}}\n  b: {{path: x, weight: {2**53 - 1}}}\n"
    resolved = read(text).resolved()
    assert resolved["num_batches"] == str(2**60)
    assert resolved["datasets"]["a"]["weight"] == str(2**53)
    assert resolved["datasets"]["b"]["weight"] == 2**53 - 1


# Size and chance


def test_five_thousand_datasets_validate_quickly() -> None:
    lines = "".join(f"  d{i:04}: {{path: d/{i}/*.parquet, weight: {i}.5}}\n" for i in range(5000))
    config = read(HEAD + "datasets:\n" + lines)
    assert config.weights[-1] == 49995
    assert len(config.resolved()["datasets"]) == 5000
    mapping = {name: d.model_dump(by_alias=True) for name, d in config.datasets.items()}
    began = time.process_time()
    again = config_from_dict(as_dict(datasets=mapping), ".")
    assert time.process_time() - began < 1
    assert again == config


def test_five_thousand_datasets_with_problems_are_all_listed() -> None:
    mapping = {f"d{i}": {"path": "", "wieght": 3} for i in range(5000)}
    with pytest.raises(ConfigError) as caught:
        config_from_dict(as_dict(datasets=mapping), ".")
    assert len(caught.value.problems) == 15000


KEYS = [
    *WeightedConfig.model_fields,
    *FrameBudgetConfig.model_fields,
    *ReservoirConfig.model_fields,
    *DatasetConfig.model_fields,
    "web",
    "text",
    "mix_row",
    "[key]",
    "wieght",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-1, 9),
    st.floats(),
    st.decimals(allow_nan=False),  # a signalling one cannot be a key
    st.text(st.characters(), max_size=5),
    st.sampled_from(["error", "stop", "repeat", "zstd", "gzip", "none", "1MiB", "a", "", "\ud800"]),
)
NAMES = st.one_of(st.sampled_from(KEYS), st.text(max_size=3), SCALARS)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4), st.tuples(inner)
    ),
    max_leaves=5,
)
COUNTS = st.one_of(st.integers(1, 20), st.none(), ANYTHING)


def sections(
    valid: list[dict[str, Any]], keys: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[Any, Any]]:
    """Mappings of the real keys with up to three changes, and now and then of those alone."""
    known = [st.fixed_dictionaries({key: values}) for key, values in keys.items()]
    change = st.one_of(*known, st.dictionaries(NAMES, ANYTHING, max_size=1))
    changes = st.lists(change, max_size=3).map(lambda parts: dict(ChainMap(*parts)))
    return st.builds(
        lambda start, change: start | change, st.sampled_from([*valid, *valid, {}]), changes
    )


DATASETS = sections(
    [{"path": "x", "weight": 3}, {"path": "x"}],
    {
        "path": st.sampled_from(["x", ["x", "y"], ["x", "x"]]) | ANYTHING,
        "weight": st.integers(1) | st.decimals("0.001", 9) | st.floats(0.001, 9) | ANYTHING,
        "rows": st.lists(st.none() | st.integers(0, 5), min_size=2, max_size=2) | ANYTHING,
        "columns": st.dictionaries(NAMES, SCALARS, max_size=2) | ANYTHING,
    },
)
DOCUMENTS = sections(
    [
        as_dict(),
        {
            "output": "out/",
            "mixture": "frame_budget",
            "frame_budget": 9,
            "pool_size": 3,
            "length_of": "text",
            "datasets": {"web": {"path": "web"}},
        },
        {
            "output": "out/",
            "mixture": "reservoir",
            "batch_size": 3,
            "max_simultaneous": 2,
            "passes": 1,
            "datasets": {"web": {"path": "web"}},
        },
    ],
    {
        "output": st.just("out") | ANYTHING,
        "mixture": st.sampled_from(["weighted", "frame_budget", "reservoir", "none"]) | ANYTHING,
        "batch_size": COUNTS,
        "num_batches": COUNTS,
        "on_exhausted": st.sampled_from(["error", "stop", "repeat"]) | ANYTHING,
        "batches_per_shard": COUNTS,
        "shard_bytes": COUNTS,
        "batches_per_step": COUNTS,
        "batches_per_row_group": COUNTS,
        "compression": st.sampled_from(["zstd", "lz4", "none"]) | ANYTHING,
        "compression_level": COUNTS,
        "seed": COUNTS,
        "length_of": st.just("text") | ANYTHING,
        "length_column": st.just("frames") | ANYTHING,
        "on_too_long": st.sampled_from(["error", "drop"]) | ANYTHING,
        "epochs": COUNTS,
        "passes": COUNTS,
        "datasets": st.dictionaries(NAMES, DATASETS, max_size=3) | ANYTHING,
    },
)


def check(make: Callable[[], Config]) -> None:
    """``make`` gives a usable config, or a ConfigError with a problem; never anything else."""
    try:
        config = make()
    except ConfigError as error:
        listed, text = error.problems, str(error)
    else:
        assert not isinstance(config, WeightedConfig) or min(config.weights) >= 1
        json.dumps(config.resolved(), allow_nan=False).encode()
        return
    assert listed
    assert all(found.message and str(found) in text for found in listed)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS | ANYTHING)
def test_any_python_value_gives_a_config_or_problems(document: Any) -> None:
    check(lambda: config_from_dict(document, "."))


def yaml_text(value: Any) -> str:
    """Flow-style YAML, with some scalars plain that other writers would quote."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_text(k)}: {yaml_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if isinstance(value, str) and not (value.isalpha() and value.isascii()):
        return json.dumps(value)
    return str(value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_any_document_gives_a_config_or_problems(document: Any) -> None:
    check(lambda: read(yaml_text(document)))


SYNTAX = ["\n", "\n  ", " ", ": ", "- ", "? ", "\t", "|\n", ">-\n", "---\n", "...\n", "%YAML 1.2\n"]
VALUES = ["&a ", "*a", "<<: ", "!!x ", '"\\x', '"\\ud800"', "a", "web", "0x1", "1e5"]
PIECES = st.sampled_from([*SYNTAX, *VALUES, *string.punctuation])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES | st.characters(), max_size=12), st.integers(0, len(DESIGN)), st.booleans())
def test_any_text_gives_a_config_or_problems(pieces: list[str], at: int, alone: bool) -> None:
    damage = "".join(pieces)
    check(lambda: read(damage if alone else DESIGN[:at] + damage + DESIGN[at:]))
