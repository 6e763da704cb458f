"""What people mix datasets with while they train, and ours: one small function a case.

Each opens its reader and returns an iterator over batches: something whose length is its rows. A
batch of dicts is a list of them, one a row. Every peer mixes the datasets by their rows and keeps
their order, which is the least that it can do. Tokens are a list in a row, or an array where a
peer's users would hold them so.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from _bench import in_process, kept

if TYPE_CHECKING:
    import pyarrow as pa

# Nothing heavy is imported here, as in _bench.

Row = dict[str, Any]
Batches = Iterator[list[Row]]
PAYLOAD = ["id", "text", "tokens"]
ARROW, TENSORS, DICTS, ARRAYS = "Arrow", "tensors", "dicts", "dicts with arrays"


class Mix(NamedTuple):
    """A mix that was built, and the sources that it was built of, weighted by their rows."""

    path: Path
    num_batches: int
    folder: Path
    weights: Mapping[str, int]
    batch_size: int

    @property
    def shards(self) -> list[Path]:
        """The mix's files in order."""
        return sorted((self.path / "shards").iterdir())

    @property
    def files(self) -> dict[str, list[str]]:
        """Each dataset's Parquet files in order."""
        return {
            name: [str(path) for path in sorted((self.folder / name).glob("*.parquet"))]
            for name in self.weights
        }

    @property
    def mds(self) -> Path:
        """Where the same rows stand for MosaicML."""
        return self.folder.with_name(f"{self.folder.name}-mds")


class Case(NamedTuple):
    """One way to read: what a table calls it, what it gives, how, and what must be installed."""

    title: str
    kind: str
    read: Callable[[Mix], Iterator[Sized]]
    package: str = "pyarrow"
    module: str = "pyarrow"
    prepare: Callable[[Mix], object] | None = None
    batches: int | None = None  # so many of a slow one are enough

    def first(self, mix: Mix) -> int:
        """Rows of the first batch."""
        return len(next(self.read(mix)))

    def why_not(self, mix: Mix) -> str | None:
        """Why it cannot be measured, if it cannot: tried in a process of its own."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.package} is not installed (pip install '.[bench]')"
        try:
            if self.prepare is not None:
                self.prepare(mix)
            in_process(partial(self.first, mix))
        except Exception as error:
            return f"it fails: {type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def opened(self, mix: Mix) -> tuple[Iterator[Sized], int]:
        """Its batches, and how many to take: the mix's, or fewer of a slow one.

        The first batch of a slow one is taken already, since its start would weigh too much.
        """
        batches = self.read(mix)
        no_import_is_timed()
        if self.batches is None:
            return batches, mix.num_batches
        next(batches)
        return batches, min(self.batches, mix.num_batches // 2)


def no_import_is_timed() -> None:
    """Import what pyarrow imports with its first array, where it is installed."""
    with contextlib.suppress(ImportError):
        import pandas  # noqa: F401


def _arrow(mix: Mix) -> Iterator[pa.Table]:
    from pipeline.reader import ShardReader

    return ShardReader(str(mix.path)).batches()


def bare_loop(mix: Mix) -> Iterator[pa.Table]:
    """Shard after shard, row group after row group, cut into batches."""
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.Table]:
        for path in mix.shards:
            with pq.ParquetFile(path) as parquet:
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group)
                    for start in range(0, table.num_rows, mix.batch_size):
                        yield table.slice(start, mix.batch_size)

    return batches()


def _tensors(mix: Mix) -> Iterator[Sized]:
    from pipeline.torch import MixedShards

    return (batch["mix_row"] for batch in MixedShards(str(mix.path)))


def _payload(mix: Mix) -> Iterator[pa.Table]:
    """What the peers have, too: the sources' columns, without where a row comes from."""
    from pipeline.reader import ShardReader

    return ShardReader(str(mix.path)).batches(columns=PAYLOAD)


def _dicts(mix: Mix) -> Batches:
    return (table.to_pylist() for table in _payload(mix))


def _arrays(mix: Mix) -> Batches:
    return map(with_arrays, _payload(mix))


def with_arrays(table: pa.Table) -> list[Row]:
    """Rows as dicts, lists in them as arrays."""
    import pyarrow.types

    names = [field.name for field in table.schema if pyarrow.types.is_list(field.type)]
    rows: list[Row] = table.drop_columns(names).to_pylist()
    for name in names:
        for row, values in zip(rows, table.column(name).to_numpy(), strict=True):
            row[name] = values
    return rows


def _torchdata(mix: Mix) -> Batches:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, MultiNodeWeightedSampler

    nodes = {
        name: IterableWrapper(_Streamed(files, mix.batch_size)) for name, files in mix.files.items()
    }
    weights = {name: float(rows) for name, rows in mix.weights.items()}
    mixed = MultiNodeWeightedSampler(nodes, weights)
    return iter(Loader(Batcher(mixed, mix.batch_size)))


class _Streamed:
    """Rows of Parquet files, made into dicts some at a time."""

    def __init__(self, files: list[str], rows: int) -> None:
        self._files, self._rows = files, rows

    def __iter__(self) -> Iterator[Row]:
        import pyarrow.parquet as pq

        for file in self._files:
            with pq.ParquetFile(file) as parquet:
                for batch in parquet.iter_batches(self._rows):
                    yield from batch.to_pylist()


def _grain(mix: Mix) -> Batches:
    import grain

    parts = [grain.MapDataset.source(_Indexed(files)) for files in mix.files.values()]
    mixed = grain.MapDataset.mix(parts, list(mix.weights.values()))
    # Threads only get in the way of rows that need no waiting for.
    streamed = mixed.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    # Rows differ in length, which the usual stacking of a batch does not take.
    return iter(streamed.batch(mix.batch_size, batch_fn=list))


class _Indexed:
    """Rows of Parquet files by number; the two row groups read last are kept.

    Lists are arrays: Grain looks at every value of every row, and would at each of their numbers.
    """

    def __init__(self, files: list[str]) -> None:
        import pyarrow.parquet as pq

        self._groups = [
            (parquet, group)
            for parquet in map(pq.ParquetFile, files)
            for group in range(parquet.num_row_groups)
        ]
        rows = (parquet.metadata.row_group(group).num_rows for parquet, group in self._groups)
        self._firsts = list(itertools.accumulate(rows, initial=0))
        self._kept: dict[int, list[Row]] = {}
        self._lock = threading.Lock()  # a ParquetFile is not for several threads

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: int) -> Row:
        at = bisect.bisect_right(self._firsts, number) - 1
        with self._lock:
            if at not in self._kept:
                if len(self._kept) == 2:
                    del self._kept[min(self._kept)]
                parquet, group = self._groups[at]
                self._kept[at] = with_arrays(parquet.read_row_group(group))
            return self._kept[at][number - self._firsts[at]]


def _mosaicml(mix: Mix) -> Batches:
    from streaming import Stream, StreamingDataset

    # It warns of each stream that ends within a batch.
    logging.getLogger("streaming").setLevel(logging.ERROR)
    streams = [
        Stream(local=str(mix.mds / name), proportion=rows) for name, rows in mix.weights.items()
    ]
    mixed = StreamingDataset(
        streams=streams, batch_size=mix.batch_size, batching_method="stratified"
    )
    return _batched(mixed, mix.batch_size)


def _as_mds(mix: Mix) -> None:
    kept(mix.mds, partial(_write_mds, mix.folder))


def _write_mds(folder: Path, target: Path) -> None:
    import pyarrow.parquet as pq
    from streaming import MDSWriter

    kinds = dict(zip(PAYLOAD, ("int", "str", "ndarray:int32"), strict=True))
    for dataset in sorted(path for path in folder.iterdir() if path.is_dir()):
        with MDSWriter(out=str(target / dataset.name), columns=kinds) as writer:
            for path in sorted(dataset.glob("*.parquet")):
                table = pq.read_table(path, partitioning=None)
                columns = map(table.column, PAYLOAD)
                for number, text, tokens in zip(*columns, strict=True):
                    row = {"id": number.as_py(), "text": text.as_py()}
                    writer.write({**row, "tokens": tokens.values.to_numpy()})


def _hf(mix: Mix) -> Batches:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    parts = [
        datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        for files in mix.files.values()
    ]
    total = sum(mix.weights.values())
    shares = [rows / total for rows in mix.weights.values()]
    return _batched(datasets.interleave_datasets(parts, shares, seed=0), mix.batch_size)


def _batched(rows: Iterable[Row], batch_size: int) -> Batches:
    rows = iter(rows)
    while batch := list(itertools.islice(rows, batch_size)):
        yield batch


# The first of a kind is ours, which the others of the kind are compared with.
CASES = (
    Case("ours", ARROW, _arrow),
    Case("bare read_row_group loop", ARROW, bare_loop),
    Case("ours, MixedShards", TENSORS, _tensors, "torch", "torch"),
    Case("ours, to_pylist", DICTS, _dicts),
    Case("torchdata MultiNodeWeightedSampler", DICTS, _torchdata, "torchdata", "torchdata"),
    Case("HF interleave_datasets", DICTS, _hf, "datasets", "datasets", batches=10),
    Case("ours, lists as arrays", ARRAYS, _arrays),
    Case("Grain MapDataset.mix", ARRAYS, _grain, "grain", "grain"),
    Case(
        "MosaicML StreamingDataset",
        ARRAYS,
        _mosaicml,
        "mosaicml-streaming",
        "streaming",
        _as_mds,
        40,
    ),
)
