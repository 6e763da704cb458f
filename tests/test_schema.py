"""Safe widening: its laws, what it refuses and how rows come under the common schema."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.arrow_types import plain, widen
from pipeline.schema import SchemaError, Source, conform, find, taken, unify

relaxed = settings(deadline=None, max_examples=60)

SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
TEXTS = [pa.string(), pa.large_string()]
BYTES = [pa.binary(), pa.large_binary()]
TIMES = [pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")]
SPANS = [pa.duration(unit) for unit in ("s", "ms", "us", "ns")]
DECIMALS = [
    pa.decimal32(8, 2),
    pa.decimal64(18, 4),
    pa.decimal128(9, 2),
    pa.decimal128(38, 20),
    pa.decimal256(60, 0),
]
OTHERS = [pa.bool_(), pa.date32(), pa.timestamp("us", tz="UTC"), pa.binary(3)]
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


@st.composite
def maps_of(draw: Any, inner: st.SearchStrategy[pa.DataType]) -> pa.DataType:
    return pa.map_(draw(st.sampled_from(TEXTS)), draw(inner))


def nullable(family: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(family, family, family, st.just(NULL))


leaf_families = st.sampled_from(
    [
        *(SIGNED, UNSIGNED, SIGNED + UNSIGNED, FLOATS, TEXTS, BYTES, TIMES, SPANS, DECIMALS),
        *([kind] for kind in OTHERS),
    ]
).map(st.sampled_from)

families = st.recursive(
    leaf_families.map(nullable),
    lambda inner: st.one_of(
        inner.map(lists_of),
        inner.map(pairs_of),
        inner.map(maps_of),
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
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, sorted_fields(kind.item_type))
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
        first, last = datetime.datetime(1678, 1, 1), datetime.datetime(2262, 1, 1)
        found = st.datetimes(first, last, timezones=st.just(zone))
        found = found.map(lambda time: time.replace(microsecond=0))
    elif pa.types.is_duration(kind):
        found = st.integers(-(10**9), 10**9).map(lambda n: datetime.timedelta(seconds=n))
    elif pa.types.is_decimal(kind):
        found = st.decimals("-99999", "99999", places=kind.scale)
    elif pa.types.is_map(kind):
        found = st.dictionaries(values(kind.key_type).filter(bool), values(kind.item_type))
        found = found.map(lambda items: list(items.items()))
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
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, pa.field("v", dressed(kind.item_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, dressed(f.type), metadata={"id": "1"}) for f in kind])
    if pa.types.is_nested(kind):
        inner = pa.field("item", dressed(kind.value_type), metadata={"id": "2"})
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        view = pa.large_list_view if pa.types.is_large_list(kind) else pa.list_view
        return view(inner.with_type(kind.value_type))
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


@settings(deadline=None, max_examples=100)
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
        found = conform(batch.slice(1), ["x"], schema, "here")
        found.validate(full=True)
        assert identical(found.column("x").type, schema.field("x").type)
        assert found.column("x").to_pylist() == pa.array(rows, kind).to_pylist()[1:]


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
        (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns")),
        (pa.duration("us"), pa.duration("ms"), pa.duration("us")),
        (pa.time32("s"), pa.time64("us"), pa.time64("us")),
        (pa.decimal128(9, 2), pa.decimal128(12, 2), pa.decimal128(12, 2)),
        (pa.decimal128(9, 2), pa.decimal128(9, 3), pa.decimal128(10, 3)),
        (pa.decimal32(9, 2), pa.decimal32(9, 3), pa.decimal64(10, 3)),
        (pa.decimal128(38, 0), pa.decimal128(9, 3), pa.decimal256(41, 3)),
        (
            pa.map_(pa.string(), pa.int8()),
            pa.map_(pa.large_string(), pa.int16()),
            pa.map_(pa.large_string(), pa.int16()),
        ),
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
    (pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
    (pa.timestamp("us", tz="UTC"), pa.timestamp("us", tz="Europe/Berlin")),
    (pa.date32(), pa.timestamp("us")),
    (pa.decimal256(76, 0), pa.decimal128(9, 2)),
    (pa.decimal128(9, 2), pa.int8()),
    (pa.timestamp("us"), pa.duration("us")),
    (pa.map_(pa.string(), pa.int8()), pa.map_(pa.int8(), pa.int8())),
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
    assert conform(batch, batch.schema.names, schema, "here") == batch


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
    found = conform(batch, batch.schema.names, schema, "here")
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
            found = conform(batch, batch.schema.names, schema, "here")
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
            "2.parquet (`schema: {id: string}`, with the source's own name, gives one side that "
            "type)",
            "  column 'text' is string in dataset 'a', 1.parquet, but binary in dataset 'b', "
            "2.parquet",
            "  column 'new' is bool in dataset 'b', 2.parquet, but missing in dataset 'a', "
            "1.parquet, which has id, text, only, fine",
            "Choose common columns with `columns`, set missing_columns: null (null there) or drop "
            "(left out), give a column of one side another type with `schema`, or convert one "
            "side.",
        ]
    )


def test_an_error_shows_a_type_that_its_source_really_has_and_each_column_once():
    kinds = {"1.pq": pa.uint32(), "2.pq": pa.int32(), "3.pq": pa.string(), "4.pq": pa.bool_()}
    with pytest.raises(SchemaError) as caught:
        unify((name, pa.schema({"x": kind})) for name, kind in kinds.items())
    lines = str(caught.value).splitlines()
    assert [line for line in lines if "'x'" in line] == [
        "  column 'x' is int32 in 2.pq, but string in 3.pq "
        "(`schema: {x: string}`, with the source's own name, gives one side that type)"
    ]


def test_a_first_source_without_columns_is_not_passed_over():
    with pytest.raises(SchemaError) as caught:
        unify([("1.pq", pa.schema([])), ("2.pq", pa.schema({"x": pa.int8()}))])
    said = "column 'x' is int8 in 2.pq, but missing in 1.pq, which has no columns"
    assert said in str(caught.value)


# Rows


def test_rows_that_fit_already_are_not_copied():
    texts = pa.array([["a"], []], pa.list_(element(pa.string())))
    batch = pa.record_batch({"x": pa.array([1, 2]), "y": texts})
    schema = unify([("a", batch.schema)])
    found = conform(batch, batch.schema.names, schema, "here")
    for before, after in zip(batch.columns, found.columns, strict=True):
        assert [b and b.address for b in before.buffers()] == [
            b and b.address for b in after.buffers()
        ]


def test_columns_are_taken_by_their_paths_and_named_by_the_schema():
    batch = pa.record_batch({"n": pa.array([1], pa.int8()), "body": pa.array(["a"])})
    schema = pa.schema({"text": pa.string(), "number": pa.int64()})
    found = conform(batch, ["body", "n"], schema, "here")
    assert found.to_pylist() == [{"text": "a", "number": 1}]


def test_a_value_that_does_not_fit_is_an_error_that_names_place_column_and_types():
    batch = pa.record_batch({"x": pa.array([1, 300])})
    with pytest.raises(SchemaError) as caught:
        conform(batch, ["x"], pa.schema({"x": pa.int8()}), "dataset 'd', f.parquet")
    said = str(caught.value)
    assert said.startswith(
        "dataset 'd', f.parquet: column 'x' of type int64 cannot be brought to int8: "
    )
    assert "300" in said


def test_a_null_in_a_column_without_nulls_is_an_error_that_names_the_column():
    batch = pa.record_batch({"x": pa.array([1, None, None])})
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    with pytest.raises(SchemaError) as caught:
        conform(batch, batch.schema.names, schema, "dataset 'd', f.parquet")
    assert str(caught.value) == (
        "dataset 'd', f.parquet: column 'x' has 2 null(s), but its schema says that it has none; "
        "repair the file"
    )


def test_an_empty_dictionary_below_nulls_conforms():
    words = pa.dictionary(pa.int16(), pa.string())
    found = pa.array([None, None], pa.list_(pa.struct([("b", words)]), 2))
    wanted = pa.schema([("x", pa.list_(pa.field("element", pa.struct([("b", pa.string())])), 2))])
    batch = pa.RecordBatch.from_arrays([found], ["x"])
    assert conform(batch, batch.schema.names, wanted, "here").column(0).to_pylist() == [None, None]


# Columns that some sources lack


A = ("dataset 'a', 1.pq", pa.schema([("x", pa.int8()), ("s", pa.struct([("p", pa.int8())]))]))
B = (
    "dataset 'b', 2.pq",
    pa.schema(
        [
            ("s", pa.struct([("q", pa.string()), ("p", pa.int16())])),
            pa.field("y", pa.string(), nullable=False),
        ]
    ),
)


def test_columns_and_fields_that_are_lacking_are_null_there_and_come_last():
    found = unify([A, B], "null")
    both = pa.struct([("p", pa.int16()), ("q", pa.string())])
    assert found == pa.schema([("x", pa.int8()), ("s", both), ("y", pa.string())])
    assert all(field.nullable for field in found)
    batch = pa.record_batch(
        {"x": pa.array([3], pa.int8()), "s": pa.array([{"p": 1}], A[1][1].type)}
    )
    rows = conform(batch, found.names, found, "here")
    rows.validate(full=True)
    assert rows.to_pylist() == [{"x": 3, "s": {"p": 1, "q": None}, "y": None}]


def test_columns_and_fields_that_are_lacking_are_dropped_everywhere():
    found = unify([A, B], "drop")
    assert found == pa.schema([("s", pa.struct([("p", pa.int16())]))])
    batch = pa.record_batch({"s": pa.array([{"p": 1, "q": "t"}, None], B[1][0].type)})
    assert conform(batch, ["s"], found, "here").to_pylist() == [{"s": {"p": 1}}, {"s": None}]


def test_dropping_every_column_is_an_error_that_shows_both_sides():
    with pytest.raises(SchemaError) as caught:
        unify(
            [("1.pq", pa.schema({"x": pa.int8()})), ("2.pq", pa.schema({"y": pa.int8()}))], "drop"
        )
    said = "no column is in all of them: 1.pq has x; the first that lacks one is 1.pq"
    assert said in str(caught.value)


def test_a_dropped_column_may_be_of_any_type_and_name():
    third = ("3.pq", pa.schema({"y": pa.int8()}))
    sources = [
        ("1.pq", pa.schema({"x": pa.int8(), "y": pa.int8(), "mix_row": pa.int8()})),
        ("2.pq", pa.schema({"x": pa.string(), "y": pa.int8()})),
        third,
    ]
    assert unify(sources, "drop") == third[1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), leaf_families.flatmap(lambda f: f))))
def test_what_is_null_where_it_lacks_does_not_hang_on_the_order_of_sources(sources):
    def outcome(order: list[Any]) -> Any:
        listed = [("s", pa.schema({"s": pa.struct(list(fields.items()))})) for fields in order]
        try:
            return sorted_fields(pa.struct(list(unify(listed, "null"))))
        except SchemaError:
            return None

    # Of three types that go by two, one refuses in every order: which is told may differ.
    assert outcome(sources) == outcome(sources[::-1])


# Names that the shards use


def test_a_column_named_like_provenance_is_told_beside_all_else():
    first = pa.schema({"mix_row": pa.int64(), "x": pa.int8()})
    second = pa.schema({"mix_row": pa.string(), "x": pa.string()})
    with pytest.raises(SchemaError) as caught:
        unify([("1.pq", first), ("2.pq", second)])
    lines = str(caught.value).splitlines()
    assert lines[1] == (
        "  column 'mix_row' in 1.pq has a name that the shards use for where a row comes from; "
        "give it another with `columns: {my_mix_row: mix_row, ..}`"
    )
    assert lines[2].startswith("  column 'x' is int8 in 1.pq, but string in 2.pq")


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (pa.int64(), pa.float32(), "float64"),
        (pa.uint64(), pa.int8(), "int64"),
        (pa.bool_(), pa.string(), "string"),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), "timestamp[us, tz=UTC]"),
    ],
    ids=str,
)
def test_an_obvious_way_out_is_a_type_that_schema_gives(a, b, kind):
    with pytest.raises(SchemaError) as caught:
        unify([("1.pq", pa.schema({"x": a})), ("2.pq", pa.schema({"x": b}))])
    assert (
        f"(`schema: {{x: {kind}}}`, with the source's own name, gives one side that type)"
        in str(caught.value)
    )


# Paths


NESTED = pa.schema(
    [
        ("meta", pa.struct([("body", pa.struct([("text", pa.string()), ("n", pa.int8())]))])),
        ("meta.body.n", pa.int64()),
        ("tags", pa.list_(pa.struct([("t", pa.string())]))),
        pa.field("a.b", pa.struct([pa.field("c", pa.int8(), False)]), False),
        ("meta.x", pa.struct([("y.z", pa.int8())])),
        ("void", pa.null()),
    ]
)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("meta", [0]),
        ("meta.body", [0, 0]),
        ("meta.body.text", [0, 0, 0]),
        ("meta.body.n", [1]),
        ("a.b", [3]),
        ("a.b.c", [3, 0]),
        ("meta.x.y.z", [4, 0]),
        ("void.any.thing", [5]),
        ("a", None),
        ("meta.nothing", None),
        ("tags.t", None),
        ("", None),
        (".", None),
    ],
)
def test_a_path_leads_into_structs_and_a_literal_name_goes_first(path, place):
    assert find(NESTED, path) == place


def test_nested_columns_come_out_with_the_nulls_of_what_they_lie_in():
    kind = pa.struct([("body", pa.struct([pa.field("text", pa.string(), False)]))])
    rows = [{"body": {"text": "a"}}, None, {"body": None}, {"body": {"text": "b"}}]
    batch = pa.record_batch({"meta": pa.array(rows, kind)}).slice(1)
    source = Source("here", batch.schema)
    (found,) = taken("d", [source], {"text": "meta.body.text"}, None)
    assert found.schema == pa.schema({"text": pa.string()})
    schema = unify([found])
    rows = conform(batch, ["meta.body.text"], schema, "here")
    assert rows.to_pylist() == [{"text": None}, {"text": None}, {"text": "b"}]


def test_a_nested_column_allows_no_nulls_where_nothing_around_it_does():
    (found,) = taken("d", [Source("here", NESTED)], {"c": "a.b.c"}, None)
    assert found.schema == pa.schema([pa.field("c", pa.int8(), nullable=False)])


def test_names_alone_do_not_lead_into_structs():
    batch = pa.record_batch({"a": pa.array([{"b": 1}])})
    schema = pa.schema({"a.b": pa.int64()})
    assert conform(batch, ["a.b"], schema, "here").to_pylist() == [{"a.b": 1}]
    assert conform(batch, ["a.b"], schema, "here", nested=False).to_pylist() == [{"a.b": None}]
    assert conform(batch, [None], schema, "here").to_pylist() == [{"a.b": None}]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("text", "the file has meta, meta.body.n, tags, a.b, meta.x, void"),
        ("meta.body.txt", "'meta.body' has text, n"),
        ("meta.bdy.text", "'meta' has body"),
        (
            "tags.t",
            "'tags' is list<item: struct<t: string>>, and a path leads into structs alone",
        ),
        ("meta.body.text.x", "'meta.body.text' is string, and a path leads into structs alone"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error_that_lists_what_is_there(path, said):
    with pytest.raises(SchemaError) as caught:
        taken("d", [Source("dataset 'd', f.pq", NESTED)], {"mine": path, "fine": "tags"}, None)
    assert str(caught.value) == (
        f"dataset 'd', f.pq: no column {path!r} (asked for as 'mine'); {said}"
    )


def test_a_path_that_only_some_files_have_is_as_missing_columns_says():
    bare = Source("dataset 'd', 1.pq", pa.schema({"id": pa.int8()}))
    full = Source("dataset 'd', 2.pq", pa.schema({"id": pa.int8(), "body": pa.string()}))
    columns = {"id": "id", "text": "body"}
    with pytest.raises(SchemaError, match=r"1.pq: no column 'body' .*the file has id"):
        taken("d", [full, bare], columns, None)
    for missing, names in (("null", ["id", "text"]), ("drop", ["id"])):
        assert unify(taken("d", [full, bare], columns, None, missing), missing).names == names
        with pytest.raises(SchemaError, match="no column 'body'"):
            taken("d", [bare, bare], columns, None, missing)


# Types that a config gives


@pytest.mark.parametrize("missing", ["error", "null", "drop"])
def test_a_path_into_a_list_is_an_error_whatever_other_files_have(missing):
    full = Source("1.pq", pa.schema({"a": pa.struct([("b", pa.int8())])}))
    other = Source("2.pq", pa.schema({"a": pa.list_(pa.int8())}))
    with pytest.raises(SchemaError, match=r"^2.pq: no column 'a.b' .*'a' is list<item: int8>, and"):
        taken("d", [full, other], {"b": "a.b"}, None, missing)


def test_types_that_are_given_are_what_is_unified():
    source = Source("here", pa.schema({"x": pa.int32(), "y": pa.string(), "z": pa.date64()}))
    types = {"x": pa.float64(), "y": pa.list_(pa.int8()), "w": pa.int8()}
    with pytest.raises(SchemaError) as caught:
        taken("d", [source], None, types)
    assert str(caught.value).splitlines() == [
        "here: column 'y' of type string can never be brought to list<item: int8>, which `schema` "
        "gives it: string is nothing like list<element: int8>",
        "dataset 'd': `schema` gives a type to 'w', but no file has it; the files have x, y, z",
    ]
    (found,) = taken("d", [source], {"a": "x"}, {"x": pa.float64()})
    assert found.schema == pa.schema({"a": pa.float64()})


def test_a_given_type_reaches_what_a_path_takes_of_it():
    kind = pa.struct([("n", pa.string()), ("more", pa.string())])
    batch = pa.record_batch({"meta": pa.array([{"n": "7"}, None, {"n": None}], kind)})
    types = {"meta": pa.struct([pa.field("n", pa.int16(), nullable=False)])}
    (found,) = taken("d", [Source("here", batch.schema)], {"n": "meta.n"}, types)
    assert found.schema == pa.schema({"n": pa.int16()})
    rows = conform(batch, ["meta.n"], unify([found]), "here", types)
    assert rows.to_pylist() == [{"n": 7}, {"n": None}, {"n": None}]
    with pytest.raises(SchemaError, match=r"no column 'meta.more' .*'meta' has n"):
        taken("d", [Source("here", batch.schema)], {"n": "meta.more"}, types)


def test_what_would_lie_in_a_column_of_nulls_is_null_whatever_type_it_is_given():
    batch = pa.record_batch({"meta": pa.nulls(2)})
    for types in (None, {"meta": pa.struct([("n", pa.int16())])}):
        (found,) = taken("d", [Source("here", batch.schema)], {"n": "meta.n"}, types)
        schema = unify([found, ("there", pa.schema({"n": pa.int64()}))])
        assert schema.field("n").type == pa.int64()
        rows = conform(batch, ["meta.n"], schema, "here", types)
        assert rows.column(0).to_pylist() == [None, None]


def test_a_field_that_is_given_a_type_and_that_no_file_has_is_named_by_its_path():
    kind = pa.struct([("a", pa.int8()), ("l", pa.list_(pa.struct([("b", pa.int8())])))])
    given = pa.struct([("a", pa.int8()), ("l", pa.list_(pa.struct([("c", pa.int8())])))])
    with pytest.raises(SchemaError, match=r"gives a type to 's.l.c', but no file has it"):
        taken("d", [Source("here", pa.schema({"s": kind}))], None, {"s": given})


def test_values_must_fit_the_given_type_even_where_the_common_one_is_wider():
    batch = pa.record_batch({"x": pa.array(["1", "300"])})
    schema = pa.schema({"x": pa.int64()})
    with pytest.raises(SchemaError) as caught:
        conform(batch, ["x"], schema, "dataset 'd', f.pq", {"x": pa.int8()})
    said = str(caught.value)
    assert said.startswith("dataset 'd', f.pq: column 'x' of type string cannot be brought to int8")
    assert "300" in said
    assert conform(batch.slice(0, 1), ["x"], schema, "here", {"x": pa.int8()})[0].to_pylist() == [1]


def test_a_time_beyond_the_reach_of_the_common_unit_is_an_error():
    batch = pa.record_batch({"x": pa.array([datetime.datetime(3000, 1, 1)], pa.timestamp("s"))})
    schema = unify([("a", batch.schema), ("b", pa.schema({"x": pa.timestamp("ns")}))])
    with pytest.raises(SchemaError, match=r"timestamp\[s\] cannot be brought to timestamp\[ns\]"):
        conform(batch, ["x"], schema, "here")
