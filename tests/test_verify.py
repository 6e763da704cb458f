"""Holding a finished mix against its manifest, its mixture and its sources."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mixcore import DataBatcher
from pipeline.errors import MixError
from pipeline.manifest import Manifest, ManifestError
from pipeline.plan import Plan
from pipeline.reader import ShardReader
from pipeline.shard import ShardError, write_shard
from pipeline.storage import Folder
from pipeline.verify import Fault, origins, verify
from pipeline.writing import ShardWriter

from .mixes import digests, small_mix

BATCHES, PER_SHARD, SHARDS = 30, 7, 5

plenty = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mix")
    small_mix(folder, batches_per_shard=PER_SHARD, batches_per_row_group=3)
    return folder


@pytest.fixture(scope="session")
def mix(folder: Path) -> Path:
    """30 batches in 5 shards; only read."""
    return folder / "out"


@pytest.fixture
def copy(mix: Path, tmp_path: Path) -> Path:
    """The mix for a test that damages it; its sources are where they were."""
    return Path(shutil.copytree(mix, tmp_path / "copy"))


def shard_path(out: Path, shard: int) -> Path:
    return out / shard_file(shard)


def shard_file(shard: int) -> str:
    return f"shards/shard-{shard:08d}.parquet"


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def edit(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = document(out)
    change(found)
    (out / "manifest.json").write_text(json.dumps(found))


def edit_plan(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what the plan says of the manifest."""
    path = out / "_mix" / "plan.json"
    found = json.loads(path.read_text())
    change(found["manifest"])
    path.write_text(json.dumps(found))


def table_path(out: Path, kind: str) -> Path:
    return out / document(out)["tables"][kind]["path"]


def replace_table(out: Path, kind: str, change: Callable[[pa.Table], pa.Table]) -> str:
    """Change a table and fix the manifest up, as one who knows the format would; its path."""
    path = table_path(out, kind)
    pq.write_table(change(pq.read_table(path)), path)
    entry = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit(out, lambda found: found["tables"][kind].update(entry))
    return str(path.relative_to(out))


def set_value(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    place = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[row] = value
    return table.set_column(
        place, table.schema.field(name), pa.array(values, table.schema[place].type)
    )


def rewrite_shard(out: Path, shard: int, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a shard again with other rows, and fix up all digests and totals that tell of it."""
    path, plan = shard_path(out, shard), Plan.load(Folder.at(str(out)))
    _, batches = plan.layout.shard(shard)
    table = change(pq.read_table(path))
    groups = [
        table.slice(8 * start, 8 * (stop - start)) for start, stop in plan.layout.groups(batches)
    ]
    write_shard(str(path), plan.schema, plan.options, ShardWriter(plan).footer(shard), groups)
    data = path.read_bytes()
    replace_table(
        out,
        "shards",
        lambda rows: set_value(
            set_value(rows, "bytes", shard, len(data)),
            *("sha256", shard, hashlib.sha256(data).hexdigest()),
        ),
    )
    total = sum(pq.read_table(table_path(out, "shards"))["bytes"].to_pylist())
    edit(out, lambda found: found.update(num_bytes=total))


def only_fault(out: Path, **options: Any) -> Fault:
    faults = verify(str(out), **options)
    assert len(faults) == 1, faults
    return faults[0]


# Whole mixes.


def test_a_whole_mix_has_no_faults(mix: Path) -> None:
    before = digests(mix)
    assert verify(mix) == verify(str(mix), threads=1) == verify(f"file://{mix}") == []
    assert verify(str(mix), sources=True) == []
    assert digests(mix) == before


def test_a_mix_that_was_moved_has_no_faults(copy: Path) -> None:
    assert verify(copy, sources=True) == []


def test_a_mix_of_steps_and_of_another_compression_has_no_faults(tmp_path: Path) -> None:
    out, _ = small_mix(tmp_path, num_batches=24, batches_per_step=4, compression="gzip")
    assert verify(out, sources=True) == []


def test_keys_and_tables_of_a_newer_minor_format_are_no_faults(copy: Path) -> None:
    (copy / "_mix" / "hues.bin").write_bytes(b"green")
    entry = {"path": "_mix/hues.bin", "sha256": hashlib.sha256(b"green").hexdigest()}

    def newer(found: dict[str, Any]) -> None:
        found.update(format_version="2.7", hue="green")
        found["tables"].update(hues=entry)

    edit(copy, newer)
    edit_plan(copy, newer)
    assert verify(copy) == []
    (copy / "_mix" / "hues.bin").write_bytes(b"grey")
    assert only_fault(copy).file == "_mix/hues.bin"


def test_folders_without_a_mix_are_an_error_and_no_list_of_faults(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no manifest\.json, so no finished mix"):
        verify(tmp_path)


def test_a_mix_of_another_algorithm_is_not_judged(copy: Path) -> None:
    edit(copy, lambda found: found.update(algorithm_version=2))
    with pytest.raises(ManifestError, match=r"algorithm_version 2, but this mixshards knows 1; "):
        verify(copy)


# Damaged shards.


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_truncated_shard_is_a_fault_that_says_both_sizes(copy: Path, shard: int) -> None:
    path = shard_path(copy, shard)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    faults = verify(copy)
    assert {fault.file for fault in faults} == {shard_file(shard)}
    assert faults[0].reason == f"has {size // 2} bytes, expected {size}"
    assert "cannot be opened as Parquet" in faults[1].reason


def test_a_flipped_byte_anywhere_is_a_fault_of_its_shard_and_never_a_wrong_row(
    mix: Path, copy: Path
) -> None:
    whole = list(ShardReader(mix).batches())
    dice = random.Random(7)
    refused = 0
    for shard in (0, 4):
        path = shard_path(copy, shard)
        good = path.read_bytes()
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        places = [0, 3, 4, footer - 1, footer, len(good) - 8, len(good) - 1]
        places += dice.sample(range(4, footer), 20) + dice.sample(range(footer, len(good) - 8), 20)
        for at in places:
            bad = bytearray(good)
            bad[at] ^= dice.randrange(1, 256)
            path.write_bytes(bad)
            faults = verify(copy)
            assert faults, at
            assert {fault.file for fault in faults} == {shard_file(shard)}, at
            assert "has sha256" in faults[0].reason
            reader = ShardReader(copy)
            first, batches = reader.manifest.layout.shard(shard)
            for n in range(first, first + batches):
                try:
                    found = reader[n]
                except ShardError as error:
                    refused += path.name in str(error)
                else:
                    assert found == whole[n], (shard, at, n)
        path.write_bytes(good)
    assert refused > 150
    assert verify(copy) == []


def test_swapped_shards_are_faults_of_both(copy: Path) -> None:
    a, b = shard_path(copy, 1), shard_path(copy, 2)
    a.rename(copy / "aside")
    b.rename(a)
    (copy / "aside").rename(b)
    faults = verify(copy)
    assert {fault.file for fault in faults} == {shard_file(1), shard_file(2)}
    assert any(
        "holds batches 14 to 21 as shard 2; expected batches 7 to 14 as shard 1" in fault.reason
        for fault in faults
    )


def test_removed_emptied_and_replaced_shards_are_all_told_in_one_go(copy: Path) -> None:
    shard_path(copy, 0).unlink()
    shard_path(copy, 1).write_bytes(b"")
    shard_path(copy, 2).unlink()
    shard_path(copy, 2).mkdir()
    shard_path(copy, 3).write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    faults = verify(copy)
    reasons = {fault.file: fault.reason for fault in reversed(faults)}
    assert [*sorted(reasons)] == [shard_file(shard) for shard in range(4)]
    assert reasons[shard_file(0)] == "is missing"
    assert reasons[shard_file(1)].startswith("has 0 bytes, expected")
    assert str(faults[0]) == f"{faults[0].file}: {faults[0].reason}"


@pytest.mark.parametrize(
    "name", ["shard-00000005.parquet", "notes.txt", ".hidden", "below/shard-00000000.parquet"]
)
def test_a_stray_file_among_the_shards_is_named(copy: Path, name: str) -> None:
    path = copy / "shards" / name
    path.parent.mkdir(exist_ok=True)
    shutil.copy(shard_path(copy, 0), path)
    fault = only_fault(copy)
    assert fault == Fault(f"shards/{name}", "is a stray: the manifest names no such file")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mix_row", 3), ("mix_batch", 9), ("mix_epoch", 1), ("mix_dataset", "books")],
)
def test_changed_provenance_is_found_when_every_digest_agrees(
    copy: Path, name: str, value: Any
) -> None:
    rewrite_shard(copy, 1, lambda table: set_value(table, name, 8 * 3, value))
    fault = only_fault(copy)
    assert fault.file == shard_file(1)
    assert f"row group 1: column {name} is not what the mixture gives batches 10 to 13" in (
        fault.reason
    )


def test_a_shard_of_another_schema_is_found_when_every_digest_agrees(copy: Path) -> None:
    rewrite_shard(copy, 3, lambda table: table)
    assert verify(copy) == []
    path = shard_path(copy, 3)
    plan = Plan.load(Folder.at(str(copy)))
    other = plan.schema.set(0, plan.schema.field(0).with_name("txt"))
    table = pq.read_table(path).rename_columns(other.names)
    groups = [table.slice(0, 24), table.slice(24, 24), table.slice(48, 8)]
    write_shard(str(path), other, plan.options, ShardWriter(plan).footer(3), groups)
    faults = verify(copy)
    assert {fault.file for fault in faults} == {shard_file(3)}
    assert "'txt'" in faults[-1].reason
    assert "expected that of the manifest" in faults[-1].reason
    with pytest.raises(ShardError, match=r"shard-00000003\..*'txt'.*expected.*'text'"):
        ShardReader(copy)[21]


# A manifest that tells another mix.


@pytest.mark.parametrize(
    ("change", "file", "reason"),
    [
        (lambda d: d["datasets"][0].update(weight=4), "states", "boundary 1 is .*, the mixture's"),
        (lambda d: d["datasets"].reverse(), "sources", r"has the datasets .*, the manifest"),
        (lambda d: d["datasets"][2].update(rows=10), "sources", "'books': its files do not give"),
        (lambda d: d["mixture"].update(repeat=False), "shards", "dataset .* has .* rows, expected"),
        (lambda d: d["mixture"].update(rows_per_batch=None), "manifest", "None, .* gives 8"),
        (lambda d: d["mixture"].update(rows_per_batch=7), "manifest", "7, but the mixture gives 8"),
        (lambda d: d["layout"].update(batches_per_shard=8), "shards", "5 rows, but .* 4 shards"),
        (lambda d: d["layout"].update(num_batches=31), "shards", "row 4 has .* 28, 2, 16"),
        (lambda d: d["layout"].update(batches_per_row_group=2), "shards", "in 3 row groups, exp"),
        (lambda d: d.update(order_id="0" * 64), "manifest", "has order_id 0+, but what it says"),
        (lambda d: d["writer"].update(compression="lz4"), "manifest", "has bytes_id .*, but what"),
        (lambda d: d.update(bytes_id="0" * 64), "shards", r"another build: .*, expected 0{16}\.\."),
        (lambda d: d["schema"][0].update(type="binary"), "shards", "expected that of the manifest"),
        (lambda d: d.update(num_rows=241), "manifest", "has num_rows 241, but .* gives 240"),
        (lambda d: d.update(num_bytes="1"), "manifest", "has num_bytes '1', but the shards table"),
        (lambda d: d.update(num_shards=6), "manifest", "has num_shards 6, but .* gives 5"),
        (
            lambda d: d["tables"]["states"].update(bytes=7),
            "manifest",
            r"has tables\.states\.bytes 7, but the file has \d+",
        ),
        (lambda d: d["tables"]["shards"].pop("bytes"), "manifest", r"tables\.shards\.bytes None"),
    ],
)
def test_a_manifest_that_tells_another_mix_is_found(
    copy: Path, change: Callable[[Any], Any], file: str, reason: str
) -> None:
    edit(copy, change)
    faults = verify(copy)
    assert any(re.search(file, f.file) and re.search(reason, f.reason) for f in faults), faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["datasets"][1].pop("weight"), r"datasets\[1\]\.weight is missing"),
        (lambda d: d["datasets"][1].update(weight=-2), r"weight must be an integer above 0, found"),
        (lambda d: d["datasets"][0].update(name="code"), "expected rows of 2 datasets, found 3"),
        (lambda d: d["mixture"].update(batch_size=2**62), r"fewer than 2\*\*60 rows"),
        (lambda d: d["mixture"].update(kind="stirred"), "kind 'stirred' is not known here"),
    ],
)
def test_a_manifest_that_tells_no_mix_is_an_error_that_names_the_key(
    copy: Path, change: Callable[[Any], Any], message: str
) -> None:
    edit(copy, change)
    with pytest.raises(ManifestError, match=message):
        verify(copy)


# Damaged tables.


@pytest.mark.parametrize("kind", ["sources", "states", "shards"])
def test_a_truncated_removed_or_flipped_table_is_named(copy: Path, kind: str) -> None:
    path = table_path(copy, kind)
    good = path.read_bytes()
    for bad in (good[:-1], good[:40], b"", good[:100] + bytes([good[100] ^ 1]) + good[101:]):
        path.write_bytes(bad)
        fault = only_fault(copy)
        assert fault.file == str(path.relative_to(copy))
        assert "is damaged: sha256" in fault.reason
        assert "the manifest says" in fault.reason
    path.unlink()
    assert "cannot be read" in only_fault(copy).reason
    edit(copy, lambda found: found["tables"].pop(kind))
    assert only_fault(copy) == Fault(
        "manifest.json", f"{copy}/manifest.json: is damaged: tables.{kind} is missing"
    )


@pytest.mark.parametrize("kind", ["sources", "states", "shards"])
def test_a_table_that_is_none_is_named_when_its_digest_agrees(copy: Path, kind: str) -> None:
    for data in (b"no parquet", b""):
        path = table_path(copy, kind)
        path.write_bytes(data)
        entry = {"sha256": hashlib.sha256(data).hexdigest()}
        edit(copy, lambda found, entry=entry: found["tables"][kind].update(entry))
        fault = only_fault(copy)
        assert fault.file == str(path.relative_to(copy))
        assert f"is no table of {kind}" in fault.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: set_value(t, "remainder_carry", 2, [1, 0, -1]),
            "boundary 2 is .*'web': 1, 'code': 0, 'books': -1.*, the mixture's is .*'web': 0",
        ),
        (lambda t: set_value(t, "offsets", 2, [1, 2]), "boundary 2 is unknown .*, the mixture's"),
        (lambda t: set_value(t, "offsets", 2, None), "boundary 2 is unknown .*, the mixture's"),
        (lambda t: t.slice(0, 5), r"boundary 5 is unknown \(boundary 5 is outside 0\.\.4\)"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), "has 7 boundaries, expected 6"),
    ],
)
def test_an_edited_states_table_is_one_fault_when_its_digest_agrees(
    copy: Path, change: Callable[[pa.Table], pa.Table], reason: str
) -> None:
    path = replace_table(copy, "states", change)
    fault = only_fault(copy)
    assert fault.file == path
    assert re.search(reason, fault.reason), fault


def test_a_states_table_without_states_faults_every_boundary(copy: Path) -> None:
    path = replace_table(copy, "states", lambda table: table.select(["state_kind"]))
    faults = verify(copy)
    assert {fault.file for fault in faults} == {path}
    assert len(faults) == SHARDS + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("file", "shards/x.parquet"), ("first_batch", 6), ("num_batches", 6), ("num_rows", 55)],
)
def test_an_edited_shards_table_is_found_when_its_digest_agrees(
    copy: Path, name: str, value: Any
) -> None:
    path = replace_table(copy, "shards", lambda table: set_value(table, name, 1, value))
    faults = verify(copy)
    assert faults[0].file == path
    assert "row 1 has file, first_batch, num_batches and num_rows" in faults[0].reason
    assert repr(value) in faults[0].reason
    assert "'shards/shard-00000001.parquet', 7, 7, 56)" in faults[0].reason
    if name == "num_rows":
        assert faults[1] == Fault(
            "manifest.json", "has num_rows 240, but the shards table gives 239"
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.slice(0, 4), "has 4 rows, but the manifest's layout makes 5 shards"),
        (lambda t: t.drop_columns(["bytes"]), "is no table of shards"),
        (lambda t: set_value(t, "sha256", 0, "abc"), "a sha256 has 64 hex digits, not 'abc'"),
        (lambda t: set_value(t, "sha256", 0, None), "nulls"),
    ],
)
def test_a_shards_table_of_another_shape_is_found(
    copy: Path, change: Callable[[pa.Table], pa.Table], reason: str
) -> None:
    path = replace_table(copy, "shards", change)
    fault = only_fault(copy)
    assert fault.file == path
    assert reason in fault.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.slice(1), "dataset 'web': its files do not give its rows"),
        (lambda t: set_value(t, "rows", 3, 51), "dataset 'code': its files do not give its rows"),
        (lambda t: set_value(t, "first_row", 5, 1), "dataset 'books': its files do not"),
        (lambda t: t.slice(0, 3), r"has the datasets \['web'\], the manifest \['web', 'code'"),
        (lambda t: t.drop_columns(["digest"]), "has columns .*, expected .*'digest'"),
    ],
)
def test_an_edited_sources_table_is_found_when_its_digest_agrees(
    copy: Path, change: Callable[[pa.Table], pa.Table], reason: str
) -> None:
    path = replace_table(copy, "sources", change)
    fault = only_fault(copy)
    assert fault.file == path
    assert re.search(reason, fault.reason), fault


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "_mix/../../x", "_mix/\0", ""])
def test_a_table_outside_the_mix_is_not_opened(copy: Path, name: str) -> None:
    edit(copy, lambda found: found["tables"]["shards"].update(path=name))
    fault = only_fault(copy)
    assert fault.file == name
    if ".." in name or name.startswith("/"):
        assert f"leads out of {copy}; names in a mix are relative" in fault.reason


# The sources.


def test_changed_payload_is_found_against_the_sources_when_every_digest_agrees(
    copy: Path,
) -> None:
    rewrite_shard(copy, 4, lambda table: set_value(table, "text", 3, "poison"))
    assert verify(copy) == []
    fault = only_fault(copy, sources=True)
    assert fault.file == shard_file(4)
    assert "is not what its sources give: written anew it has sha256" in fault.reason


def own_sources(tmp_path: Path) -> Path:
    out, _ = small_mix(tmp_path, batches_per_shard=PER_SHARD)
    return out


def test_a_missing_source_is_one_fault_that_names_it(tmp_path: Path) -> None:
    out = own_sources(tmp_path)
    (tmp_path / "data" / "web" / "part-002.parquet").unlink()
    assert verify(out) == []
    fault = only_fault(out, sources=True)
    assert fault.file == shard_file(0)
    assert fault.reason.startswith("cannot be written anew (and 4 more shards): ")
    assert "web/part-002.parquet: no such file" in fault.reason


def test_a_changed_source_is_a_fault_that_says_so(tmp_path: Path) -> None:
    out = own_sources(tmp_path)
    path = tmp_path / "data" / "books" / "part-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    fault = only_fault(out, sources=True)
    assert fault.file == shard_file(0)
    assert "cannot be written anew (and 4 more shards)" in fault.reason
    assert "books/part-000.parquet: has changed since it was planned" in fault.reason


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"manifest": {}, "schema": ""}'])
def test_without_its_plan_a_mix_cannot_be_held_against_sources(
    copy: Path, text: str | None
) -> None:
    path = copy / "_mix" / "plan.json"
    path.unlink()
    if text is None:
        assert verify(copy) == []
    else:
        path.write_text(text)
        damaged = only_fault(copy)
        assert damaged.file == "_mix/plan.json"
        assert damaged.reason.startswith("is no plan of this mix: ")
    fault = verify(copy, sources=True)[-1]
    assert fault.file == "_mix/plan.json"
    assert "cannot be used to write the shards anew" in fault.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["datasets"][1].update(epochs=0.25), r"datasets\[1\]\.epochs 0\.25"),
        (lambda d: d.update(mixshards_version="9.9"), "mixshards_version '9.9'"),
        (lambda d: d["config"].pop("output"), "config.output 'no such key'"),
        (lambda d: d["config"]["datasets"]["web"]["path"].append("x"), "config.*path"),
    ],
)
def test_what_the_plan_says_otherwise_is_told_whichever_of_the_two_was_edited(
    copy: Path, change: Callable[[Any], Any], reason: str
) -> None:
    edit(copy, change)
    fault = only_fault(copy)
    assert fault.file == "manifest.json"
    assert re.search(f"has {reason}.* but _mix/plan.json, by which it was built", fault.reason)
    edit_plan(copy, change)
    assert verify(copy) == []
    edit_plan(copy, lambda found: found.update(num_rows=7))
    assert "has num_rows 240, but _mix/plan.json" in only_fault(copy).reason


# Anything at all.


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Key paths of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places_of(inner, (*path, key))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**53 + 1, 2**63, 10**30, "7", "9" * 30, 0.5, float("nan"), ""])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def change_at(found: Any, path: tuple[Any, ...], value: Any, drop: bool) -> None:
    for key in path[:-1]:
        found = found[key]
    if drop:
        del found[path[-1]]
    else:
        found[path[-1]] = value


@settings(plenty, max_examples=100)
@given(place=st.integers(0, 10**6), value=json_values, drop=st.booleans())
def test_a_manifest_changed_at_random_gives_our_errors_or_faults_and_no_others(
    mix: Path, tmp_path: Path, place: int, value: Any, drop: bool
) -> None:
    out = tmp_path / "changed"
    if not out.exists():
        shutil.copytree(mix, out)
    found = document(mix)
    places = list(places_of(found))
    change_at(found, places[place % len(places)], value, drop)
    (out / "manifest.json").write_text(json.dumps(found))
    with contextlib.suppress(MixError):
        assert all(isinstance(fault, Fault) and str(fault) for fault in verify(out))
    with contextlib.suppress(MixError):
        reader = ShardReader(out)
        for n in {0, 9, 29} & set(range(min(30, len(reader)))):
            _ = reader[n]
        _ = next(reader.batches(columns=["text"]))
        _ = origins(Folder.at(str(out)), reader.manifest, 0, 1)


@settings(plenty, max_examples=40)
@given(place=st.integers(0, 10**6), value=json_values, drop=st.booleans())
def test_a_plan_changed_at_random_gives_faults_and_no_errors(
    mix: Path, tmp_path: Path, place: int, value: Any, drop: bool
) -> None:
    out = tmp_path / "changed"
    if not out.exists():
        shutil.copytree(mix, out)
    found = json.loads((mix / "_mix" / "plan.json").read_text())
    places = list(places_of(found))
    change_at(found, places[place % len(places)], value, drop)
    (out / "_mix" / "plan.json").write_text(json.dumps(found))
    assert all(str(fault) for fault in verify(out, sources=True))


@settings(plenty, max_examples=60)
@given(data=st.data())
@example(data=None)
def test_bytes_changed_anywhere_in_the_mix_are_never_overlooked(
    mix: Path, tmp_path: Path, data: st.DataObject | None
) -> None:
    """Whichever of the certified files it is, and however many bytes of it."""
    out = tmp_path / "changed"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(mix, out)
    if data is None:
        assert verify(out) == []
        return
    files = [table_path(out, kind) for kind in ("sources", "states", "shards")]
    files += [shard_path(out, shard) for shard in range(SHARDS)]
    path = data.draw(st.sampled_from(files))
    size = path.stat().st_size
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, min(size, start + 200)))
    bytes_ = path.read_bytes()
    other = data.draw(st.binary(max_size=200).filter(lambda found: found != bytes_[start:stop]))
    path.write_bytes(bytes_[:start] + other + bytes_[stop:])
    assert {fault.file for fault in verify(out)} == {str(path.relative_to(out))}


# Where rows come from.


def test_origins_name_the_rows_of_the_files_that_each_batch_holds(mix: Path) -> None:
    folder = Folder.at(str(mix))
    manifest = Manifest.load(folder)
    reader = ShardReader(mix)
    for first, count in [*((n, 1) for n in range(BATCHES)), (0, 30), (5, 9), (28, 2)]:
        rows = [
            (origin.batch, origin.dataset, origin.epoch, text)
            for origin in origins(folder, manifest, first, count)
            for text in pq.read_table(origin.path)["text"][
                origin.first_row : origin.first_row + origin.count
            ].to_pylist()
        ]
        expected = [
            (row["mix_batch"], row["mix_dataset"], row["mix_epoch"], row["text"])
            for n in range(first, first + count)
            for row in reader[n].to_pylist()
        ]
        assert rows == expected


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (30, 1), (29, 2), (0, 0)])
def test_origins_of_batches_outside_the_mix_are_an_index_error(
    mix: Path, first: int, count: int
) -> None:
    folder = Folder.at(str(mix))
    with pytest.raises(IndexError, match=f"batches {first} to {first + count} are not all in"):
        origins(folder, Manifest.load(folder), first, count)


def test_every_boundary_state_restores_the_online_batcher(mix: Path) -> None:
    folder = Folder.at(str(mix))
    manifest = Manifest.load(folder)
    states, reader = manifest.states(folder), ShardReader(mix)

    class Items:
        def get_iterator(self, name: str, offset: int = 0) -> Iterator[tuple[str, int]]:
            return ((name, int(place)) for place in np.arange(offset, offset + 1000))

    rows = {entry["name"]: entry["rows"] for entry in manifest.document["datasets"]}
    weights = {entry["name"]: entry["weight"] for entry in manifest.document["datasets"]}
    for shard in range(SHARDS):
        batcher = DataBatcher(Items(), weights, 8)
        batcher.load_state_dict(states[shard])
        found = [(row["mix_dataset"], row["mix_row"]) for row in reader[7 * shard].to_pylist()]
        assert found == [(name, place % rows[name]) for name, place in batcher.next_batch()]
