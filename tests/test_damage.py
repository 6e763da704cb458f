"""Damaged mixes: each damage is named, a build mends it, and no reader gives a wrong row."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import MixError
from pipeline.manifest import Manifest
from pipeline.pages import PageError, check_pages
from pipeline.pages import _struct as thrift_struct
from pipeline.reader import ShardReader
from pipeline.shard import ShardError, shard_name
from pipeline.transforms import build
from pipeline.verify import verify

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
    found = []
    footer = pq.read_metadata(path)
    with path.open("rb") as file:
        data = file.read()
    group = footer.row_group(0)
    for column in map(group.column, range(group.num_columns)):
        if columns and column.path_in_schema.split(".")[0] not in columns:
            continue
        at = column.data_page_offset
        if column.has_dictionary_page:
            at = min(at, column.dictionary_page_offset)
        end = at + column.total_compressed_size
        while at < end:
            header, length = thrift_struct(data[at:end], 0)
            found.append(range(at, at + length))
            at += length + header[3]
    return found


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
    values = thrift_struct(good[header.start : header.stop], 0)[0][5][1] - fewer
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # What follows on the beginning of the struct in field 5: number of values, then encoding.
        (lambda header: changed(header, header.index(b"\x1c\x15") + 2, 2), "end, size and values"),
        (
            lambda header: changed(header, header.index(b"\x1c\x15") + 4, 2),
            "is of an encoding that is not",
        ),
        (lambda header: header[:1] + b"\x06" + header[2:], "a page of type 3 stands at byte"),
        (lambda header: b"\x00" + header[1:], "its page headers are damaged"),
        (lambda header: b"\x1f" + header[1:], "no field is of type 15"),
        (lambda header: b"\x05" + header[1:], "no field begins with byte 0x5"),
    ],
)
def test_a_damaged_page_header_names_its_column(
    subject: Subject, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    good = (subject.out / shard_name(0)).read_bytes()
    header = next(h for h in headers_of(subject.out / shard_name(0)) if good[h.start + 1] == 0)
    bad = change(good[header.start : header.stop])
    path = tmp_path / "shard"
    path.write_bytes(good[: header.start] + bad + good[header.start + len(bad) :])
    footer = pq.read_metadata(subject.out / shard_name(0))
    check_pages(pa.OSFile(str(subject.out / shard_name(0))), footer, 0, None)
    with pytest.raises(PageError, match=f"column 'text': .*{message}"):
        check_pages(pa.OSFile(str(path)), footer, 0, ["text"])
    check_pages(pa.OSFile(str(path)), footer, 0, ["mix_row"])  # another column is whole
    with pytest.raises(PageError, match=r"the shard has only \d row groups"):
        check_pages(pa.OSFile(str(path)), footer, 9, None)


def test_a_footer_that_was_changed_or_is_anothers_is_refused_before_it_is_parsed(
    subject: Subject,
) -> None:
    path, other = subject.out / shard_name(0), subject.out / shard_name(1)
    good, others = path.read_bytes(), other.read_bytes()
    size = struct.unpack("<I", good[-8:-4])[0]
    others_size = struct.unpack("<I", others[-8:-4])[0]
    foreign = good[: -8 - size] + others[-8 - others_size :]
    unsealed = good[: -8 - size - 40] + good[-8 - size :]
    for bad, message in (
        (foreign, "its footer is not the one it was sealed with"),
        (good[: -8 - size] + bytes(40) + good[-8 - size :], "is a Parquet file, but no shard"),
        (unsealed, "is a Parquet file, but no shard of a mix"),
        (good[:-8] + struct.pack("<I", len(good)) + b"PAR1", "cannot be opened as Parquet"),
    ):
        path.write_bytes(bad)
        with pytest.raises(ShardError, match=message):
            ShardReader(subject.out)[0]
    path.write_bytes(good)
    dice = random.Random(9)
    for at in dice.sample(range(len(good) - 8 - size - 40, len(good)), 60):
        changed = bytearray(good)
        changed[at] ^= dice.randrange(1, 256)
        path.write_bytes(changed)
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
