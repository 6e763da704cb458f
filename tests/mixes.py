"""Small real sources and mixes that the tests build on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.manifest import Manifest
from pipeline.plan import plan
from pipeline.transforms import build

WEIGHTS = {"web": 3, "code": 2, "books": 1}
"""Of the three datasets that most tests mix."""


def table(name: str, rows: int, first: int = 0) -> pa.Table:
    """Rows whose every value tells dataset and position, with texts and lists of uneven length."""
    rng = np.random.default_rng([len(name), *name.encode(), first])
    lengths = rng.integers(0, 12, rows)
    ends = np.cumsum(lengths, dtype=np.int32)
    tokens = rng.integers(0, 30_000, int(lengths.sum()), dtype=np.int32)
    return pa.table(
        {
            "text": [f"{name}:{first + i}:" + "x" * int(lengths[i]) for i in range(rows)],
            "tokens": pa.ListArray.from_arrays(
                np.concatenate(([0], ends)).astype(np.int32), tokens
            ),
        }
    )


def write_dataset(folder: Path, name: str, files: Sequence[int], row_group_size: int = 17) -> Path:
    """A folder of Parquet files with the given numbers of rows."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    first = 0
    for number, rows in enumerate(files):
        path = folder / name / f"part-{number:03d}.parquet"
        pq.write_table(table(name, rows, first), path, row_group_size=row_group_size)
        first += rows
    return folder / name


FORMS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "arrow", "stream.arrow")
"""Suffixes of the forms in which :func:`write_as` writes a table."""


def write_as(path: Path, rows: pa.Table, form: str) -> None:
    """Write a table in one of FORMS, a few rows a row group or record batch."""
    if form == "parquet":
        pq.write_table(rows, path, row_group_size=17)
    elif form.endswith("arrow"):
        make = pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream
        with make(str(path), rows.schema) as writer:
            writer.write_table(rows, max_chunksize=17)
    else:
        text = "".join(f"{json.dumps(item)}\n" for item in rows.to_pylist()).encode()
        codec = {"gz": "gzip", "zst": "zstd"}.get(form.rpartition(".")[2])
        data = pa.compress(text, codec=codec, asbytes=True) if codec else text
        path.write_bytes(data)


def write_sources(folder: Path, **datasets: Sequence[int]) -> dict[str, Path]:
    """A dataset for each keyword: the numbers of rows of its files."""
    return {name: write_dataset(folder, name, files) for name, files in datasets.items()}


def config(folder: Path, weights: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A config over datasets that :func:`write_sources` wrote into ``folder / "data"``."""
    return {
        "output": str(folder / "out"),
        "batch_size": 8,
        "batches_per_shard": 4,
        "datasets": {
            name: {"path": str(folder / "data" / name), "weight": weight}
            for name, weight in weights.items()
        },
        **keys,
    }


def small_mix(folder: Path, **keys: Any) -> tuple[Path, Manifest]:
    """A finished mix of three datasets, of which one repeats, in ``folder / "out"``."""
    write_sources(folder / "data", web=[40, 0, 60], code=[50, 23], books=[11])
    settings = {"num_batches": 30, "on_exhausted": "repeat", **keys}
    manifest = build(plan(config(folder, WEIGHTS, **settings)))
    return folder / "out", manifest


def digests(out: Path) -> dict[str, str]:
    """Sha256 of every file of a mix, by name."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
