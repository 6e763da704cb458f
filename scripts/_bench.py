"""What the benchmarks share: deterministic sources, fresh processes to measure in, plain tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# Nothing heavy is imported here: a process starts with the peak memory of the one that started it.

GROUP_ROWS = 8192
_COMPLETE = "complete.json"
_SEED = 20260
_WORDS, _TOKENS = 30_000, 32_000
_MEDIAN_WORDS, _SIGMA, _TOKENS_PER_WORD = 200, 0.9, 1.3
_FIXED_TOKENS = 512
# About what a row takes in Arrow, by the kind of sources; the number of rows follows from it.
ROW_BYTES = {"sources": 3600, "fixed": 4 * _FIXED_TOKENS + 16, "narrow": 16}


class Timed(NamedTuple):
    """What a job measured of itself, by a clock that all processes share."""

    begun: float
    ended: float
    cpu: float
    amount: float

    @property
    def seconds(self) -> float:
        """How long the measured part took."""
        return self.ended - self.begun

    @property
    def rate(self) -> float:
        """Amount a second."""
        return self.amount / self.seconds


class Measured(NamedTuple):
    """A job's own figures; seconds and peak MiB of the process that was started for it alone."""

    job: Timed
    process_seconds: float
    peak_mib: float


Job = Callable[[], Timed]
T = TypeVar("T")


def timed(work: Callable[[], float]) -> Timed:
    """Time a piece of work that returns its amount."""
    begun, cpu = time.monotonic(), time.process_time()
    amount = work()
    return Timed(begun, time.monotonic(), time.process_time() - cpu, amount)


def _measured(job: Job) -> tuple[Timed, float]:
    return job(), _peak_mib()


def resident_mib() -> float:
    """Memory that this process holds now; its peak, where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return _peak_mib()


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def in_process(work: Callable[[], T]) -> T:
    """Do something in a process of its own; what it returns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def fresh(*jobs: Job) -> list[Measured]:
    """Run each job in a process of its own, several side by side."""
    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        pools = [ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) for _ in jobs]
        for pool in pools:
            stack.enter_context(pool)
        futures = [pool.submit(_measured, job) for pool, job in zip(pools, jobs, strict=True)]
        results = [future.result() for future in futures]
    process_seconds = time.monotonic() - begun
    return [Measured(result, process_seconds, peak) for result, peak in results]


def together(*jobs: Job) -> Measured:
    """Run jobs side by side; one figure, from the first that began to the last that ended."""
    runs = fresh(*jobs)
    job = Timed(
        min(run.job.begun for run in runs),
        max(run.job.ended for run in runs),
        sum(run.job.cpu for run in runs),
        sum(run.job.amount for run in runs),
    )
    return Measured(job, runs[0].process_seconds, sum(run.peak_mib for run in runs))


def interleaved(
    cases: Mapping[str, Callable[[], Measured]], rounds: int
) -> dict[str, list[Measured]]:
    """Measure A B C A B C .., so that what disturbs the machine disturbs all alike."""
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            # Pages that an earlier case left to be written are not charged to this one.
            os.sync()
            found[name].append(case())
        seconds = "  ".join(f"{name} {runs[-1].job.seconds:.3f}" for name, runs in found.items())
        print(f"round {number + 1}/{rounds}: {seconds}", file=sys.stderr, flush=True)
    return found


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Median, least and greatest."""
    values = list(values)
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"


def ratios(
    over: Sequence[Measured],
    under: Sequence[Measured],
    of: Callable[[Measured], float] = lambda run: run.job.seconds,
) -> list[float]:
    """Quotient of a figure, round by round."""
    return [of(a) / of(b) for a, b in zip(over, under, strict=True)]


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        first, *others = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
    sys.stdout.flush()


def arguments(description: str | None, gigabytes: float, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder for what is generated; kept, and reused when complete (default: a temporary "
        "one that is removed)",
        default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--gigabytes", type=float, default=gigabytes, help="size of the sources, in Arrow memory"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each case")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--batches-per-shard", type=int, default=64)
    return parser


@contextlib.contextmanager
def workspace(options: argparse.Namespace) -> Iterator[Path]:
    """The folder that was asked for, or else one that is removed at the end."""
    given: Path | None = getattr(options, "data", None)
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="mixshards-bench-") as folder:
        yield Path(folder)


def kept(folder: Path, make: Callable[[Path], T]) -> T:
    """Fill a folder in a process of its own, unless it is complete; what was made, as JSON."""
    marker = folder / _COMPLETE
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"making {folder} ..", file=sys.stderr, flush=True)
        marker.write_text(json.dumps(in_process(partial(make, folder))))
    made: T = json.loads(marker.read_text())
    return made


def sources(
    root: Path, gigabytes: float, shares: Sequence[int], files: int, kind: str = "sources"
) -> tuple[Path, dict[str, Any]]:
    """A folder of Parquet, a dataset a share, and what is in it.

    Kinds: "sources", text and tokens; "fixed", columns of a fixed size; "narrow", two integers.
    """
    total = gigabytes * 1e9 / ROW_BYTES[kind]
    rows = [max(files, round(total * share / sum(shares))) for share in shares]
    folder = root / f"{kind}-{len(shares)}x{files}-{sum(rows)}"
    found = kept(folder, partial(_make_sources, rows, files, kind))
    size = f"{found['arrow_bytes'] / 1e9:.2f} GB in Arrow, {found['file_bytes'] / 1e9:.2f} in files"
    print(f"{kind}: {len(rows)} datasets, {sum(rows):,} rows, {size}")
    for path in sorted(folder.rglob("*.parquet")):
        path.read_bytes()  # so that every round finds them in memory
    return folder, found


def config(
    folder: Path, found: Mapping[str, Any], form: str = "parquet", **settings: object
) -> dict[str, Any]:
    """A mix of all rows of all datasets, once; it lacks an output."""
    datasets: dict[str, Any] = {
        name: {"path": f"{folder}/{name}/*.{form}", "weight": rows}
        for name, rows in found["rows"].items()
    }
    if "json" in form:
        for entry in datasets.values():
            entry["schema"] = {"tokens": "list<int32>"}
    return {"on_exhausted": "stop", "datasets": datasets, **settings}


def _make_sources(rows: Sequence[int], files: int, kind: str, folder: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    generate = {"sources": _generator, "fixed": _fixed, "narrow": _narrow}[kind]()
    arrow_bytes = 0
    names = [f"d{at:03d}" for at in range(len(rows))]
    for at, (name, total) in enumerate(zip(names, rows, strict=True)):
        (folder / name).mkdir()
        first = 0
        for file in range(files):
            count = total // files + (file < total % files)
            sizes = [min(GROUP_ROWS, count - row) for row in range(0, count, GROUP_ROWS)]
            path = folder / name / f"part-{file:03d}.parquet"
            writer: pq.ParquetWriter | None = None
            for group, size in enumerate(sizes):
                table = generate((_SEED, at, file, group), first, size)
                arrow_bytes += table.nbytes
                writer = writer or pq.ParquetWriter(
                    path, table.schema, compression="zstd", compression_level=1
                )
                writer.write_table(table, row_group_size=size)
                first += size
            assert writer is not None  # a file has at least one row
            writer.close()
    file_bytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    found = dict(zip(names, rows, strict=True))
    return {"rows": found, "arrow_bytes": arrow_bytes, "file_bytes": file_bytes}


def _generator() -> Callable[[Sequence[int], int, int], Any]:
    """A function of seed, first id and rows, which gives a table."""
    import numpy as np
    import pyarrow as pa

    letters = np.random.default_rng(_SEED)
    syllables = [a + b + c for a in "bdfgklmnprstvw" for b in "aeiou" for c in ("", "n", "r", "s")]
    # Frequent words are short, as they are in languages.
    lengths = [1 + (at > 60) + (at > 2000) + int(letters.integers(2)) for at in range(_WORDS)]
    words = pa.array(
        ["".join(letters.choice(syllables, length).tolist()) + " " for length in lengths]
    )
    curves = {n: np.cumsum(1 / np.arange(1, n + 1) ** 1.07) for n in (_WORDS, _TOKENS)}

    def zipf(random: np.random.Generator, kinds: int, count: int) -> Any:
        curve = curves[kinds]
        return np.searchsorted(curve, random.random(count) * curve[-1]).astype(np.int32)

    def generate(seed: Sequence[int], first: int, rows: int) -> pa.Table:
        random = np.random.default_rng(seed)
        drawn = random.lognormal(np.log(_MEDIAN_WORDS), _SIGMA, rows)
        length = np.clip(drawn, 4, 40 * _MEDIAN_WORDS).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(length)])
        joined = words.take(pa.array(zipf(random, _WORDS, int(ends[-1]))))
        _, places, data = joined.buffers()
        offsets = np.frombuffer(places, np.int32)[ends]
        text = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets.tobytes()), data)
        ends = (ends * _TOKENS_PER_WORD).astype(np.int32)
        tokens = pa.array(zipf(random, _TOKENS, int(ends[-1])))
        return pa.table(
            {
                "id": np.arange(first, first + rows),
                "text": text,
                "tokens": pa.ListArray.from_arrays(pa.array(ends), tokens),
            }
        )

    return generate


def _fixed() -> Callable[[Sequence[int], int, int], Any]:
    """The same for rows of one size: tokens by a fixed number, a float and an integer."""
    import numpy as np
    import pyarrow as pa

    def generate(seed: Sequence[int], first: int, rows: int) -> pa.Table:
        random = np.random.default_rng(seed)
        # The logarithm of a uniform number: many small ones, as frequent tokens have.
        drawn = np.exp(random.random(rows * _FIXED_TOKENS, np.float32) * np.log(_TOKENS))
        tokens = pa.FixedSizeListArray.from_arrays(drawn.astype(np.int32), _FIXED_TOKENS)
        scores = random.random(rows)
        return pa.table({"id": np.arange(first, first + rows), "score": scores, "tokens": tokens})

    return generate


def _narrow() -> Callable[[Sequence[int], int, int], Any]:
    """The same for rows of two integers."""
    import numpy as np
    import pyarrow as pa

    def generate(seed: Sequence[int], first: int, rows: int) -> pa.Table:
        values = np.random.default_rng(seed).integers(2**40, size=rows)
        return pa.table({"id": np.arange(first, first + rows), "value": values})

    return generate


def as_format(folder: Path, form: str) -> Path:
    """The sources of a folder in another format (``jsonl``, ``jsonl.gz``, ``arrow``), beside it."""
    target = folder.with_name(f"{folder.name}-{form}")
    kept(target, partial(_convert, folder, form))
    for path in sorted(target.rglob(f"*.{form}")):
        path.read_bytes()
    return target


def _convert(folder: Path, form: str, target: Path) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in sorted(folder.rglob("*.parquet")):
        made = target / path.relative_to(folder).with_suffix(f".{form}")
        made.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetFile(path) as parquet:
            groups = map(parquet.read_row_group, range(parquet.num_row_groups))
            if form == "arrow":
                with pa.ipc.new_file(str(made), parquet.schema_arrow) as writer:
                    for group in groups:
                        writer.write_table(group, max_chunksize=1000)
                continue
            with gzip.open(made, "wb", 6) if form.endswith("gz") else open(made, "wb") as file:
                for group in groups:
                    file.writelines(f"{json.dumps(row)}\n".encode() for row in group.to_pylist())


def _tables(path: str, schema: Any) -> Iterator[Any]:
    """What a file holds, as pyarrow reads it with one thread: tables of about GROUP_ROWS rows."""
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet as pq

    if path.endswith(".parquet"):
        with pq.ParquetFile(path) as parquet:
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, use_threads=False)
        return
    with contextlib.ExitStack() as stack:
        batches: Iterable[Any]
        if path.endswith(".arrow"):
            reader = pa.ipc.open_file(stack.enter_context(pa.OSFile(path)))
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.json.open_json(
                stack.enter_context(pa.input_stream(path)),
                pa.json.ReadOptions(use_threads=False, block_size=4 << 20),
                pa.json.ParseOptions(schema),
            )
        held, rows = [], 0
        for batch in batches:
            held.append(batch)
            rows += batch.num_rows
            if rows >= GROUP_ROWS:
                yield pa.Table.from_batches(held)
                held, rows = [], 0
        if held:
            yield pa.Table.from_batches(held)


def plain_copy(settings: Mapping[str, Any], files: Sequence[str], output: Path) -> Timed:
    """Copy rows with one thread, file after file, into files of about as many rows as a shard."""
    import pyarrow.parquet as pq

    from pipeline.plan import plan

    planned = plan(settings)
    schema, layout = planned.catalog.schema, planned.layout
    options = planned.options.for_writer(schema)
    group_rows = layout.batches_per_row_group * settings["batch_size"]
    file_rows = layout.batches_per_shard * settings["batch_size"]
    output.mkdir(parents=True)

    def work() -> int:
        rows = written = 0
        writer: pq.ParquetWriter | None = None
        for path in files:
            for table in _tables(path, schema):
                if writer is None or rows >= written * file_rows:
                    if writer is not None:
                        writer.close()
                    target = output / f"copy-{written:04d}.parquet"
                    writer = pq.ParquetWriter(target, schema, **options)
                    written += 1
                writer.write_table(table.cast(schema), row_group_size=group_rows)
                rows += table.num_rows
        if writer is not None:
            writer.close()
        return rows

    return timed(work)
