"""Arrow types as text."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.type_text import TypeTextError, parse_type

FLAT = [
    *(pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(16)),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.duration("ms")),
    *(pa.timestamp("s"), pa.timestamp("us", tz="UTC"), pa.timestamp("ns", tz="+02:00")),
    *(pa.timestamp("ms", tz="America/Argentina/Buenos_Aires"), pa.decimal32(5, 2)),
    *(pa.decimal64(18, 0), pa.decimal128(38, -3), pa.decimal256(76, 10)),
]
NAMES = st.text(st.characters(categories=["L", "N"], include_characters=" _-.'"), min_size=1)
NAMES = NAMES.map(str.strip).filter(bool)


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.builds(pa.field, NAMES, inner, st.booleans())
    return st.one_of(
        fields.map(pa.list_),
        fields.map(pa.large_list),
        st.builds(pa.list_, fields, st.integers(1, 9)),
        st.lists(fields, max_size=4, unique_by=lambda field: field.name).map(pa.struct),
        st.builds(pa.map_, inner, inner, st.booleans()),
    )


@settings(deadline=None)
@given(st.recursive(st.sampled_from(FLAT), nested, max_leaves=6))
def test_what_arrow_prints_is_read_as_the_same_type(kind: pa.DataType) -> None:
    found = parse_type(str(kind))
    assert found.equals(kind, check_metadata=True)
    assert str(found) == str(kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("float32", pa.float32()),
        ("float64", pa.float64()),
        ("date32", pa.date32()),
        (" list< string > ", pa.list_(pa.field("element", pa.string()))),
        ("fixed_size_list<float>[3]", pa.list_(pa.field("element", pa.float32()), 3)),
        ("list<string not null>", pa.list_(pa.field("element", pa.string(), False))),
        (
            "struct<a:int8,b c:list<int8> not null>",
            pa.struct([("a", pa.int8()), pa.field("b c", pa.list_(pa.int8()), False)]),
        ),
        ("map<string,list<int8>>", pa.map_(pa.string(), pa.list_(pa.int8()))),
        ("decimal128( 9,2 )", pa.decimal128(9, 2)),
    ],
)
def test_spaces_and_names_of_elements_may_be_left_out(text: str, kind: pa.DataType) -> None:
    assert parse_type(text) == kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a type such as int32.*, found the end"),
        ("int", "expected a type such as int32.*, found 'int'"),
        ("Int32", "expected a type such as int32.*, found 'Int32'"),
        ("list<strin>", "expected a type such as .* after 'list<', found 'strin>'"),
        ("list<int32", "expected not null or > after 'list<int32', found the end"),
        ("list[int32]", r"expected < after 'list', found '\[int32\]'"),
        ("int32 or so", "expected the end after 'int32', found 'or so'"),
        ("struct<int8>", "expected the name of a field and a colon after 'struct<', found 'int8>'"),
        ("struct<a: int8 b: int8>", "expected not null, a comma or > .*, found 'b: int8>'"),
        ("struct<a: int8, a: int8>", "expected each field once after .*, found 'a: int8>'"),
        ("map<string>", "expected a comma after 'map<string', found '>'"),
        ("timestamp[ys]", "expected a type such as"),
        ("timestamp[us, tz=]", r"expected \[us\] or \[us, tz=UTC\] after 'timestamp'"),
        ("decimal128(9)", r"expected \(precision, scale\) after 'decimal128', found '\(9\)'"),
        ("decimal128(99, 2)", r"precision should be between 1 and 38.*found 'decimal128\(99, 2\)'"),
        ("fixed_size_binary[0]", r"expected \[size\] after 'fixed_size_binary', found '\[0\]'"),
        ("list<" * 60, "expected at most 40 types inside each other"),
        ("dictionary<values=string, indices=int8, ordered=0>", "found 'dictionary<"),
    ],
)
def test_what_names_no_type_is_refused_where_it_stops(text: str, said: str) -> None:
    with pytest.raises(TypeTextError, match=said):
        parse_type(text)
