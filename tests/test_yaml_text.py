"""YAML 1.2 text as plain values, with the line of every key and item."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from pipeline.yaml_text import Document, Problem, Unreadable, as_found, path_text


def read(text: str) -> Document:
    document = Document()
    document.read(text)
    return document


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("nULL", "nULL"),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("-07", -7),
        ("0o17", 15),
        ("0xfF", 255),
        ("1_000", "1_000"),
        ("0.10", Decimal("0.10")),
        (".5e-3", Decimal("0.0005")),
        ("-.inf", Decimal("-Infinity")),
        ("2024-01-01", "2024-01-01"),
        ("'true'", "true"),
        (r'"\ud83d\ude42"', "🙂"),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_a_scalar_is_what_the_core_schema_says(written: str, value: object) -> None:
    root = read(f"key: {written}").root
    assert (type(root["key"]), root["key"]) == (type(value), value)


def test_a_decimal_keeps_the_digits_it_was_written_with() -> None:
    assert str(read("0.10").root) == "0.10"


def test_a_document_may_be_any_value() -> None:
    assert read("").root is None
    assert read("- a\n- {b: 1}\n").root == ["a", {"b": 1}]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ((), 2),
        (("a",), 2),
        (("b",), 3),
        (("b", 0), 4),
        (("b", 1), 5),
        (("b", 1, "d"), 6),
        (("b", 1, "missing"), 5),
        (("b", 7), 3),
        (("missing", "deeper"), 2),
        (("a", "below a scalar"), 2),
    ],
)
def test_a_path_has_the_line_of_its_key_or_the_nearest_around_it(
    path: tuple[Any, ...], line: int
) -> None:
    text = "# first\na: 1\nb:\n- x\n- c: 1\n  d: 2\n"
    assert read(text).line_of(path) == line


def test_what_does_not_end_reading_is_listed_and_left_out() -> None:
    document = read("a: 1\na: 2\nb: *none\n<<: x\nc: !!int 3\n")
    assert document.root == {"a": 1, "b": None, "c": 3}
    assert document.problems == [
        Problem("a", 2, "given twice, first on line 1 and again on line 2"),
        Problem("b", 3, '"*none" stands for nothing; write a text that begins with * in quotes'),
        Problem("", 4, 'merge keys ("<<") are not YAML 1.2; write the keys out'),
        Problem("c", 5, 'tags such as "!!int" are not allowed; write a plain value'),
    ]


def test_what_ends_reading_keeps_the_problems_before_it() -> None:
    document = Document()
    with pytest.raises(Unreadable) as caught:
        document.read("a: 1\na: 2\nb:\n- c: [x, {{y}: 1}]\n")
    assert [found.path for found in document.problems] == ["a"]
    assert caught.value.problem == Problem(
        "b[0].c[1]", 4, "expected a string as key, found a mapping"
    )


def test_a_path_is_quoted_where_it_would_not_read_well() -> None:
    assert path_text(("datasets", "web/en", "path", 1)) == "datasets.web/en.path[1]"
    assert path_text(("a.b", "", "with space")) == '"a.b".""."with space"'
    assert path_text(("x" * 61,)) == f'"{"x" * 60}…"'


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "null"),
        (False, "false (a boolean)"),
        ("a", '"a" (a string)'),
        (10**100, "a number of about 101 digits"),
        (Decimal("0.10"), "0.10"),
        ({}, "an empty mapping"),
        ({"a": 1}, "a mapping"),
        ((), "an empty list"),
        ([1], "a list"),
        ({1}, "an object of type set"),
    ],
)
def test_a_value_is_told_as_yaml_writes_it_with_its_kind(value: object, told: str) -> None:
    assert as_found(value) == told
