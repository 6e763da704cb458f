"""Damaged mixes: each damage is named, a build mends it, and no reader gives a wrong row."""

from __future__ import annotations

import json
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import MixError
from pipeline.manifest import Manifest
from pipeline.pages import PageError, check_pages, index_pages, leaves_of
from pipeline.plan import Plan
from pipeline.reader import ShardReader
from pipeline.shard import ShardError, WriterOptions, open_shard, shard_name
from pipeline.transforms import build
from pipeline.verify import verify
from pipeline.writing import BuildError, ShardWriter

from .damage import (
    FILE_DAMAGES,
    MIXTURES,
    Subject,
    config_refused,
    damages,
    hostile_configs,
    named,
    read_wrong,
    sample,
    suffer,
    write_again,
)


@pytest.fixture(scope="module", params=MIXTURES)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    subject = Subject.build(tmp_path_factory.mktemp("mix"), request.param)
    yield subject
    assert verify(subject.out) == []


def test_each_kind_of_damage_is_named_mended_and_gives_no_wrong_row(subject: Subject) -> None:
    kinds = damages(subject, random.Random(0))
    assert len(kinds) == 2 * len(FILE_DAMAGES) + 7
    # Half of them for each of the others, of kinds that lie otherwise each time.
    count = len(kinds) if subject.name == "weighted" else len(kinds) // 2
    some = sample(subject, random.Random(f"short {subject.name}"), count)
    assert len({damage.kind for damage in some}) == count
    problems = [problem for damage in some for problem in suffer(subject, damage, write_again)]
    assert problems == []


def test_a_pipeline_mends_what_the_same_steps_without_one_mend(subject: Subject) -> None:
    [damage, *_] = damages(subject, random.Random(5))["shard swapped"]
    assert suffer(subject, damage, build) == []


def test_what_the_checks_miss_would_be_told(subject: Subject) -> None:
    """The checks of these tests themselves, on a mix that is whole and on one that is not."""
    [*flips] = damages(subject, random.Random(3))["shard truncated"]
    assert named(subject, flips[0]) is not None
    assert read_wrong(subject) is None
    subject.batches[0], kept = subject.batches[1], subject.batches[0]
    assert read_wrong(subject) == "batch 0 is wrong"
    subject.batches[0] = kept


def headers_of(path: Path, columns: Sequence[str] = ()) -> list[range]:
    """Where the page headers of the first row group lie, all or those of some columns."""
    shard = open_shard(str(path), path.name)
    schema = shard.parquet.schema
    names = [schema.column(leaf).path.split(".")[0] for leaf in range(len(schema))]
    return [
        range(begin, begin + length)
        for chunk, begin, length, _ in shard.pages
        if chunk < len(names) and (not columns or names[chunk] in columns)
    ]


def test_no_byte_of_a_page_header_can_change_a_row(subject: Subject) -> None:
    """Checksums of Parquet leave these out, and some changes of them decode to other rows."""
    path = subject.out / shard_name(1)
    good = path.read_bytes()
    first, _ = subject.plan.layout.shard(1)
    dice = random.Random(2)
    refused = 0
    places = [at for header in headers_of(path) for at in header]
    for at in dice.sample(places, 150):
        bad = bytearray(good)
        bad[at] ^= dice.choice([*(1 << bit for bit in range(8)), 0x12, dice.randrange(1, 256)])
        path.write_bytes(bad)
        reader = ShardReader(subject.out)
        true = subject.batches[first]
        for columns in (true.column_names, ["tokens"], ["mix_row"]):
            stream = reader.batches(1, split="rows", uneven=True, columns=columns)
            try:
                table = next(stream)
            except ShardError as error:
                refused += path.name in str(error)
            else:
                assert table.equals(true.select(columns)), (at, columns)
            stream.close()
    path.write_bytes(good)
    assert refused > 100


@pytest.mark.parametrize("fewer", [0, 1, 2])
def test_a_page_header_with_fewer_values_or_another_encoding_is_refused(
    subject: Subject, tmp_path: Path, fewer: int
) -> None:
    """Arrow takes another encoding for good, and mixes the bytes of numbers."""
    path = subject.out / shard_name(0)
    good = path.read_bytes()
    header = headers_of(path, ["tokens"])[-1]
    begin = good.index(b"\x1c\x15", header.start) + 2
    # Of two bytes each in these mixes: 7 bits, and the others; then comes the encoding.
    values = ((good[begin] & 127) + 128 * good[begin + 1] >> 1) - fewer
    numbers = bytes([values << 1 & 127 | 128, values >> 6])
    bad = good[:begin] + numbers + good[begin + 2 :]
    if not fewer:
        assert bad == good
        assert good[begin + 2 : begin + 4] == b"\x15\x12"  # byte stream split; 0 is plain
        bad = changed(good, begin + 3, 0x12)
        (tmp_path / "bad").write_bytes(bad)
        alone = pq.ParquetFile(tmp_path / "bad", page_checksum_verification=True)
        found = alone.read_row_group(0, columns=["tokens"])  # without an error
        assert not found.equals(pq.ParquetFile(path).read_row_group(0, columns=["tokens"]))
    path.write_bytes(bad)
    try:
        for columns in (None, ["tokens"]):
            stream = ShardReader(subject.out).batches(columns=columns, split="rows", uneven=True)
            with pytest.raises(ShardError, match=r"row group 0 is damaged: column 'tokens\.list"):
                next(stream)
            stream.close()
    finally:
        path.write_bytes(good)


def changed(data: bytes, at: int, mask: int) -> bytes:
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def page_of(path: Path, column: str) -> range:
    """Where the header of the last page of a column of the first row group lies."""
    return headers_of(path, [column])[-1]


def test_a_damaged_page_header_names_its_column(subject: Subject, tmp_path: Path) -> None:
    path = subject.out / shard_name(0)
    shard = open_shard(str(path), "x")
    (tmp_path / "bad").write_bytes(changed(path.read_bytes(), page_of(path, "tokens")[-1], 1))
    bad = pa.OSFile(str(tmp_path / "bad"))

    def check(file: pa.NativeFile, columns: list[str] | None, group: int = 0) -> None:
        schema = shard.parquet.schema
        check_pages(file, shard.pages, schema, group, leaves_of(schema, columns))

    check(shard.file, None)
    message = (
        r"column 'tokens\.list\.element': .* damaged: that at byte \d+ is not the one that was"
    )
    for columns in (None, ["tokens"], ["mix_row", "tokens"]):
        with pytest.raises(PageError, match=message):
            check(bad, columns)
    check(bad, ["mix_row", "text"])  # other columns are whole, and so are other row groups
    check(bad, None, group=1)


def test_the_index_of_a_shard_holds_all_its_page_headers(subject: Subject) -> None:
    """What lies between two of them is a page, of whose bytes they have the checksum."""
    path = subject.out / shard_name(0)
    data, shard = path.read_bytes(), open_shard(str(path), "x")
    footer = shard.parquet.metadata
    assert {chunk for chunk, *_ in shard.pages} == set(
        range(footer.num_row_groups * footer.num_columns)
    )
    at, ends = 4, [page[1] for page in shard.pages[1:]]
    for (chunk, begin, length, crc32), end in zip(
        shard.pages, [*ends, index_begin(data, len(shard.pages))], strict=True
    ):
        assert begin == at
        assert crc32 == zlib.crc32(data[begin : begin + length])
        page = zlib.crc32(data[begin + length : end])
        assert zigzag(page - 2**32 * (page >= 2**31)) in data[begin : begin + length]
        column = footer.row_group(chunk // footer.num_columns).column(chunk % footer.num_columns)
        first = column.dictionary_page_offset or column.data_page_offset
        assert first <= begin < end <= first + column.total_compressed_size
        at = end


def index_begin(data: bytes, pages: int) -> int:
    """Where the page index of a shard begins, which has so many."""
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little") - 48 - 20 * pages


def zigzag(value: int) -> bytes:
    """An int32 as Thrift's compact protocol has it, after the byte of a field that follows."""
    rest, text = (value << 1 ^ value >> 31) & 0xFFFFFFFF, b"\x15"
    while rest > 127:
        text += bytes([rest & 127 | 128])
        rest >>= 7
    return text + bytes([rest])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Bytes 4 and 5 are field 3, the page's size of less than 64.
        (
            lambda header: header[:5] + b"\x7e" + header[6:],
            r"its pages end at byte \d+, expected \d+",
        ),
        (lambda header: b"\x00" + header[1:], r"the page at byte \d+ has no checksum"),
        (lambda header: b"\x1f" + header[1:], "no field begins with byte 0x1f"),
        (lambda header: b"\x18" + b"\xff" * 4 + b"\x7f" + header[6:], "out of range"),
    ],
)
def test_a_shard_whose_pages_do_not_fill_their_places_is_not_sealed(
    subject: Subject, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = subject.out / shard_name(0)
    good, header = path.read_bytes(), page_of(path, "mix_row")
    assert good[header.start + 4] == 0x15
    assert good[header.start + 5] < 0x7E
    bad = change(good[header.start : header.stop])
    (tmp_path / "bad").write_bytes(good[: header.start] + bad + good[header.start + len(bad) :])
    with pytest.raises(PageError, match=f"column 'mix_row': .* are damaged: .*{message}"):
        index_pages(str(tmp_path / "bad"))


def test_pages_without_checksums_are_not_sealed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x")
    with pytest.raises(PageError, match=r"column 'x': .*the page at byte 4 has no checksum"):
        index_pages(str(tmp_path / "x"))


class Unchecked(WriterOptions):
    """Options of a writer that leaves checksums out."""

    def for_writer(self, schema: pa.Schema) -> dict[str, Any]:
        return {**super().for_writer(schema), "write_page_checksum": False}


def test_what_cannot_be_sealed_is_named_and_nothing_of_it_is_left(subject: Subject) -> None:
    planned = Plan.load(subject.plan.folder)
    writer = ShardWriter(replace(planned, options=Unchecked(**asdict(planned.options))))
    tables = [pq.read_table(subject.out / shard_name(0)).replace_schema_metadata()]
    message = (
        r"what was just written did not read back: shards/shard-00000000\.parquet: column 'text': "
        r".*the page at byte 4 has no checksum; .* the same build goes on from them"
    )
    with pytest.raises(BuildError, match=message):
        writer.write(writer.footer(0), tables)
    assert list((subject.out / "_mix").rglob("shard-*")) == []


def test_a_footer_or_index_that_was_changed_or_is_anothers_is_refused_before_it_is_parsed(
    subject: Subject,
) -> None:
    path, other = subject.out / shard_name(0), subject.out / shard_name(1)
    good, others = path.read_bytes(), other.read_bytes()
    footer, others_footer = (
        len(data) - 8 - struct.unpack("<I", data[-8:-4])[0] for data in (good, others)
    )
    seal = footer - 48
    index = index_begin(good, len(open_shard(str(path), "x").pages))
    assert good[seal : seal + 8] == b"MIXSEAL2"
    fewer, more = (changed(good, seal + 8, 1 << bit) for bit in (0, 7))
    for bad, message in (
        (good[:footer] + others[others_footer:], "its footer or page index is not what was sealed"),
        (changed(good, index, 1), "its footer or page index is not what was sealed"),
        (fewer, "its footer or page index is not what was sealed"),
        (more, "its footer or page index is not what was sealed"),
        (good[: seal + 8] + b"\xff" * 8 + good[seal + 16 :], "its footer or page index is not"),
        (good[:index] + good[index + 20 :], "its footer or page index is not what was sealed"),
        (good[:footer] + bytes(48) + good[footer:], "is a Parquet file, but no shard of a mix"),
        (good[:seal] + good[footer:], "is a Parquet file, but no shard of a mix"),
        (good[:-8] + struct.pack("<I", len(good)) + b"PAR1", "cannot be opened as Parquet"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ShardError, match=rf"{path.name}: .*{message}"):
            ShardReader(subject.out)[0]
    dice = random.Random(9)
    for at in dice.sample(range(index, len(good)), 80):
        path.write_bytes(changed(good, at, dice.randrange(1, 256)))
        with pytest.raises(ShardError, match=path.name):
            ShardReader(subject.out)[0]
    path.write_bytes(good)


def test_a_shard_is_still_a_parquet_file_to_others(subject: Subject) -> None:
    shards = pq.read_table(subject.out / "shards")
    assert shards.num_rows == sum(batch.num_rows for batch in subject.batches)


@pytest.mark.parametrize("label", hostile_configs(Path("ran")))
def test_a_config_that_would_run_something_or_never_end_is_refused(
    label: str, tmp_path: Path
) -> None:
    begun = time.monotonic()
    assert config_refused(hostile_configs(tmp_path / "ran")[label], tmp_path / "ran") is None
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("kind", ["sources", "shards", "states"])
@pytest.mark.parametrize("path", ["../outside/{}", "{root}/outside/{}", "..\\outside\\{}", "{}\0"])
def test_a_build_says_the_way_out_where_a_manifest_leads_out_of_the_mix(
    subject: Subject, kind: str, path: str
) -> None:
    manifest = subject.out / "manifest.json"
    good = manifest.read_bytes()
    document = json.loads(good)
    document["tables"][kind]["path"] = path.replace("{root}", str(subject.out)).format(kind)
    manifest.write_text(json.dumps(document))
    with pytest.raises(
        MixError, match=rf"cannot be read, as the manifest's table of {kind}: .*--overwrite"
    ):
        Manifest.load(subject.plan.folder).table(subject.plan.folder, kind)
    write_again(subject.plan)  # what it is to publish is known without that table
    assert manifest.read_bytes() == good
