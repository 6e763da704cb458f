"""Speech-like utterances: make them, measure padding, and read a mix of them back."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mixcore import BatchStream, FrameBudgetSampler

FEATURES = 8
FILES = {"read": (6, 0.75), "conversation": (2, 0.25)}
BUDGET, POOL, SEED = 48_000, 4_096, 0
POOLS = (64, 256, 1_024, 4_096, 16_384, 65_536)


def make(folder: Path, utterances: int) -> None:
    """Write the datasets: ``num_frames`` log-normal about 585, ``features`` int8 of 8 a frame."""
    rng = np.random.default_rng(7)
    made = 0
    for name, (files, share) in FILES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(files):
            rows = round(utterances * share / files)
            frames = np.clip(rng.lognormal(np.log(585), 0.6, rows), 20, 6_000).astype(np.int32)
            total = int(frames.sum())
            # Neighbouring frames are alike, as they are in speech.
            steps = rng.integers(-6, 7, (total, FEATURES), dtype=np.int8)
            values = np.cumsum(steps, axis=0, dtype=np.int8).reshape(-1)
            ends = np.concatenate(([0], np.cumsum(frames))).astype(np.int32)
            frame = pa.FixedSizeListArray.from_arrays(pa.array(values), FEATURES)
            table = pa.table(
                {
                    "utterance": [f"{name}-{number}-{row}" for row in range(rows)],
                    "num_frames": frames,
                    "features": pa.ListArray.from_arrays(ends, frame),
                }
            )
            path = folder / name / f"part-{number}.parquet"
            pq.write_table(table, path, compression="zstd", row_group_size=4096)
            made += rows
    size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    print(f"{made:,} utterances, {size / 1e6:,.0f} MB in {sum(n for n, _ in FILES.values())} files")


def lengths(folder: Path) -> NDArray[np.int64]:
    """Frames of every utterance, in the order of datasets and files."""
    paths = [path for name in FILES for path in sorted((folder / name).glob("*.parquet"))]
    parts = [pq.read_table(path, columns=["num_frames"]).column(0).to_numpy() for path in paths]
    return np.concatenate(parts).astype(np.int64)


def padding(folder: Path) -> None:
    """Print the share of padding without sorting, and with pools of several sizes."""
    found = lengths(folder)
    shuffled = np.random.default_rng(SEED).permutation(found).tolist()
    padded = batches = longest = items = 0
    for length in shuffled:
        if items and max(longest, length) * (items + 1) > BUDGET:
            padded, batches, longest, items = padded + longest * items, batches + 1, 0, 0
        longest, items = max(longest, length), items + 1
    padded, batches = padded + longest * items, batches + 1
    print(f"{'pool_size':>12} {'batches':>8} {'padding':>8}")
    print(f"{'not sorted':>12} {batches:>8,} {1 - found.sum() / padded:>8.2%}")
    for pool in POOLS:
        sampler = FrameBudgetSampler(found, frame_budget=BUDGET, seed=SEED, pool_size=pool)
        print(f"{pool:>12,} {sampler.num_batches(0):>8,} {sampler.padding(0):>8.2%}")


def read(mix: Path, folder: Path) -> None:
    """Read every batch as a dense array, and hold its rows against the sampler's."""
    from pipeline.reader import ShardReader

    sampler = FrameBudgetSampler(lengths(folder), frame_budget=BUDGET, seed=SEED, pool_size=POOL)
    online = BatchStream(sampler)
    ends = {}
    begin = 0
    for name in FILES:
        ends[name] = begin
        paths = sorted((folder / name).glob("*.parquet"))
        begin += sum(pq.ParquetFile(path).metadata.num_rows for path in paths)
    began, frames, count = time.perf_counter(), 0, 0
    for batch in ShardReader(str(mix)).batches(pad={"features": 0}):
        dense, real = batch.dense["features"], batch.lengths["features"]
        assert dense.shape[0] * dense.shape[1] <= BUDGET
        names = batch.table["mix_dataset"].to_pylist()
        rows = batch.table["mix_row"].to_pylist()
        assert [ends[name] + row for name, row in zip(names, rows, strict=True)] == (
            online.next_batch()
        )
        frames += int(real.sum())
        count += 1
        if count == 1:
            print(
                f"the first batch: {dense.dtype} {dense.shape}, {real.min()} to {real.max()} long"
            )
    seconds = time.perf_counter() - began
    print(
        f"{count:,} batches of {frames:,} frames read in {seconds:.1f} s; every one is the "
        "sampler's own"
    )


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "make":
        make(Path(arguments[0]), int(arguments[1]))
    elif command == "padding":
        padding(Path(arguments[0]))
    else:
        read(Path(arguments[0]), Path(arguments[1]))
