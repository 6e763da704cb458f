"""Columns as tensors: shapes, dtypes, shared memory, and what has none."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")

from pipeline.tensors import NullError, Ragged, as_tensors  # noqa: E402

NUMBERS = [
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
]


def address(array: pa.Array) -> int:
    """Where an array's first value lies."""
    return int(array.buffers()[-1].address) + array.offset * array.type.bit_width // 8


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
@pytest.mark.filterwarnings("error")
def test_numbers_share_their_memory_and_keep_their_dtype(kind: pa.DataType) -> None:
    array = pa.array(np.arange(9).astype(kind.to_pandas_dtype()), kind)[2:7]
    tensor = as_tensors(pa.chunked_array([array]))
    assert tensor.tolist() == [2, 3, 4, 5, 6]
    assert str(tensor.dtype) == f"torch.{np.dtype(kind.to_pandas_dtype())}"
    assert tensor.data_ptr() == address(array)


def test_a_tensor_keeps_the_memory_that_it_shares() -> None:
    tensors = [as_tensors(pa.array(np.full(10_000, i))) for i in range(50)]
    assert [int(tensor.sum()) for tensor in tensors] == [i * 10_000 for i in range(50)]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pa.timestamp("us", "UTC"), datetime.datetime(1970, 1, 1, 0, 0, 1), 1_000_000),
        (pa.date32(), datetime.date(1970, 1, 3), 2),
        (pa.time32("ms"), datetime.time(0, 0, 1), 1000),
        (pa.duration("s"), datetime.timedelta(minutes=1), 60),
        (pa.bool_(), True, True),
    ],
    ids=str,
)
def test_times_are_their_integers_and_booleans_booleans(
    kind: pa.DataType, value: Any, expected: Any
) -> None:
    tensor = as_tensors(pa.array([value] * 3, kind)[1:])
    assert tensor.tolist() == [expected] * 2
    assert tensor.dtype == {
        pa.bool_(): torch.bool,
        pa.date32(): torch.int32,
        pa.time32("ms"): torch.int32,
    }.get(kind, torch.int64)


def test_lists_of_a_fixed_size_are_one_tensor_without_a_copy() -> None:
    kind = pa.list_(pa.list_(pa.float32(), 3), 2)
    rows = [[[r, i, j] for j in range(2)] for r in range(4) for i in range(2)]
    array = pa.array(rows, kind)[3:7]
    tensor = as_tensors(array)
    assert tensor.shape == (4, 2, 3)
    assert tensor.tolist() == rows[3:7]
    assert tensor.data_ptr() == address(array.flatten().flatten())
    assert as_tensors(pa.array([[], []], pa.list_(pa.int32(), 0))).shape == (2, 0)


def test_binaries_of_a_fixed_width_are_octets() -> None:
    array = pa.array([b"abc", b"def", b"ghi"], pa.binary(3))[1:]
    tensor = as_tensors(array)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (2, 3)
    assert bytes(tensor.flatten().tolist()) == b"defghi"


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_lists_of_differing_length_are_values_and_offsets(make: Any) -> None:
    rows = [[9, 9], [1, 2, 3], [], [4]]
    ragged = as_tensors(pa.array(rows, make(pa.int16()))[1:])
    assert isinstance(ragged, Ragged)
    assert ragged.values.dtype == torch.int16
    assert ragged.values.tolist() == [1, 2, 3, 4]
    assert ragged.offsets.dtype == torch.int64
    assert ragged.offsets.tolist() == [0, 3, 3, 4]


def test_lists_within_lists_are_values_and_offsets_within() -> None:
    frames = as_tensors(
        pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int8(), 2)))
    )
    assert frames.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert frames.offsets.tolist() == [0, 1, 1, 3]
    deep = as_tensors(pa.array([[[1], []], [], [[2, 3]]], pa.list_(pa.list_(pa.int8()))))
    assert deep.offsets.tolist() == [0, 2, 2, 3]
    assert deep.values.offsets.tolist() == [0, 1, 1, 3]
    assert deep.values.values.tolist() == [1, 2, 3]
    pairs = as_tensors(pa.array([[[1], []], [[2], [3, 4]]], pa.list_(pa.list_(pa.int8()), 2)))
    assert pairs.offsets.tolist() == [0, 2, 4]
    assert pairs.values.offsets.tolist() == [0, 1, 1, 2, 4]


def test_a_struct_is_a_dict_of_its_fields() -> None:
    kind = pa.struct([("x", pa.int32()), ("name", pa.string()), ("at", pa.list_(pa.int32()))])
    found = as_tensors(pa.array([{"x": i, "name": f"n{i}", "at": [i] * i} for i in range(3)], kind))
    assert list(found) == ["x", "name", "at"]
    assert found["x"].tolist() == [0, 1, 2]
    assert found["name"] == ["n0", "n1", "n2"]
    assert found["at"].offsets.tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", None, "b"], pa.string()),
        (["a"], pa.large_string()),
        ([b"a", None], pa.binary()),
        ([Decimal("1.50"), None], pa.decimal128(9, 2)),
        ([["a"], None, []], pa.list_(pa.string())),
        ([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
        ([[{"x": 1}]], pa.list_(pa.struct([("x", pa.int32())]))),
        ([None, None], pa.null()),
    ],
    ids=str,
)
def test_what_is_no_number_is_a_list_of_objects(values: list[Any], kind: pa.DataType) -> None:
    assert as_tensors(pa.array(values, kind)) == values


@pytest.mark.parametrize("kind", [*NUMBERS, pa.bool_(), pa.date32(), pa.binary(2)], ids=str)
def test_no_rows_are_an_empty_tensor(kind: pa.DataType) -> None:
    assert len(as_tensors(pa.array([], kind))) == 0
    ragged = as_tensors(pa.array([], pa.list_(kind)))
    assert (len(ragged.values), ragged.offsets.tolist()) == (0, [0])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 0, 1, None], pa.int32()),
        ([True, True, False, None], pa.bool_()),
        ([[0, 0], [0, 0], [0, 0], [0, None]], pa.list_(pa.int32(), 2)),
        ([[0, 0], [], [], [0, None]], pa.list_(pa.int32())),
        ([[[0]], [[1], [], [2]], [], [[], [3, None]]], pa.list_(pa.list_(pa.int32()))),
        ([[], [], [], None], pa.list_(pa.int32())),
        ([{"x": 1}, {"x": 2}, {"x": 3}, None], pa.struct([("x", pa.int32())])),
        ([{"x": 1}, {"x": 2}, {"x": 3}, {"x": None}], pa.struct([("x", pa.int32())])),
    ],
    ids=str,
)
def test_a_null_that_a_tensor_would_hold_is_an_error_that_knows_its_row(
    values: list[Any], kind: pa.DataType
) -> None:
    with pytest.raises(NullError, match="row 2 is or holds a null") as error:
        as_tensors(pa.array(values, kind)[1:])
    assert error.value.row == 2


def test_chunks_are_brought_together() -> None:
    column = pa.chunked_array([[1, 2], [], [3]], pa.int64())
    assert as_tensors(column).tolist() == [1, 2, 3]
    assert len(as_tensors(pa.chunked_array([], pa.int64()))) == 0
