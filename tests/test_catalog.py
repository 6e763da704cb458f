"""Which files a dataset is made of, in which order, and what is said of those that will not do."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from pipeline.catalog import Catalog, CatalogError, DatasetSpec, scan_datasets
from pipeline.formats import ReadOptions
from pipeline.formats.parquet import scan
from pipeline.schema import SchemaError


def put(path: Path, rows: int | pa.Table = 1) -> Path:
    """A small Parquet file, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": range(rows)}) if isinstance(rows, int) else rows, path)
    return path


def put_all(folder: Path, *names: str) -> None:
    for name in names:
        put(folder / name)


def catalog(base: Path, *paths: str, **spec: Any) -> Catalog:
    return scan_datasets([DatasetSpec("web", paths, **spec)], str(base))


def found(base: Path, *paths: str) -> list[str]:
    return [file.path for file in catalog(base, *paths).datasets[0].files]


def refusal(base: Path, *paths: str, kind: type[Exception] = CatalogError, **spec: Any) -> str:
    with pytest.raises(kind) as caught:
        catalog(base, *paths, **spec)
    return str(caught.value)


# Order


def test_all_that_is_wrong_with_the_sources_is_told_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    specs = [
        DatasetSpec("a", ("missing.parquet",)),
        DatasetSpec("b", ("empty",)),
        DatasetSpec("c", ("*.csv",)),
        DatasetSpec("d", ("torn.parquet",)),
    ]
    with pytest.raises(CatalogError) as caught:
        scan_datasets(specs, str(tmp_path))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"dataset '{name}'" for name in "abcd"]
    many = [DatasetSpec(f"x{i}", ("nothing",)) for i in range(50)]
    with pytest.raises(CatalogError, match=r"\.\. and 30 more$"):
        scan_datasets(many, str(tmp_path))


def test_files_of_a_folder_are_ordered_by_the_bytes_of_their_path_whatever_came_first(tmp_path):
    names = ["Z", "a", "a-b", "a.b", "a/1", "a/10", "a/2", "a0", "b/c/d", "é", "z", "ﬀ", "𝒳"]
    files = [f"{name}.parquet" for name in names]
    expected = sorted(files, key=str.encode)
    assert expected != sorted(files, key=str.lower)
    for seed in range(3):
        order = files.copy()
        random.Random(seed).shuffle(order)
        folder = tmp_path / str(seed)
        put_all(folder / "data", *order)
        assert found(folder, "data") == [f"data/{name}" for name in expected]
        assert found(folder, "data/**/*.parquet") == [f"data/{name}" for name in expected]


def test_a_list_of_paths_keeps_its_order_and_each_is_ordered_in_itself(tmp_path):
    put_all(tmp_path, "z/2.parquet", "z/1.parquet", "a.parquet", "g/b.pq", "g/a.pq", "m.pq")
    paths = ["z", "m.pq", "g/*.pq", "a.parquet"]
    assert found(tmp_path, *paths) == [
        "z/1.parquet",
        "z/2.parquet",
        "m.pq",
        "g/a.pq",
        "g/b.pq",
        "a.parquet",
    ]


def test_paths_stay_as_they_were_written(tmp_path):
    put_all(tmp_path, "data/a.parquet")
    for written, path in [
        ("data", "data/a.parquet"),
        ("data/", "data/a.parquet"),
        ("./data", "./data/a.parquet"),
        (".", "./data/a.parquet"),
        ("data/../data/a.parquet", "data/../data/a.parquet"),
        (f"{tmp_path}/data", f"{tmp_path}/data/a.parquet"),
        (f"file://{tmp_path}/data", f"file://{tmp_path}/data/a.parquet"),
        (f"file://{tmp_path}/data/*", f"file://{tmp_path}/data/a.parquet"),
    ]:
        assert found(tmp_path, written) == [path]


def test_relative_paths_start_at_the_base_and_not_at_the_working_folder(tmp_path, monkeypatch):
    put_all(tmp_path / "base", "a.parquet", "sub/b.parquet")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert found(tmp_path / "base", "*.parquet") == ["a.parquet"]
    assert found(tmp_path / "base", "sub/*.parquet") == ["sub/b.parquet"]
    assert found(tmp_path / "elsewhere", "../base/*") == ["../base/a.parquet"]


# Globs


GLOB_FILES = [
    "a.parquet",
    "part-1.parquet",
    "part-10.parquet",
    "part-2.parquet",
    "part-x.parquet",
    "x/part-1.parquet",
    "x/y/part-1.parquet",
    "x/y/z/part-3.pq",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", GLOB_FILES[:5]),
        ("*.parquet", GLOB_FILES[:5]),
        ("part-*", GLOB_FILES[1:5]),
        ("part-?.parquet", ["part-1.parquet", "part-2.parquet", "part-x.parquet"]),
        ("part-[0-9].parquet", ["part-1.parquet", "part-2.parquet"]),
        ("part-[!0-9].parquet", ["part-x.parquet"]),
        ("part-[^0-9].parquet", ["part-x.parquet"]),
        ("part-[1x].parquet", ["part-1.parquet", "part-x.parquet"]),
        ("part-[x-z1]*", ["part-1.parquet", "part-10.parquet", "part-x.parquet"]),
        ("**", GLOB_FILES),
        ("**/*", GLOB_FILES),
        ("**/*.pq", ["x/y/z/part-3.pq"]),
        ("**/part-1.parquet", ["part-1.parquet", "x/part-1.parquet", "x/y/part-1.parquet"]),
        ("x/**", GLOB_FILES[5:]),
        ("x/**/part-1.parquet", ["x/part-1.parquet", "x/y/part-1.parquet"]),
        ("**/y/**/*", ["x/y/part-1.parquet", "x/y/z/part-3.pq"]),
        ("*/*", ["x/part-1.parquet"]),
        ("?/?/*.parquet", ["x/y/part-1.parquet"]),
        ("part**", GLOB_FILES[1:5]),
    ],
)
def test_globs_take_what_a_shell_would(tmp_path, pattern, expected):
    put_all(tmp_path / "data", *GLOB_FILES)
    assert found(tmp_path / "data", pattern) == expected
    assert found(tmp_path, f"data/{pattern}") == [f"data/{name}" for name in expected]


@pytest.mark.parametrize(
    "pattern",
    [
        "part",
        "*.parq",
        "[!p]art-1.parquet",
        "part-[2-1].parquet",
        "x[!a]part-1.parquet",
        "x*part-1*",
    ],
)
def test_a_glob_that_matches_nothing_says_where_it_looked(tmp_path, pattern):
    put_all(tmp_path, "data/part-1.parquet", "data/x/part-1.parquet")
    said = refusal(tmp_path, f"data/{pattern}")
    assert said.startswith(f"dataset 'web': data/{pattern}: ")
    if pattern != "part":
        assert f"the glob matches no file (looked at {tmp_path / 'data'};" in said
        assert "hidden files and names that begin with '_' are passed over" in said


def test_a_glob_below_a_missing_folder_or_a_file_is_refused_by_name(tmp_path):
    put_all(tmp_path, "a.parquet")
    assert refusal(tmp_path, "none/*.parquet").startswith("dataset 'web': none/*.parquet: the glob")
    said = refusal(tmp_path, "a.parquet/*.parquet")
    assert said.startswith("dataset 'web': ")
    assert "Not a directory" in said


def test_a_file_or_folder_whose_name_looks_like_a_glob_is_itself(tmp_path):
    put_all(tmp_path, "a[1].parquet", "a1.parquet", "d[*]/b.parquet", "dx/c.parquet")
    assert found(tmp_path, "a[1].parquet") == ["a[1].parquet"]
    assert found(tmp_path, "d[*]") == ["d[*]/b.parquet"]


# What is passed over


def test_markers_hidden_and_checksum_files_are_passed_over(tmp_path):
    put_all(
        tmp_path / "data",
        "a.parquet",
        "sub/b.parquet",
        ".hidden.parquet",
        ".git/c.parquet",
        "_temporary/0/d.parquet",
        "sub/_old/e.parquet",
        "_metadata.parquet",
        "_SUCCESS",
        ".a.parquet.crc",
        "a.parquet.crc",
    )
    expected = ["data/a.parquet", "data/sub/b.parquet"]
    assert found(tmp_path, "data") == expected
    assert found(tmp_path, "data/**") == expected
    assert found(tmp_path / "data", "*") == ["a.parquet"]


def test_what_lies_above_the_folder_does_not_hide_it(tmp_path):
    put_all(tmp_path, "_mine/.cache/a.parquet")
    assert found(tmp_path, "_mine/.cache") == ["_mine/.cache/a.parquet"]
    assert found(tmp_path, "_mine/.cache/*") == ["_mine/.cache/a.parquet"]
    assert found(tmp_path, "_mine/.cache/a.parquet") == ["_mine/.cache/a.parquet"]


def test_a_folder_named_as_a_file_as_spark_writes_it_is_one_data_set(tmp_path):
    parts = ["part-0.snappy.parquet", "part-1.snappy.parquet"]
    put_all(tmp_path / "data.parquet", *parts, "_SUCCESS", "._SUCCESS.crc", ".part-0.parquet.crc")
    put_all(tmp_path, "file.parquet", "plain/x.parquet")
    spark = [f"data.parquet/{part}" for part in parts]
    assert found(tmp_path, "data.parquet") == spark
    assert found(tmp_path, "data.parquet/") == spark
    assert found(tmp_path, "data.parquet/*.parquet") == spark
    # Left out of a glob, half of the data would be missing without a word.
    assert found(tmp_path, "*.parquet") == [*spark, "file.parquet"]


# Twice


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["d/a.parquet", "d/a.parquet"], "by 'd/a.parquet' and by 'd/a.parquet'"),
        (["d", "d/a.parquet"], "by 'd' and by 'd/a.parquet'"),
        (["d/*", "d/b*"], "by 'd/*' and by 'd/b*'"),
    ],
)
def test_a_file_matched_twice_is_refused_with_both_that_match(tmp_path, paths, said):
    put_all(tmp_path, "d/a.parquet", "d/b.parquet")
    found = refusal(tmp_path, *paths)
    assert found.startswith("dataset 'web': d/")
    assert f" is matched twice, {said}; an item may belong to a dataset only once" in found


@pytest.mark.parametrize("other", ["./a.parquet", "d/../a.parquet", "{base}/a.parquet", "link.pq"])
def test_one_file_under_two_names_is_matched_twice_too(tmp_path, other):
    put_all(tmp_path, "a.parquet", "d/b.parquet")
    (tmp_path / "link.pq").symlink_to("a.parquet")
    for second in (other.format(base=tmp_path), f"file://{tmp_path}/a.parquet"):
        said = refusal(tmp_path, "a.parquet", second)
        assert f"dataset 'web': {second} is matched twice, by 'a.parquet' and by {second!r}" in said
        assert "(it is the same file as a.parquet)" in said


def test_two_datasets_may_share_a_file(tmp_path):
    put(tmp_path / "a.parquet", 5)
    specs = [
        DatasetSpec("one", ("a.parquet",), (0, 2)),
        DatasetSpec("two", ("a.parquet",), (2, None)),
    ]
    assert [d.num_rows for d in scan_datasets(specs, str(tmp_path)).datasets] == [2, 3]


# Links and names


def test_linked_files_and_folders_are_followed(tmp_path):
    put_all(tmp_path, "store/one.parquet", "store/two.parquet")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.parquet").symlink_to("../store/one.parquet")
    (tmp_path / "data" / "a").symlink_to("../more")
    put_all(tmp_path, "more/two.parquet")
    assert found(tmp_path, "data") == ["data/a/two.parquet", "data/b.parquet"]


def test_a_link_that_leads_nowhere_is_missed_by_name(tmp_path):
    put_all(tmp_path, "data/a.parquet")
    (tmp_path / "data" / "b.parquet").symlink_to("gone.parquet")
    for path in ("data", "data/*", "data/b.parquet"):
        said = refusal(tmp_path, path)
        assert said.startswith("dataset 'web': ")
        assert "data/b.parquet: no such file" in said


def test_a_folder_that_links_to_itself_is_refused_and_not_read_over_and_over(tmp_path):
    put_all(tmp_path, "data/a.parquet")
    (tmp_path / "data" / "loop").symlink_to("../data")
    for path in ("data", "data/**/*.parquet"):
        said = f"{tmp_path}/data/loop links to a folder that it lies in; remove the link"
        assert refusal(tmp_path, path) == f"dataset 'web': {said}"


@pytest.mark.parametrize("name", ["größe", "数据", "a b", "100%", "a#b", "a?b", "a%20b", "q?x=1"])
def test_names_with_any_letters_work_as_paths_globs_and_uris(tmp_path, name):
    put(tmp_path / name / f"{name}.parquet", 3)
    expected = f"{name}/{name}.parquet"
    assert found(tmp_path, name) == [expected]
    assert found(tmp_path, expected) == [expected]
    assert found(tmp_path, f"{name}/*.parquet") == [expected]
    assert found(tmp_path, f"{name}/{name}*") == [expected]
    assert found(tmp_path, "**/*.parquet") == [expected]
    for uri in (f"file://{tmp_path}", f"file://{tmp_path}/**"):
        listed = catalog(tmp_path, uri)
        # What was listed can be opened again from what the catalog holds.
        again = catalog(tmp_path, listed.datasets[0].files[0].path)
        assert again.datasets == listed.datasets


@pytest.mark.parametrize("tail", ["a%20*.parquet", "a *.parquet", "a%20?.parquet", "a [b].parquet"])
def test_a_glob_in_a_uri_may_be_escaped_or_not_and_may_stand_before_a_query(tmp_path, tail):
    put_all(tmp_path / "with blank", "a b.parquet", "a.parquet")
    path = f"file://{tmp_path}/with%20blank"
    for folder in (path, path.replace("%20", " ")):
        assert found(tmp_path, f"{folder}/{tail}") == [f"{folder}/a%20b.parquet"]
        query = "?region=here"
        assert found(tmp_path, f"{folder}/{tail}{query}") == [f"{folder}/a%20b.parquet{query}"]
    assert found(tmp_path, f"{path}?region=here")[0] == f"{path}/a%20b.parquet?region=here"


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path):
    put_all(tmp_path, "data/a.parquet")
    shutil.copy(tmp_path / "data/a.parquet", os.fsencode(tmp_path / "data") + b"/\xff.parquet")
    assert refusal(tmp_path, "data") == (
        "dataset 'web': data: file name '\\udcff.parquet' is not UTF-8; rename the file"
    )


# What will not do


@pytest.mark.parametrize("path", ["none", "none.parquet", "data/none.parquet"])
def test_a_missing_path_is_named_with_where_it_was_looked_for(tmp_path, path):
    put_all(tmp_path, "data/a.parquet")
    assert refusal(tmp_path, path) == (
        f"dataset 'web': {path}: no such file or folder (looked at {tmp_path / path}); "
        "a relative path starts at the config's folder"
    )


def test_a_uri_of_no_known_scheme_names_the_dataset(tmp_path):
    said = refusal(tmp_path, "nope://bucket/x")
    assert said.startswith("dataset 'web': cannot open 'nope://bucket/x': ")


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    put_all(tmp_path, "data/_SUCCESS")
    assert refusal(tmp_path, "data") == (
        f"dataset 'web': data: the folder holds no data file (looked at {tmp_path / 'data'}; "
        "hidden files and names that begin with '_' are passed over)"
    )


@pytest.mark.parametrize("path", ["data", "data/*", "data/*.*"])
def test_an_unknown_suffix_in_a_folder_is_refused_with_the_way_out(tmp_path, path):
    put_all(tmp_path, "data/a.parquet", "data/b.txt", "data/c.parquet.tmp")
    said = refusal(tmp_path, path)
    start = f"dataset 'web': {path}: 2 file(s) that no format reads, first 'b.txt'; expected names"
    assert said.startswith(start)
    assert ".parquet" in said
    assert said.endswith("name the data files with a glob such as 'folder/*.parquet'")
    assert found(tmp_path, "data/*.parquet") == ["data/a.parquet"]


def test_a_file_of_unknown_suffix_is_refused(tmp_path):
    put_all(tmp_path, "b.txt")
    said = refusal(tmp_path, "b.txt")
    start = "dataset 'web': b.txt: no format reads this file; expected a name that ends in "
    assert said.startswith(start)
    assert ".parquet" in said[len(start) :]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "expected a Parquet file (its last bytes are b'PAR1'), but it is empty"),
        (b"PAR1 and then cut", "ends with b' cut' after 17 bytes"),
    ],
)
def test_one_damaged_file_among_many_is_named_with_its_dataset(tmp_path, data, said):
    put_all(tmp_path, *(f"data/{i:03d}.parquet" for i in range(100)), "ok/a.parquet")
    (tmp_path / "data/057.parquet").write_bytes(data)
    specs = [DatasetSpec("good", ("ok",)), DatasetSpec("bad", ("data",))]
    with pytest.raises(CatalogError) as caught:
        scan_datasets(specs, str(tmp_path))
    assert str(caught.value).startswith(f"dataset 'bad': {tmp_path / 'data/057.parquet'}: ")
    assert said in str(caught.value)


# Rows


def shape(dataset: Any) -> list[tuple[str, int, int]]:
    return [(Path(file.path).stem, file.num_rows, file.first_row) for file in dataset.files]


def files_of(folder: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        put(folder / f"{number}.parquet", size)


def test_a_file_is_recorded_as_it_was_scanned(tmp_path):
    path = put(tmp_path / "data/a.parquet", 7)
    file = catalog(tmp_path, "data").datasets[0].files[0]
    expected = scan(fs.LocalFileSystem(), str(path), ReadOptions())
    assert (file.num_rows, file.num_bytes, file.digest, file.first_row) == (
        7,
        os.path.getsize(path),
        expected.digest,
        0,
    )


def test_files_without_rows_are_fine_and_take_no_place(tmp_path):
    files_of(tmp_path / "data", 0, 3, 0, 4, 0)
    dataset = catalog(tmp_path, "data").datasets[0]
    assert (dataset.num_rows, dataset.rows) == (7, (0, 7))
    assert shape(dataset) == [("0", 0, 0), ("1", 3, 0), ("2", 0, 3), ("3", 4, 3), ("4", 0, 7)]


def test_a_dataset_without_rows_is_refused(tmp_path):
    files_of(tmp_path / "data", 0, 0)
    assert refusal(tmp_path, "data") == (
        "dataset 'web': its 2 file(s) hold no rows, first data/0.parquet; "
        "remove the dataset, or give it data"
    )


@pytest.mark.parametrize(
    ("rows", "taken", "firsts"),
    [
        ((0, None), (0, 12), [0, 5, 9]),
        ((2, None), (2, 12), [-2, 3, 7]),
        ((5, None), (5, 12), [-5, 0, 4]),
        ((6, 11), (6, 11), [-6, -1, 3]),
        ((0, 5), (0, 5), [0, 5, 9]),
        ((11, 12), (11, 12), [-11, -6, -2]),
    ],
)
def test_a_range_of_rows_moves_where_files_begin_even_below_zero(tmp_path, rows, taken, firsts):
    files_of(tmp_path / "data", 5, 4, 3)
    dataset = catalog(tmp_path, "data", rows=rows).datasets[0]
    assert dataset.rows == taken
    assert dataset.num_rows == taken[1] - taken[0]
    assert [file.first_row for file in dataset.files] == firsts
    # The file's row of a position is position - first_row; each position lies in one file.
    place = 0
    for position in range(dataset.num_rows):
        inside = [f for f in dataset.files if 0 <= position - f.first_row < f.num_rows]
        assert len(inside) == 1
        before = {"0": 0, "1": 5, "2": 9}[Path(inside[0].path).stem]
        place = before + position - inside[0].first_row
        assert place == rows[0] + position


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ((0, 13), "[0, 13]"),
        ((12, None), "[12, null]"),
        ((100, None), "[100, null]"),
        ((5, 5), "[5, 5]"),
        ((6, 5), "[6, 5]"),
    ],
)
def test_a_range_without_rows_or_past_the_end_is_refused_as_it_was_written(tmp_path, rows, shown):
    files_of(tmp_path / "data", 5, 4, 3)
    assert refusal(tmp_path, "data", rows=rows) == (
        f"dataset 'web': rows {shown} asked for, but its 3 file(s) hold 12 row(s); "
        "choose a range with rows in it, within [0, 12]"
    )


# Columns


TWO = pa.table({"body": ["a", "b"], "id": pa.array([1, 2], pa.int32()), "other": [1.5, 2.5]})


def test_columns_are_renamed_projected_and_put_in_order(tmp_path):
    put(tmp_path / "a.parquet", TWO)
    assert catalog(tmp_path, "a.parquet").schema.names == ["body", "id", "other"]
    found = catalog(tmp_path, "a.parquet", columns={"number": "id", "text": "body"})
    assert found.schema == pa.schema({"number": pa.int32(), "text": pa.string()})
    assert found.source_columns(found.datasets[0]) == ["id", "body"]
    twice = catalog(tmp_path, "a.parquet", columns={"one": "id", "two": "id"})
    assert twice.source_columns(twice.datasets[0]) == ["id", "id"]


def test_columns_bring_datasets_of_other_names_under_one_schema_by_name(tmp_path):
    put(tmp_path / "a.parquet", TWO)
    put(tmp_path / "b.parquet", pa.table({"text": ["c"], "number": [2**40]}))
    specs = [
        DatasetSpec("a", ("a.parquet",), columns={"number": "id", "text": "body"}),
        DatasetSpec("b", ("b.parquet",)),
    ]
    found = scan_datasets(specs, str(tmp_path))
    assert found.schema == pa.schema({"number": pa.int64(), "text": pa.string()})
    assert found.source_columns(found.datasets[1]) == ["number", "text"]
    assert found.index == {"a": 0, "b": 1}


def test_only_the_columns_asked_for_count_as_what_a_row_takes(tmp_path):
    rows = pa.table({"x": range(1000), "y": [os.urandom(100) for _ in range(1000)]})
    put(tmp_path / "a.parquet", rows)
    wide = catalog(tmp_path, "a.parquet").datasets[0].row_bytes
    slim = catalog(tmp_path, "a.parquet", columns={"x": "x"}).datasets[0].row_bytes
    assert slim < 12 < 100 < wide < 150


def test_a_missing_column_is_named_with_the_file_and_what_there_is(tmp_path):
    put(tmp_path / "d/a.parquet", TWO)
    put(tmp_path / "d/b.parquet", TWO.drop_columns(["body"]))
    assert refusal(tmp_path, "d", columns={"text": "body"}) == (
        "dataset 'web', d/b.parquet: no column 'body' (asked for as 'text'); the file has id, other"
    )


@pytest.mark.parametrize("columns", [None, {"b": "b"}])
def test_two_columns_of_one_name_are_refused(tmp_path, columns):
    twice = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    put(tmp_path / "a.parquet", twice)
    said = refusal(tmp_path, "a.parquet", columns=columns)
    assert said.startswith("dataset 'web', a.parquet: more than one column is named 'a'")


def test_sources_without_a_common_schema_are_refused_with_dataset_and_file(tmp_path):
    put(tmp_path / "a/1.parquet", pa.table({"x": [1]}))
    put(tmp_path / "b/1.parquet", pa.table({"x": pa.array([1], pa.int8())}))
    put(tmp_path / "b/2.parquet", pa.table({"x": ["text"]}))
    specs = [DatasetSpec("a", ("a",)), DatasetSpec("b", ("b",))]
    with pytest.raises(SchemaError) as caught:
        scan_datasets(specs, str(tmp_path))
    said = "column 'x' is int64 in dataset 'a', a/1.parquet, but string in dataset 'b', b/2.parquet"
    assert said in str(caught.value)


# Scale


def test_two_thousand_files_are_scanned_in_seconds(tmp_path):
    one = put(tmp_path / "one.parquet", 3)
    numbers = list(range(2000))
    random.Random(1).shuffle(numbers)
    (tmp_path / "data").mkdir()
    for number in numbers:
        shutil.copyfile(one, tmp_path / f"data/{number:04d}.parquet")
    started = time.monotonic()
    dataset = catalog(tmp_path, "data").datasets[0]
    assert time.monotonic() - started < 20
    assert dataset.num_rows == 6000
    assert shape(dataset) == [(f"{number:04d}", 3, 3 * number) for number in range(2000)]


# Lines


def lines(path: Path, *texts: str) -> str:
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def test_a_file_without_lines_says_nothing_of_columns(tmp_path):
    lines(tmp_path / "a.jsonl", '{"x": 1}')
    lines(tmp_path / "b.jsonl")
    found = scan_datasets([DatasetSpec("a", (str(tmp_path),))], str(tmp_path))
    assert found.schema == pa.schema([("x", pa.int64())])
    assert [file.num_rows for file in found.datasets[0].files] == [1, 0]


def test_sources_without_a_column_are_refused(tmp_path):
    path = lines(tmp_path / "a.jsonl", "{}", "{}")
    with pytest.raises(
        CatalogError, match=r"^the sources have no columns, first dataset 'a', .*a\."
    ):
        scan_datasets([DatasetSpec("a", (path,))], str(tmp_path))


def test_a_dataset_of_nothing_but_bad_lines_says_so(tmp_path):
    path = lines(tmp_path / "a.jsonl", "x", "y")
    spec = DatasetSpec("a", (path,), on_bad_line="skip")
    message = r"hold no rows but 2 line\(s\) that cannot be read, first .*a\.jsonl; remove the data"
    with pytest.raises(CatalogError, match=message):
        scan_datasets([spec], str(tmp_path))
