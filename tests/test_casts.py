"""Values brought to another type: what fits is kept, what does not is refused."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest

from pipeline.casts import cast, why_not

NOON = datetime.datetime(2024, 1, 1, 12)


@pytest.mark.parametrize(
    ("rows", "found", "kind", "expected"),
    [
        ([1, 127, None], pa.int64(), pa.int8(), [1, 127, None]),
        (["1", "-5", None], pa.string(), pa.int32(), [1, -5, None]),
        ([1, None], pa.int32(), pa.string(), ["1", None]),
        (
            [0.5, 1e30, float("inf")],
            pa.float64(),
            pa.float32(),
            [0.5, 1.0000000150474662e30, "inf"],
        ),
        ([1.0, None], pa.float64(), pa.int8(), [1, None]),
        ([0, 1, None], pa.int8(), pa.bool_(), [False, True, None]),
        ([NOON.replace(hour=0)], pa.timestamp("us"), pa.date32(), [NOON.date()]),
        (["1.25"], pa.string(), pa.decimal128(9, 2), [decimal.Decimal("1.25")]),
        ([b"abc"], pa.binary(), pa.binary(3), [b"abc"]),
        ([None, None], pa.null(), pa.list_(pa.int8()), [None, None]),
        (
            [[1, 2], None, [3, 4]],
            pa.list_(pa.int64()),
            pa.list_(pa.int8(), 2),
            [[1, 2], None, [3, 4]],
        ),
        ([[1, 2], None], pa.list_(pa.int64(), 2), pa.large_list(pa.int8()), [[1, 2], None]),
        ([["1"], None, []], pa.list_view(pa.string()), pa.list_(pa.int8()), [[1], None, []]),
        ([{"a": "1", "b": 2}, None], None, pa.struct([("a", pa.int8())]), [{"a": 1}, None]),
        ([{"a": 1}], None, pa.struct([("b", pa.int8()), ("a", pa.int8())]), [{"b": None, "a": 1}]),
        (
            [[("k", "1")], None],
            pa.map_(pa.string(), pa.string()),
            pa.map_(pa.string(), pa.int8()),
            [[("k", 1)], None],
        ),
    ],
    ids=str,
)
def test_values_that_fit_are_kept(
    rows: list[Any], found: pa.DataType | None, kind: pa.DataType, expected: list[Any]
) -> None:
    # A slice, and beside it what must not be looked at.
    array = pa.array([rows[0], *rows], found).slice(1)
    assert why_not(array.type, kind) is None
    result = cast(array, kind)
    result.validate(full=True)
    assert result.type == kind
    expected = [float("inf") if value == "inf" else value for value in expected]
    assert result.to_pylist() == expected


@pytest.mark.parametrize(
    ("value", "found", "kind"),
    [
        (300, pa.int64(), pa.int8()),
        (1.5, pa.float64(), pa.int32()),
        (1e300, pa.float64(), pa.float32()),
        (1e6, pa.float32(), pa.float16()),
        (decimal.Decimal(10) ** 70, pa.decimal256(76, 0), pa.float32()),
        (2**60 + 1, pa.int64(), pa.float64()),
        (5, pa.int8(), pa.bool_()),
        (0.5, pa.float64(), pa.bool_()),
        (NOON, pa.timestamp("us"), pa.date32()),
        (NOON.replace(microsecond=1), pa.timestamp("us"), pa.timestamp("ms")),
        ("12 apples", pa.string(), pa.int64()),
        ("2024-13-01", pa.string(), pa.date32()),
        (decimal.Decimal("1.25"), pa.decimal128(9, 2), pa.decimal128(9, 1)),
        (b"\xff", pa.binary(), pa.string()),
        (b"ab", pa.binary(), pa.binary(3)),
        ([1, 2, 3], pa.list_(pa.int64()), pa.list_(pa.int64(), 2)),
        ([[300]], pa.list_(pa.list_(pa.int64())), pa.list_(pa.list_(pa.int8()))),
        ({"a": [300]}, None, pa.struct([("a", pa.list_(pa.int8()))])),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused_though_others_may(
    value: Any, found: pa.DataType | None, kind: pa.DataType
) -> None:
    array = pa.array([value, None], found)
    assert why_not(array.type, kind) is None
    with pytest.raises(pa.ArrowInvalid):
        cast(array, kind)
    assert cast(array.slice(1), kind).to_pylist() == [None]


@pytest.mark.parametrize(
    ("found", "kind", "reason"),
    [
        (pa.int64(), pa.list_(pa.int64()), "int64 is nothing like list<item: int64>"),
        (pa.list_(pa.int64()), pa.int64(), "list<element: int64> is nothing like int64"),
        (pa.bool_(), pa.date32(), "Unsupported cast from bool to date32"),
        (pa.timestamp("us"), pa.time64("us"), "the date would be lost"),
        (pa.int64(), pa.decimal128(5, 2), "at least 21"),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), "the lists differ in size"),
        (
            pa.struct([("a", pa.list_(pa.bool_()))]),
            pa.struct([("a", pa.list_(pa.date32()))]),
            "Unsupported cast from bool to date32",
        ),
        (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())]), "it has no field of"),
        (pa.map_(pa.string(), pa.bool_()), pa.map_(pa.string(), pa.date32()), "Unsupported cast"),
        (pa.dictionary(pa.int8(), pa.bool_()), pa.date32(), "Unsupported cast from bool"),
    ],
    ids=str,
)
def test_types_that_can_never_be_brought_to_each_other_are_known_without_a_value(
    found: pa.DataType, kind: pa.DataType, reason: str
) -> None:
    assert reason in (why_not(found, kind) or "nothing stands against it")
