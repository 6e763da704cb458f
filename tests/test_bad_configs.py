"""Configs broken on purpose: each is refused with a list that names what was broken, and its line.

A valid config of each mixture is taken, and one to three things in it are made wrong of which it is
certain that they are: values, names of keys, nesting, or the text itself.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.config import Config, ConfigError, config_from_dict, parse_config

Path_ = tuple[Any, ...]

DATASETS: dict[str, dict[str, Any]] = {
    "web": {
        "path": ["data/web/*.parquet", "more/web.jsonl.gz"],
        "rows": [10, None],
        "columns": {"text": "body", "tokens": "ids"},
        "schema": {"body": "large_string"},
        "max_line_bytes": "1MiB",
        "on_bad_line": "skip",
    },
    "code": {"path": "data/code/"},
}
LAYOUT = {
    "output": "out/",
    "batches_per_shard": 64,
    "batches_per_step": 8,
    "batches_per_row_group": 4,
    "compression": "zstd",
    "compression_level": 3,
    "missing_columns": "error",
}
VALID: dict[str, dict[str, Any]] = {
    "weighted": {
        **LAYOUT,
        "mixture": "weighted",
        "batch_size": 512,
        "num_batches": 6400,
        "on_exhausted": "repeat",
        "datasets": {
            name: {**dataset, "weight": weight}
            for (name, dataset), weight in zip(DATASETS.items(), (3, 0.5), strict=True)
        },
    },
    "frame_budget": {
        **LAYOUT,
        "mixture": "frame_budget",
        "frame_budget": 16000,
        "pool_size": 4096,
        "max_items": 64,
        "seed": 7,
        "stream": 1,
        "length_of": "text",
        "on_too_long": "drop",
        "epochs": 2,
        "datasets": DATASETS,
    },
    "reservoir": {
        **LAYOUT,
        "mixture": "reservoir",
        "batch_size": 32,
        "max_simultaneous": 4,
        "seed": 0,
        "passes": 2,
        "datasets": DATASETS,
    },
}

# Values that no key takes, for each kind of key.

NAN, INFINITE = float("nan"), float("inf")
NESTED: list[Any] = [[], [1], {}, {"a": 1}, [[["x"]]]]
NO_NUMBER: list[Any] = [*NESTED, "x", "", "１２", "1e3", True, False, NAN, INFINITE, -INFINITE, 1.5]
NO_COUNT: list[Any] = [*NO_NUMBER, 0, -1, -(2**70), 2**63, 10**50, -0.0, 1e300]
NO_TEXT: list[Any] = [*NESTED, "", "  ", "\t", "\0", "a\0b", 3, 0.5, True, NAN]
NO_WORD: list[Any] = [*NESTED, "", "maybe", "ERROR", "erorr", "e\u0301rror", 0, -3.5, True, NAN]
NO_SIZE: list[Any] = [*NO_COUNT, "12XB", "-1MiB", "1.5", "0.1B", "MiB", "1 000MB", "9" * 40 + "B"]
WRONG: dict[str, list[Any]] = {
    "output": NO_TEXT,
    "mixture": [*NO_WORD, "Weighted", "frame-budget", "stirred"],
    "batch_size": [*NO_COUNT, 2**31],
    "num_batches": NO_COUNT,
    "on_exhausted": [*NO_WORD, "Repeat", "loop"],
    "batches_per_shard": NO_COUNT,
    "batches_per_step": [*NO_COUNT, 7],
    "batches_per_row_group": [*NO_COUNT, 65],
    "compression": [*NO_WORD, "ZSTD", "brotli"],
    "compression_level": [*NO_COUNT, 23],
    "missing_columns": [*NO_WORD, "nulls"],
    "frame_budget": NO_COUNT,
    "pool_size": NO_COUNT,
    "max_items": NO_COUNT,
    "seed": [*NO_NUMBER, -1, 2**63],
    "stream": [*NO_NUMBER, -1, 2**63],
    "length_of": NO_TEXT,
    "on_too_long": [*NO_WORD, "skip"],
    "epochs": [*NO_COUNT, 2**31],
    "max_simultaneous": NO_COUNT,
    "passes": [*NO_COUNT, 2**31],
    "datasets": [[], "x", 3, {}, [{"web": {"path": "x"}}], {"web": 3}, {"web": []}, {"": {}}, NAN],
    "path": [
        [],
        {},
        "",
        " ",
        3,
        True,
        [""],
        [3],
        ["a", "a"],
        [["a"]],
        {"a": "b"},
        ["a", None],
        NAN,
    ],
    "weight": [*NESTED, "3", "x", True, 0, -1, -0.5, 0.0, NAN, INFINITE, 10**4001],
    "rows": [
        [],
        [1],
        [1, 2, 3],
        [2, 2],
        [3, 1],
        [-1, None],
        ["a", 2],
        [0.5, 2],
        {},
        "x",
        3,
        [NAN, 1],
    ],
    "columns": [
        [],
        {},
        "x",
        3,
        {"a": 3},
        {"a": ""},
        {"a": ["b"]},
        {"mix_row": "x"},
        {"": "x"},
        True,
    ],
    "schema": [
        [],
        {},
        "x",
        3,
        {"a": "stringg"},
        {"a": 3},
        {"a": ""},
        {"a": "list<"},
        {"a": []},
        True,
    ],
    "max_line_bytes": [*NO_SIZE, 100, "2GiB"],
    "on_bad_line": [*NO_WORD, "ignore"],
}


@dataclass(frozen=True)
class Break:
    """Something made wrong: where, and the word that an error has to have of it."""

    at: Path_
    do: Callable[[Any], None]
    word: str


def places(value: Mapping[Any, Any], path: Path_ = ()) -> Iterator[Path_]:
    """Key paths of a config that have wrong values of their own."""
    for key, inner in value.items():
        if key in WRONG:
            yield (*path, key)
        if isinstance(inner, dict) and key not in ("columns", "schema"):
            yield from places(inner, (*path, key))


def inside(found: Any, path: Path_) -> Any:
    for key in path:
        found = found[key]
    return found


def wrong_value(config: Any, draw: Callable[[Any], Any]) -> Break:
    at = draw(st.sampled_from(list(places(config))))
    value = copy.deepcopy(draw(st.sampled_from(WRONG[at[-1]])))

    def do(found: Any) -> None:
        inside(found, at[:-1])[at[-1]] = value

    return Break(at, do, str(at[-1]))


def unknown_key(config: Any, draw: Callable[[Any], Any]) -> Break:
    """A key misspelt, or one that nobody knows."""
    section = draw(st.sampled_from([(), ("datasets", "web"), ("datasets", "code")]))
    known = list(inside(config, section))
    key = draw(st.sampled_from(known))
    at = draw(st.integers(0, len(key) - 1))
    odd = draw(
        st.sampled_from(["héllo", "数", "𝒷", "a b", "x-y", "[0]", "Ω", "__class__", "🙂", "é"])
    )
    new = draw(st.sampled_from([key[:at] + key[at + 1 :], f"{key}s", key.upper(), f" {key}", odd]))
    if not new.strip() or new in known:
        new = "unheard_of"

    def do(found: Any) -> None:
        inside(found, section)[new] = copy.deepcopy(inside(found, section).get(key))

    return Break((*section, new), do, new.strip())


def missing_key(config: Any, draw: Callable[[Any], Any]) -> Break:
    needed = {
        "weighted": ["batch_size", "output", "datasets"],
        "frame_budget": ["frame_budget", "pool_size", "output", "length_of", "datasets"],
        "reservoir": ["batch_size", "max_simultaneous", "output", "passes", "datasets"],
    }[config["mixture"]]
    weight = [("datasets", "web", "weight")] if config["mixture"] == "weighted" else []
    at = draw(st.sampled_from([*((key,) for key in needed), ("datasets", "code", "path"), *weight]))

    def do(found: Any) -> None:
        inside(found, at[:-1]).pop(at[-1], None)

    return Break(at, do, str(at[-1]))


def another_mixtures_key(config: Any, draw: Callable[[Any], Any]) -> Break:
    keys: dict[str, Any] = {
        "frame_budget": 9,
        "pool_size": 9,
        "max_simultaneous": 3,
        "passes": 1,
        "on_exhausted": "stop",
        "batch_size": 8,
        "epochs": 1,
        "length_column": "n",
    }
    others = [key for key in keys if key not in VALID[config["mixture"]]]
    if config["mixture"] == "frame_budget":
        others.remove("length_column")
    key = draw(st.sampled_from(others))

    def do(found: Any) -> None:
        found[key] = keys[key]

    return Break((key,), do, key)


def wrong_place(config: Any, draw: Callable[[Any], Any]) -> Break:
    """A key of the mix in a dataset, or of a dataset in the mix."""
    if draw(st.booleans()):
        key, value, section = "compression", "lz4", ("datasets", "code")
    else:
        key, value = draw(
            st.sampled_from([("path", "x"), ("rows", [0, 1]), ("columns", {"a": "b"})])
        )
        section = ()

    def do(found: Any) -> None:
        inside(found, section)[key] = value

    return Break((*section, key), do, key)


BREAKS = [wrong_value, wrong_value, wrong_value, unknown_key, missing_key, another_mixtures_key]
HIDING = {"mixture", "datasets"}
"""Keys without which others cannot be judged."""


@st.composite
def broken(draw: st.DrawFn) -> tuple[dict[str, Any], list[Break]]:
    """A config, and the one to three things that are wrong in it."""
    kind = draw(st.sampled_from(list(VALID)))
    config = copy.deepcopy(VALID[kind])
    breaks = []
    for make in draw(st.lists(st.sampled_from([*BREAKS, wrong_place]), min_size=1, max_size=3)):
        found = make(VALID[kind], draw)
        if any(found.at[: len(b.at)] == b.at or b.at[: len(found.at)] == found.at for b in breaks):
            continue
        breaks.append(found)
        found.do(config)
    return config, breaks


# The text of a config.


def flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, float) and value != value:
        return ".nan"
    if isinstance(value, float) and value in (INFINITE, -INFINITE):
        return ".inf" if value > 0 else "-.inf"
    if isinstance(value, str) and re.fullmatch(r"[a-z_]{3,}", value) and value != "null":
        return value if value not in ("true", "false") else json.dumps(value)
    return (
        {None: "null", True: "true", False: "false"}.get(value, "")
        if (value is None or isinstance(value, bool))
        else (json.dumps(value) if isinstance(value, str) else big(value))
    )


def big(value: Any) -> str:
    """A number, also one that Python would not print."""
    return "1" + "0" * 4001 if value == 10**4001 else repr(value)


def written(value: dict[Any, Any], path: Path_ = ()) -> Iterator[tuple[Path_, str]]:
    """The lines of a config in block style, each with the key path that it tells."""
    for key, inner in value.items():
        indent = "  " * len(path)
        if isinstance(inner, dict) and inner and key not in ("columns", "schema"):
            yield (*path, key), f"{indent}{flow(key)}:"
            yield from written(inner, (*path, key))
        else:
            yield (*path, key), f"{indent}{flow(key)}: {flow(inner)}"


def refused(make: Callable[[], Config]) -> ConfigError:
    """The error that a config ends with, held against what every one of them has to be."""
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    lines = str(error).splitlines()
    count = len(error.problems)
    assert count > 0
    assert lines[0].endswith(f": {count} problem{'s' * (count > 1)}")
    assert len(lines) == count + 1  # a line each, whatever was found
    for problem, line in zip(error.problems, lines[1:], strict=True):
        assert line == f"  {problem}"
        assert len(problem.message) > 10
        assert len(line) < 1500
        assert "Error" not in problem.message
        assert "Traceback" not in line
    return error


def named(error: ConfigError, broken: Break) -> bool:
    return any(broken.word in f"{p.path}: {p.message}" for p in error.problems)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken())
def test_a_broken_config_lists_what_was_broken_with_its_key_and_line(
    case: tuple[dict[str, Any], list[Break]],
) -> None:
    config, breaks = case
    lines = list(written(config))
    text = "\n".join(line for _, line in lines) + "\n"
    error = refused(lambda: parse_config(text, "."))
    assert all(p.line is not None and 1 <= p.line <= len(lines) for p in error.problems)
    judged = [b for b in breaks if len(breaks) == 1 or not HIDING & {b.word for b in breaks}]
    for found in judged:
        assert named(error, found), (found.at, text, str(error))
    if len(breaks) == 1 and breaks[0].do.__qualname__.startswith("wrong_value"):
        [at] = [n for n, (path, _) in enumerate(lines, 1) if path == breaks[0].at]
        inner = [
            n for n, (path, _) in enumerate(lines, 1) if path[: len(breaks[0].at)] == breaks[0].at
        ]
        assert {p.line for p in error.problems} <= {
            *inner,
            *keys_beside(lines, breaks[0].at[-1]),
        }, (
            at,
            str(error),
        )


def keys_beside(lines: list[tuple[Path_, str]], key: str) -> list[int]:
    """Lines of the keys that say something together with another."""
    together = {
        "batches_per_shard": ["batches_per_step", "batches_per_row_group"],
        "num_batches": ["batches_per_step"],
        "compression": ["compression_level"],
    }.get(key, [])
    return [n for n, (path, _) in enumerate(lines, 1) if path[-1] in together]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken())
def test_a_broken_mapping_lists_what_was_broken(case: tuple[dict[str, Any], list[Break]]) -> None:
    config, breaks = case
    error = refused(lambda: config_from_dict(config, "."))
    assert all(problem.line is None for problem in error.problems)
    for found in [b for b in breaks if len(breaks) == 1 or not HIDING & {b.word for b in breaks}]:
        assert named(error, found), (found.at, str(error))


# The text itself broken.

WEIGHTED = [line for _, line in written(VALID["weighted"])]
NO_YAML = {
    "a tab": "\tbatch_size: 3",
    "an open bracket": "more: [1, 2",
    "an open brace": "more: {a: 1",
    "an open quote": 'more: "abc',
    "a closing bracket": "more: ]",
    "two colons": "more: a: b",
    "no colon": "more",
    "an item among keys": "- more",
    "an unknown escape": 'more: "\\x"',
    "a lone surrogate": 'output: "\\ud800"',
    "a control character": "more: \x01",
    "a NUL": "more: \0",
    "an unknown alias": "more: *nobody",
    "an anchor and no value": "more: &a &b x",
    "a reserved character": "more: @x",
    "a backtick": "more: `x`",
    "a percent sign": "%more: 1",
    "another document": "---\nbatch_size: 3",
    "an end and more": "...\nbatch_size: 3",
    "a directive": "%YAML 1.1\n---\na: b",
    "a Python tag": "more: !!python/object/apply:os.getcwd []",
    "a set": "more: !!set {a}",
    "a timestamp tag": "more: !!timestamp 2024-01-01",
    "a tag of nobody": "more: !mine 3",
    "a merge key": "<<: {batch_size: 3}",
    "a key that is a list": "[a, b]: 3",
    "a key that is a mapping": "{a: b}: 3",
    "a key that is null": "~: 3",
    "a key that is a number": "3: 3",
    "a key that is true": "true: 3",
    "a key that is no number": ".nan: 3",
    "a question mark": "? [a]\n: 3",
    "a block scalar cut short": "more: |\n x\n  y\n z\nw",
    "a duplicate key": "batch_size: 512",
    "a duplicate dataset": "datasets: {web: {path: x, weight: 1}}",
    "an indent too deep": "   more: 3",
}


@pytest.mark.parametrize("label", NO_YAML)
@pytest.mark.parametrize("at", [0, 4, len(WEIGHTED)])
def test_a_text_that_is_broken_is_refused_with_its_line(label: str, at: int) -> None:
    text = "\n".join([*WEIGHTED[:at], NO_YAML[label], *WEIGHTED[at:]]) + "\n"
    error = refused(lambda: parse_config(text, "."))
    assert all(p.line is not None and 1 <= p.line <= text.count("\n") + 1 for p in error.problems)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(VALID)), st.data())
def test_a_key_that_is_written_twice_is_refused_with_both_lines(
    kind: str, data: st.DataObject
) -> None:
    lines = list(written(VALID[kind]))
    plain = [n for n, (path, line) in enumerate(lines) if not line.endswith(":")]
    place = data.draw(st.sampled_from(plain))
    path, line = lines[place]
    after = [n for n, (other, _) in enumerate(lines) if other[:-1] == path[:-1] and n > place]
    at = data.draw(
        st.sampled_from([place + 1, *(n for n in after if lines[n - 1][0][:-1] == path[:-1])])
    )
    text = "\n".join([*(line for _, line in lines[:at]), line, *(line for _, line in lines[at:])])
    error = refused(lambda: parse_config(text, "."))
    assert [p.line for p in error.problems] == [at + 1]
    assert str(path[-1]) in error.problems[0].path
    assert f"line {place + 1}" in error.problems[0].message


@pytest.mark.parametrize("kind", VALID)
def test_what_is_broken_here_is_valid_to_begin_with(kind: str) -> None:
    text = "\n".join(line for _, line in written(VALID[kind]))
    parsed = parse_config(text, ".")
    assert parsed.resolved() == config_from_dict(VALID[kind], ".").resolved()
    assert set(WRONG) >= {path[-1] for path, _ in written(VALID[kind])} - set(DATASETS)


# On the command line.

SOME: list[tuple[str, str | bytes]] = [
    ("a wrong value", "\n".join(WEIGHTED).replace("512", "-3")),
    ("three wrong values", "output: 3\nbatch_size: x\nnum_batches: .nan\ndatasets: []\n"),
    ("an unknown key", "\n".join([*WEIGHTED, "mixtur: 3"])),
    ("no YAML", "output: [\n"),
    ("a tag", "output: !!python/object/apply:os.getcwd []\n"),
    ("nothing", ""),
    ("a list", "- 1\n"),
    ("no UTF-8", b"output: \xff\xfe\n"),
    ("binary", bytes(range(256))),
    ("odd text", "output: out\n数: 🙂\n"),
    ("a bomb", "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b, *b]\n"),
]


@pytest.mark.parametrize(("label", "text"), SOME, ids=[label for label, _ in SOME])
@pytest.mark.parametrize("command", ["plan", "build"])
def test_on_the_command_line_a_broken_config_ends_in_a_list_and_no_traceback(
    tmp_path: Path, command: str, label: str, text: str | bytes
) -> None:
    path = tmp_path / "mix.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    done = CliRunner().invoke(main, [command, str(path)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    found = re.fullmatch(rf"error: {path}: (\d+) problems?", lines[0])
    assert found is not None, lines
    assert len(lines) == 1 + int(found[1])
    assert all(line.startswith("  ") for line in lines[1:])
    assert "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == [path]
