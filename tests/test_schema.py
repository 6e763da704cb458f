"""Safe widening: its laws, what it refuses and how rows come under the common schema."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schema import SchemaError, conform, plain, unify, widen

relaxed = settings(deadline=None)

SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
TEXTS = [pa.string(), pa.large_string()]
BYTES = [pa.binary(), pa.large_binary()]
OTHERS = [
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
    pa.decimal128(9, 2),
    pa.binary(3),
]
NULL = pa.null()


def element(kind: pa.DataType, nullable: bool = True) -> pa.Field:
    return pa.field("element", kind, nullable)


# Families of types that often have a common one: each draw of a family is one of its types.


@st.composite
def lists_of(draw: Any, inner: st.SearchStrategy[pa.DataType]) -> pa.DataType:
    return draw(st.sampled_from([pa.list_, pa.large_list]))(element(draw(inner)))


@st.composite
def pairs_of(draw: Any, inner: st.SearchStrategy[pa.DataType]) -> pa.DataType:
    return pa.list_(element(draw(inner)), 2)


@st.composite
def structs_of(draw: Any, inner: dict[str, st.SearchStrategy[pa.DataType]]) -> pa.DataType:
    order = draw(st.permutations(sorted(inner)))
    return pa.struct([pa.field(name, draw(inner[name])) for name in order])


def nullable(family: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(family, family, family, st.just(NULL))


leaf_families = st.sampled_from(
    [SIGNED, UNSIGNED, SIGNED + UNSIGNED, FLOATS, TEXTS, BYTES, *([kind] for kind in OTHERS)]
).map(st.sampled_from)

families = st.recursive(
    leaf_families.map(nullable),
    lambda inner: st.one_of(
        inner.map(lists_of),
        inner.map(pairs_of),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(structs_of),
    ).map(nullable),
    max_leaves=4,
)


def together(number: int) -> st.SearchStrategy[tuple[pa.DataType, ...]]:
    """Types of one family, or of two that have nothing to do with each other."""
    related = families.flatmap(lambda family: st.tuples(*[family] * number))
    any_types = st.tuples(*[families.flatmap(lambda family: family)] * number)
    return st.one_of(related, related, any_types)


def sorted_fields(kind: pa.DataType) -> pa.DataType:
    """The type with the fields of structs in the order of their names."""
    if pa.types.is_struct(kind):
        fields = [f.with_type(sorted_fields(f.type)) for f in kind]
        return pa.struct(sorted(fields, key=lambda field: field.name))
    if pa.types.is_nested(kind):
        inner = kind.value_field.with_type(sorted_fields(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(inner)
    return kind


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of a type, its extremes and null among them."""
    found: st.SearchStrategy[Any]
    if pa.types.is_integer(kind):
        low = 0 if kind in UNSIGNED else -(2 ** (kind.bit_width - 1))
        found = st.sampled_from([low, low + 2**kind.bit_width - 1]) | st.integers(
            low, low + 2**kind.bit_width - 1
        )
    elif pa.types.is_floating(kind):
        found = st.floats(width=kind.bit_width, allow_nan=False)
    elif kind in TEXTS:
        found = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    elif kind in BYTES:
        found = st.binary(max_size=4)
    elif kind == pa.binary(3):
        found = st.binary(min_size=3, max_size=3)
    elif pa.types.is_boolean(kind):
        found = st.booleans()
    elif pa.types.is_date(kind):
        found = st.dates()
    elif pa.types.is_timestamp(kind):
        zone = datetime.timezone.utc if kind.tz else None
        found = st.datetimes(timezones=st.just(zone))
    elif pa.types.is_decimal(kind):
        found = st.decimals("-9999999.99", "9999999.99", places=2)
    elif pa.types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif pa.types.is_fixed_size_list(kind):
        found = st.lists(values(kind.value_type), min_size=2, max_size=2)
    elif pa.types.is_null(kind):
        return st.none()
    else:
        found = st.lists(values(kind.value_type), max_size=3)
    return st.one_of(found, found, found, st.none())


def dressed(kind: pa.DataType) -> pa.DataType:
    """The type as another writer may store it: dictionaries, other names of elements, metadata."""
    if kind in (pa.string(), pa.binary(), pa.int32()):
        return pa.dictionary(pa.int16(), kind)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, dressed(f.type), metadata={"id": "1"}) for f in kind])
    if pa.types.is_nested(kind):
        inner = pa.field("item", dressed(kind.value_type), metadata={"id": "2"})
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(inner)
    return kind


def identical(a: pa.DataType, b: pa.DataType) -> bool:
    return bool(a.equals(b, check_metadata=True))


# Laws


@relaxed
@given(together(2))
def test_widening_does_not_ask_which_source_came_first(pair):
    forth, back = widen(*pair), widen(*reversed(pair))
    if forth is None or back is None:
        assert forth is back
    else:
        assert sorted_fields(forth) == sorted_fields(back)


@relaxed
@given(together(2))
def test_a_common_type_is_common_to_itself_and_to_both(pair):
    a, b = pair
    assert widen(a, a) == a
    common = widen(a, b)
    if common is not None:
        assert sorted_fields(widen(common, a)) == sorted_fields(common)
        assert sorted_fields(widen(b, common)) == sorted_fields(common)


@relaxed
@given(together(3))
def test_three_types_widen_to_one_whichever_two_meet_first(triple):
    a, b, c = triple
    ab, bc = widen(a, b), widen(b, c)
    left = None if ab is None else widen(ab, c)
    right = None if bc is None else widen(a, bc)
    assert left == right


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_value_of_both_types_is_kept_however_it_was_stored(data):
    pair = data.draw(together(2).filter(lambda pair: widen(*pair) is not None))
    stored = [data.draw(st.sampled_from([kind, dressed(kind)])) for kind in pair]
    sources = [
        (f"source {i}", pa.schema([pa.field("x", kind, metadata={"k": "v"})]))
        for i, kind in enumerate(stored)
    ]
    schema = unify(sources)
    assert identical(schema.field("x").type, plain(schema.field("x").type))
    for kind, as_stored in zip(pair, stored, strict=True):
        rows = data.draw(st.lists(values(kind), max_size=4))
        batch = pa.record_batch({"x": pa.array(rows, as_stored)})
        # A slice, since a batch that was read seldom starts where its buffers do.
        found = conform(batch.slice(1), schema, "here")
        found.validate(full=True)
        assert identical(found.column("x").type, schema.field("x").type)
        assert found.column("x").to_pylist() == rows[1:]


# What widens to what


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.uint16(), pa.uint32(), pa.uint32()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint8(), pa.int64(), pa.int64()),
        (pa.uint16(), pa.int8(), pa.int32()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.uint64(), pa.uint8(), pa.uint64()),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.binary(), pa.large_binary(), pa.large_binary()),
        (pa.null(), pa.decimal128(9, 2), pa.decimal128(9, 2)),
        (pa.null(), pa.null(), pa.null()),
        (pa.timestamp("us", tz="UTC"), pa.timestamp("us", tz="UTC"), None),
        (pa.list_(pa.null()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.list_(pa.int32()), pa.large_list(pa.int16()), pa.large_list(pa.int32())),
        (pa.list_(pa.uint8(), 3), pa.list_(pa.int8(), 3), pa.list_(pa.int16(), 3)),
        (
            pa.struct({"a": pa.int8(), "b": pa.list_(pa.string())}),
            pa.struct({"b": pa.large_list(pa.large_string()), "a": pa.null()}),
            pa.struct({"a": pa.int8(), "b": pa.large_list(pa.large_string())}),
        ),
    ],
    ids=str,
)
def test_types_widen_to_the_narrowest_that_holds_both(a, b, common):
    common = a if common is None else common
    assert widen(a, b) == common
    assert sorted_fields(widen(b, a)) == sorted_fields(common)


REFUSED = [
    (pa.int32(), pa.string()),
    (pa.int64(), pa.float64()),
    (pa.int8(), pa.uint64()),
    (pa.bool_(), pa.int8()),
    (pa.string(), pa.binary()),
    (pa.binary(3), pa.binary(4)),
    (pa.binary(3), pa.binary()),
    (pa.timestamp("us"), pa.timestamp("ns")),
    (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    (pa.timestamp("us", tz="UTC"), pa.timestamp("us", tz="Europe/Berlin")),
    (pa.date32(), pa.timestamp("us")),
    (pa.decimal128(9, 2), pa.decimal128(12, 2)),
    (pa.decimal128(9, 2), pa.decimal128(9, 3)),
    (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3)),
    (pa.list_(pa.int8(), 2), pa.list_(pa.int8())),
    (pa.list_(pa.int8()), pa.list_(pa.string())),
    (pa.list_(pa.int8()), pa.int8()),
    (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()})),
    (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.int8(), "b": pa.int8()})),
    (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.string()})),
    (
        pa.struct([("a", pa.int8()), ("a", pa.int16())]),
        pa.struct([("a", pa.int16()), ("a", pa.int8())]),
    ),
]


@pytest.mark.parametrize(("a", "b"), REFUSED, ids=str)
def test_types_without_a_safe_common_one_are_refused_with_both_and_both_sources(a, b):
    for one, two in ((a, b), (b, a)):
        sources = [("dataset 'd', 1.pq", pa.schema({"x": one})), ("2.pq", pa.schema({"x": two}))]
        with pytest.raises(SchemaError) as caught:
            unify(sources)
        said = f"column 'x' is {plain(one)} in dataset 'd', 1.pq, but {plain(two)} in 2.pq"
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (pa.timestamp("ns", tz="UTC"), [1, None, -5]),
        (pa.decimal128(9, 2), [decimal.Decimal("1.25"), None]),
        (pa.list_(element(pa.float32()), 2), [[1.5, 2.5], None]),
        (pa.map_(pa.string(), pa.int8()), [[("k", 1)], None]),
    ],
    ids=str,
)
def test_equal_types_pass_as_they_are(kind, rows):
    schema = unify([("a", pa.schema({"x": kind})), ("b", pa.schema({"x": kind}))])
    assert schema.field("x").type == kind
    batch = pa.record_batch({"x": pa.array(rows, kind)})
    assert conform(batch, schema, "here") == batch


# Plain types


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.dictionary(pa.int8(), pa.binary_view()), pa.binary()),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), pa.list_(element(pa.string()))),
        (
            pa.large_list(pa.field("item", pa.int8(), False)),
            pa.large_list(element(pa.int8(), False)),
        ),
        (pa.list_(pa.string_view(), 2), pa.list_(element(pa.string()), 2)),
        (
            pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.string_view())),
            pa.map_(pa.string(), pa.list_(element(pa.string()))),
        ),
        (
            pa.struct([pa.field("a", pa.list_(pa.int8()), False, {"k": "v"})]),
            pa.struct([pa.field("a", pa.list_(element(pa.int8())), False)]),
        ),
    ],
    ids=str,
)
def test_plain_types_have_no_dictionaries_views_metadata_or_own_names_of_elements(kind, expected):
    assert identical(plain(kind), expected)
    assert identical(plain(expected), expected)


def test_rows_of_dictionary_view_and_map_columns_come_out_plain():
    names = pa.array(["a", "b", None, "a"]).dictionary_encode()
    table = {
        "top": names,
        "list": pa.ListArray.from_arrays([0, 1, 1, 3, 4], names),
        "map": pa.array(
            [[("k", "v")], [], None, [("l", None)]],
            pa.map_(pa.string(), pa.dictionary(pa.int32(), pa.string())),
        ),
        "view": pa.array(["a", None, "long enough to be out of line", ""], pa.string_view()),
        "views": pa.array([["a"], None, [None], []], pa.list_(pa.string_view())),
    }
    batch = pa.record_batch(table)
    schema = unify([("a", batch.schema)])
    found = conform(batch, schema, "here")
    found.validate(full=True)
    assert found.to_pylist() == batch.to_pylist()
    assert [identical(found.column(f.name).type, f.type) for f in schema] == [True] * 5
    assert [str(f.type) for f in schema][0::3] == ["string", "string"]


# Whole schemas


def test_columns_keep_the_order_of_the_first_source_and_lose_all_metadata():
    first = pa.schema(
        [pa.field("b", pa.int8(), metadata={"k": "v"}), ("a", pa.string())], {"m": "n"}
    )
    second = pa.schema([("a", pa.string()), ("b", pa.int8())])
    found = unify([("first", first), ("second", second)])
    assert found.equals(pa.schema([("b", pa.int8()), ("a", pa.string())]), check_metadata=True)


def test_a_column_is_nullable_where_it_is_so_in_any_source_at_any_depth():
    def schema(top: bool, inner: bool) -> pa.Schema:
        return pa.schema(
            [
                pa.field("x", pa.int8(), top),
                pa.field("l", pa.list_(element(pa.int8(), inner)), False),
                pa.field("s", pa.struct([pa.field("y", pa.int8(), inner)]), False),
            ]
        )

    never, both = schema(False, False), schema(True, True)
    assert unify([("a", never), ("b", never)]) == never
    for pair in ((never, both), (both, never), (schema(True, False), schema(False, True))):
        assert unify([("a", pair[0]), ("b", pair[1])]) == both


def test_names_of_list_elements_do_not_make_two_types_and_rows_take_the_common_one():
    item = pa.schema({"x": pa.list_(pa.field("item", pa.int32()))})
    own = pa.schema({"x": pa.list_(pa.field("element", pa.int32()))})
    for sources in ([("a", item), ("b", own)], [("a", own), ("b", item)]):
        schema = unify(sources)
        assert identical(schema.field("x").type, own.field("x").type)
        for _, source in sources:
            batch = pa.record_batch([pa.array([[1], None], source.field("x").type)], schema=source)
            found = conform(batch, schema, "here")
            assert identical(found.column(0).type, own.field("x").type)
            assert found.column(0).to_pylist() == [[1], None]


def test_one_error_lists_every_column_with_both_types_and_both_sources():
    first = pa.schema({"id": pa.int64(), "text": pa.string(), "only": pa.int8(), "fine": pa.int8()})
    second = pa.schema(
        {"id": pa.string(), "fine": pa.int16(), "text": pa.binary(), "new": pa.bool_()}
    )
    with pytest.raises(SchemaError) as caught:
        unify([("dataset 'a', 1.parquet", first), ("dataset 'b', 2.parquet", second)])
    assert sorted(str(caught.value).splitlines()) == sorted(
        [
            "the sources do not have one schema:",
            "  column 'only' is int8 in dataset 'a', 1.parquet, but missing in dataset 'b', "
            "2.parquet, which has id, fine, text, new",
            "  column 'id' is int64 in dataset 'a', 1.parquet, but string in dataset 'b', "
            "2.parquet",
            "  column 'text' is string in dataset 'a', 1.parquet, but binary in dataset 'b', "
            "2.parquet",
            "  column 'new' is bool in dataset 'b', 2.parquet, but missing in dataset 'a', "
            "1.parquet",
            "Choose common columns with `columns`, or convert one side.",
        ]
    )


def test_an_error_shows_a_type_that_its_source_really_has_and_each_column_once():
    kinds = {"1.pq": pa.uint32(), "2.pq": pa.int32(), "3.pq": pa.string(), "4.pq": pa.bool_()}
    with pytest.raises(SchemaError) as caught:
        unify((name, pa.schema({"x": kind})) for name, kind in kinds.items())
    lines = str(caught.value).splitlines()
    assert [line for line in lines if "'x'" in line] == [
        "  column 'x' is int32 in 2.pq, but string in 3.pq"
    ]


def test_a_first_source_without_columns_is_not_passed_over():
    with pytest.raises(SchemaError) as caught:
        unify([("1.pq", pa.schema([])), ("2.pq", pa.schema({"x": pa.int8()}))])
    assert "column 'x' is int8 in 2.pq, but missing in 1.pq" in str(caught.value)


# Rows


def test_rows_that_fit_already_are_not_copied():
    texts = pa.array([["a"], []], pa.list_(element(pa.string())))
    batch = pa.record_batch({"x": pa.array([1, 2]), "y": texts})
    schema = unify([("a", batch.schema)])
    found = conform(batch, schema, "here")
    for before, after in zip(batch.columns, found.columns, strict=True):
        assert [b and b.address for b in before.buffers()] == [
            b and b.address for b in after.buffers()
        ]


def test_columns_are_taken_by_place_and_named_by_the_schema():
    batch = pa.record_batch({"body": pa.array(["a"]), "n": pa.array([1], pa.int8())})
    schema = pa.schema({"text": pa.string(), "number": pa.int64()})
    assert conform(batch, schema, "here").to_pylist() == [{"text": "a", "number": 1}]


def test_a_value_that_does_not_fit_is_an_error_that_names_place_column_and_types():
    batch = pa.record_batch({"x": pa.array([1, 300])})
    with pytest.raises(SchemaError) as caught:
        conform(batch, pa.schema({"x": pa.int8()}), "dataset 'd', f.parquet")
    said = str(caught.value)
    assert said.startswith(
        "dataset 'd', f.parquet: column 'x' of type int64 cannot be brought to int8: "
    )
    assert "300" in said


def test_a_null_in_a_column_without_nulls_is_an_error_that_names_the_column():
    batch = pa.record_batch({"x": pa.array([1, None, None])})
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    with pytest.raises(SchemaError) as caught:
        conform(batch, schema, "dataset 'd', f.parquet")
    assert str(caught.value) == (
        "dataset 'd', f.parquet: column 'x' has 2 null(s), but its schema says that it has none; "
        "repair the file"
    )


def test_an_empty_dictionary_below_nulls_conforms():
    words = pa.dictionary(pa.int16(), pa.string())
    found = pa.array([None, None], pa.list_(pa.struct([("b", words)]), 2))
    wanted = pa.schema([("x", pa.list_(pa.field("element", pa.struct([("b", pa.string())])), 2))])
    batch = pa.RecordBatch.from_arrays([found], ["x"])
    assert conform(batch, wanted, "here").column(0).to_pylist() == [None, None]
