"""The Beam PTransforms that build a mix, and ``build``, which runs them.

The pipeline is one linear chain with one output type, a record a run, so that it runs on every
runner. Its steps may be used in other pipelines: ``SpansOfShards() | WriteShards(path) |
PublishManifest(path)``, after ``Plan.save`` has written the plan there; ``ScatterShards`` stands in
for ``WriteShards`` where the rows of a shard lie anywhere in the sources.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import itertools
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import IO, Any, NoReturn

import apache_beam as beam
import apache_beam.runners.portability.fn_api_runner
import numpy as np
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    StandardOptions,
)
from numpy.typing import NDArray

from .commit import commit
from .errors import MixError
from .gather import RunWriter
from .manifest import LOCK, SCRATCH, Manifest
from .planned import Plan, WritePath
from .scatter import (
    MAX_SHARD_BYTES,
    PLACE,
    REQUEST,
    Piece,
    Served,
    SourceGroups,
    Spill,
    cut,
    decoded_shard_bytes,
    request_rows,
    serve_group,
    side_by_side,
    write_shards,
)
from .shard import ShardRecord, shard_name
from .stage import stage_file, to_stage, unstage
from .standing import Standing
from .storage import Folder, is_local
from .writing import BuildError, ShardWriter

Run = tuple[int, int]
"""Consecutive shards (first, past the last) that one thread writes in one go."""
Span = tuple[int, int, int]
"""Consecutive shards that one worker writes, and how many of them make a run."""
Sealed = tuple[int, Any]
"""What goes through the runner, after a check sum of it."""
RunRecord = tuple[int, tuple[ShardRecord, ...]]
"""The shards of a run, as written or found standing; sealed."""

LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner")
_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"

# Between steps the in-process runner holds grouped data as values, as a stream that grows, as a
# message and as values again: more than five times as much as there is, as measured.
_COPIES = 6
# What a worker process gets of a step is one message, and those end at 2 GiB.
_MESSAGE_BYTES = 3 << 29
# What a remote runner's worker takes at a time: shards to write, row groups to serve.
_REMOTE_RUN = 8
_TASK_GROUPS = 8
# What a pipeline begins with travels in its job request, which may take 10 MiB at most.
_MOST_RANGES = 256


def crews_of(threads: int) -> int:
    """How many runs a worker's threads write side by side.

    Decoding takes a third of the work and is done by one thread of a run at a time: so two share a
    run, and with it the open files.
    """
    return max(1, threads // 2)


def runs_of(span: Span) -> Iterator[Run]:
    """The runs of a span."""
    start, stop, size = span
    for at in range(start, stop, size):
        yield at, min(at + size, stop)


def _spans(shards: Run, width: int, size: int) -> Iterator[Span]:
    for at in range(shards[0], shards[1], width):
        yield at, min(at + width, shards[1]), size


class SpansOfShards(beam.PTransform):
    """From the pipeline's root: spans that cover the shards of a plan, spread over the workers.

    ``num_shards`` in all, from ``first_shard`` on; ``span_shards`` is what one worker takes at a
    time, ``run_shards`` what one of its threads does.
    """

    def __init__(
        self, num_shards: int, span_shards: int, run_shards: int, first_shard: int = 0
    ) -> None:
        super().__init__()
        self.num_shards = num_shards
        self.span_shards = span_shards
        self.run_shards = run_shards
        self.first_shard = first_shard

    def expand(self, root: Any) -> Any:
        # Some runners keep to the partitions of what a pipeline begins with: so there are many.
        width = -(-self.num_shards // (self.span_shards * _MOST_RANGES)) * self.span_shards
        stop = self.first_shard + self.num_shards
        ranges = [(at, min(at + width, stop)) for at in range(self.first_shard, stop, width)]
        sizes = (self.span_shards, self.run_shards)
        spans = (
            root
            | "Begin" >> beam.Create(ranges, reshuffle=False)  # (first, past the last)
            | "Spans" >> beam.FlatMap(_spans, *sizes).with_output_types(Span)
        )
        # A single span has nobody to be spread to, and the step would cost a tenth of a second.
        return spans | "Spread" >> beam.Reshuffle() if self.num_shards > self.span_shards else spans


class WriteShards(beam.PTransform):
    """Spans to records: writes the shards of the plan that is saved at ``path``.

    ``threads`` of each worker share the work.
    """

    def __init__(self, path: str, threads: int = 1) -> None:
        super().__init__()
        self.path = path
        self.threads = threads

    def expand(self, spans: Any) -> Any:
        write = _WriteSpan(self.path, self.threads)
        return spans | "WriteRuns" >> beam.ParDo(write).with_output_types(RunRecord)


class ScatterShards(beam.PTransform):
    """Spans to records, as ``WriteShards``, for shards whose rows lie anywhere in the sources.

    Each source row group is decoded once for all spans together. ``task_groups`` row groups are
    one worker's task; ``threads`` of each worker share a task, and then the shards of a run.
    ``spill`` is a folder, of all workers, that rows lie in on their way; without one they go
    through the runner.
    """

    def __init__(
        self, path: str, task_groups: int, threads: int = 1, spill: str | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self.task_groups = task_groups
        self.threads = threads
        self.spill = spill

    def expand(self, spans: Any) -> Any:
        return (
            spans
            | "RequestRows" >> RequestRows(self.path, self.task_groups, self.threads)
            | "ByTask" >> beam.GroupByKey()  # (task, [(run, request), ..])
            | "ServeRows" >> ServeRows(self.path, self.threads, self.spill)
            | "ByRun" >> beam.GroupByKey()  # (run, [piece, ..])
            | "AssembleShards" >> AssembleShards(self.path, self.threads)
        )


class RequestRows(beam.PTransform):
    """Spans to (task, (run, request)): which source rows a run's shards need, by row group.

    A request is an array of ``REQUEST`` as bytes, or the record of a shard that stands already;
    sealed, as pieces are.
    """

    def __init__(self, path: str, task_groups: int, threads: int = 1) -> None:
        super().__init__()
        self.request = _RequestRows(path, task_groups, threads)

    def expand(self, spans: Any) -> Any:
        return spans | beam.ParDo(self.request).with_output_types(tuple[int, tuple[Run, Sealed]])


class ServeRows(beam.PTransform):
    """(task, requests) to (run, piece): decodes each row group once, and serves all who asked."""

    def __init__(self, path: str, threads: int = 1, spill: str | None = None) -> None:
        super().__init__()
        self.serve = _ServeRows(path, threads, spill)

    def expand(self, requests: Any) -> Any:
        return requests | beam.ParDo(self.serve).with_output_types(tuple[Run, Sealed])


class AssembleShards(beam.PTransform):
    """(run, pieces) to records: puts the rows of each shard in order, and writes it."""

    def __init__(self, path: str, threads: int = 1) -> None:
        super().__init__()
        self.assemble = _AssembleShards(path, threads)

    def expand(self, pieces: Any) -> Any:
        return pieces | beam.ParDo(self.assemble).with_output_types(RunRecord)


class PublishManifest(beam.PTransform):
    """Records to the finished mix: publishes the manifest once every shard of the plan stands."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def expand(self, records: Any) -> Any:
        return (
            records
            | "Together" >> beam.Map(_keyed).with_output_types(tuple[int, RunRecord])
            | "Gather" >> beam.GroupByKey()  # (0, [run record, ..])
            | "Commit" >> beam.Map(_commit, path=self.path).with_output_types(int)
        )


class StageSources(beam.PTransform):
    """From the pipeline's root: stages sources that open only at their beginning; their numbers.

    ``num_files`` in all, of the plan that is saved at ``path``; ``span_files`` are what one worker
    takes at a time, and ``threads`` of it share them.
    """

    def __init__(self, path: str, num_files: int, span_files: int, threads: int = 1) -> None:
        super().__init__()
        self.path = path
        self.spans = SpansOfShards(num_files, span_files, 1)
        self.threads = threads

    def expand(self, root: Any) -> Any:
        stage = _StageFiles(self.path, self.threads)
        return root | "Spans" >> self.spans | "Stage" >> beam.ParDo(stage).with_output_types(int)


class BuildMix(beam.PTransform):
    """From the pipeline's root: builds the mix whose plan is saved at ``path``.

    ``write`` makes records of the spans: ``WriteShards`` or ``ScatterShards``. Without ``publish``
    it is left at the shards.
    """

    def __init__(
        self, path: str, spans: SpansOfShards, write: beam.PTransform, publish: bool = True
    ) -> None:
        super().__init__()
        self.path = path
        self.spans = spans
        self.write = write
        self.publish = publish

    def expand(self, root: Any) -> Any:
        records = root | "SpansOfShards" >> self.spans | type(self.write).__name__ >> self.write
        return records | "Publish" >> PublishManifest(self.path) if self.publish else records


class _WriteSpan(beam.DoFn):
    """Writes a span's runs with threads of its own, since Arrow lets go of the interpreter lock."""

    def __init__(self, path: str, threads: int) -> None:
        super().__init__()
        self._path = path
        self._crews = crews_of(threads)
        self._crew_threads = -(-threads // self._crews)

    def setup(self) -> None:
        self._writer = RunWriter(Plan.load(Folder.at(self._path)), self._crews)

    def process(self, span: Span) -> Iterator[RunRecord]:
        cancelled = threading.Event()
        with ThreadPoolExecutor(self._crews) as pool:
            try:
                runs = [
                    pool.submit(self._writer.write, *run, self._crew_threads, cancelled)
                    for run in runs_of(span)
                ]
                done, _ = wait(runs, return_when=FIRST_EXCEPTION)
                for run in done:
                    run.result()
            except BaseException:
                # The other threads end with the shards that they are at.
                cancelled.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for run in runs:
            yield _sealed(tuple(run.result()))


class _StageFiles(beam.DoFn):
    def __init__(self, path: str, threads: int) -> None:
        super().__init__()
        self._path = path
        self._threads = threads

    def setup(self) -> None:
        self._catalog = Plan.load(Folder.at(self._path)).catalog
        self._files = to_stage(self._catalog)

    def process(self, span: Span) -> Iterator[int]:
        def stage(number: int) -> int:
            stage_file(self._catalog, *self._files[number])
            return number

        yield from side_by_side(stage, range(*span[:2]), self._threads)


class _RequestRows(beam.DoFn):
    def __init__(self, path: str, task_groups: int, threads: int) -> None:
        super().__init__()
        self._path = path
        self._task_groups = task_groups
        self._threads = threads

    def setup(self) -> None:
        plan = Plan.load(Folder.at(self._path))
        self._writer = ShardWriter(plan)
        self._groups = SourceGroups(plan.catalog)

    def process(self, span: Span) -> Iterator[tuple[int, tuple[Run, Sealed]]]:
        for run in runs_of(span):
            footers = [self._writer.footer(shard) for shard in range(*run)]
            standing = list(side_by_side(self._writer.standing, footers, self._threads))
            # A record takes the way of the rows, so that the chain stays one.
            yield from ((0, (run, _sealed(record))) for record in standing if record is not None)
            pairs = zip(footers, standing, strict=True)
            lacking = [footer for footer, record in pairs if record is None]
            if lacking:
                requests = request_rows(self._writer, self._groups, lacking)
                for task, part in cut(requests, requests["group"] // self._task_groups):
                    yield task, (run, _sealed(part.tobytes()))


class _ServeRows(beam.DoFn):
    def __init__(self, path: str, threads: int, spill: str | None) -> None:
        super().__init__()
        self._path = path
        self._threads = threads
        self._spill = spill

    def setup(self) -> None:
        self._groups = SourceGroups(Plan.load(Folder.at(self._path)).catalog)

    def process(
        self, task: tuple[int, Iterable[tuple[Run, Sealed]]]
    ) -> Iterator[tuple[Run, Sealed]]:
        asked: dict[int, list[tuple[Run, NDArray[Any]]]] = {}
        for run, arrived in task[1]:
            request = _opened(arrived, range(*run))
            if isinstance(request, ShardRecord):
                yield run, arrived
                continue
            requests = np.frombuffer(request, REQUEST)
            for group, part in cut(requests, requests["group"]):
                asked.setdefault(group, []).append((run, part))

        def serve(group: int) -> list[tuple[Run, Served]]:
            return list(serve_group(self._groups, group, asked[group]))

        pieces = itertools.chain.from_iterable(side_by_side(serve, sorted(asked), self._threads))
        if self._spill is None:
            for run, (places, message) in pieces:
                yield run, _sealed((places, message.to_pybytes()))
            return
        with contextlib.closing(Spill(self._spill)) as spill:
            for run, (places, message) in pieces:
                yield run, _sealed((places, spill.put(message)))


class _AssembleShards(beam.DoFn):
    def __init__(self, path: str, threads: int) -> None:
        super().__init__()
        self._path = path
        self._threads = threads

    def setup(self) -> None:
        self._writer = ShardWriter(Plan.load(Folder.at(self._path)))

    def process(self, arrived: tuple[Run, Iterable[Sealed]]) -> Iterator[RunRecord]:
        run = arrived[0]
        found: list[Piece | ShardRecord] = [_opened(part, range(*run)) for part in arrived[1]]
        pieces = [piece for piece in found if not isinstance(piece, ShardRecord)]
        known = {record.shard: record for record in found if isinstance(record, ShardRecord)}
        footers = [self._writer.footer(shard) for shard in range(*run)]
        yield _sealed(tuple(write_shards(self._writer, footers, pieces, known, self._threads)))


def _sealed(value: Any) -> Sealed:
    return _check_sum(value), value


def _opened(sealed: Sealed, shards: Iterable[int] | None = None) -> Any:
    """What was sealed; of ``shards``, or else it is records that say so themselves.

    Raises:
        BuildError: the runner brings something else than was given to it.
    """
    check_sum, value = sealed
    if _check_sum(value) != check_sum:
        numbers = sorted(shards or (record.shard for record in value))
        raise BuildError(
            f"{shard_name(numbers[0])} to {numbers[-1]}: what the runner brought of them was "
            "altered on its way; nothing was published: build again, and the shards that stand are "
            "kept"
        )
    return value


def _check_sum(value: Any) -> int:
    """Of bytes, a record or a path, or a tuple of these."""
    total = 0
    for part in value if isinstance(value, tuple) else (value,):
        total = zlib.crc32(part if isinstance(part, bytes) else repr(part).encode(), total)
    return total


def _keyed(record: RunRecord) -> tuple[int, RunRecord]:
    return 0, record


def _commit(together: tuple[int, Iterable[RunRecord]], path: str) -> int:
    plan, runs = Plan.load(Folder.at(path)), together[1]
    commit(plan, itertools.chain.from_iterable(map(_opened, runs)))
    return plan.layout.num_shards


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has left, or its container at most.

    Where the system does not say, 4 GiB.
    """
    found: list[int] = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        found += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{path}") as file:
            found.append(int(file.read()))  # "max" where there is no limit
    return min(found, default=4 << 30)


def build(
    plan: Plan,
    beam_options: Sequence[str] = (),
    *,
    overwrite: bool = False,
    threads: int | None = None,
    run_shards: int | None = None,
    shared_filesystem: bool = False,
    write_path: WritePath | None = None,
    memory_limit: int | None = None,
    keep_stage: bool = False,
) -> Manifest:
    """Write a plan's shards with Beam and publish its manifest; the finished mix.

    Shards that stand whole from an earlier build of the same plan are kept. ``beam_options`` are
    command-line options of Beam; without a runner among them the work is done in this process.
    ``threads`` a worker, by default all cores, share runs of ``run_shards`` shards.
    ``shared_filesystem`` says that a local output path means the same folder on every worker of a
    remote runner. ``write_path`` is how rows come together, by default as the plan says; the bytes
    are the same. Where rows come from anywhere, this machine keeps them on its disk until they are
    written, and in memory where they belong: as many shards are written at a time as half of the
    free disk and ``memory_limit`` bytes allow, by default half of the memory that is free.
    Compressed lines are staged as Parquet in the output folder first, and with ``keep_stage`` left
    there.

    Raises:
        PlanError: another mix stands in the output folder.
        BuildError: the runner cannot be used, or the build failed; nothing was published.
    """
    options = parse_options(beam_options)
    local = check_runner(plan, options, shared_filesystem)
    workers = int(options.view_as(DirectOptions).direct_num_workers or 1) if local else 1
    threads = threads or (max(1, available_cores() // workers) if local else 1)
    scatter = (write_path or plan.write_path) == "scatter"
    if scatter:
        decoded_shard_bytes(plan)  # which refuses shards that are too large
    with _locked(plan.folder):
        plan = plan.save(overwrite)
        spill = plan.folder.scratch("rows") if scatter and local else None
        if spill:
            memory = memory_limit or available_memory() // 2
            if options.view_as(DirectOptions).direct_running_mode == "multi_processing":
                memory = min(memory, workers * _COPIES * _MESSAGE_BYTES)
            mixes = _scatter_waves(plan, workers, threads, run_shards, memory, spill)
        elif scatter:
            mixes = [_scatter(plan, threads, run_shards)]
        else:
            mixes = [_gather(plan, workers if local else None, threads, run_shards)]
        steps: list[Any] = [*_stages(plan, workers if local else None, threads), *mixes]
        for step in steps:
            pipeline = beam.Pipeline(runner=_runner(options), options=options)
            _ = pipeline | type(step).__name__ >> step
            try:
                _run(pipeline)
            except Exception as error:
                if any(isinstance(seen, KeyboardInterrupt) for seen in _chain(error)):
                    raise KeyboardInterrupt from error
                raise BuildError(_reason(error)) from error
            finally:
                if spill:
                    shutil.rmtree(spill, ignore_errors=True)
        if not keep_stage:
            unstage(plan.folder)
        return Manifest.load(plan.folder)


def _stages(plan: Plan, workers: int | None, threads: int) -> list[StageSources]:
    """The pipeline that stages sources, where there are such and a shard is still to be written."""
    files, shards = len(to_stage(plan.catalog)), plan.layout.num_shards
    if not files or Standing(plan.folder, plan.manifest.bytes_id).seem_all(shards):
        return []
    return [StageSources(plan.folder.uri, files, -(-files // workers) if workers else 1, threads)]


def _run(pipeline: beam.Pipeline) -> None:
    """Run a pipeline to its end."""
    result = pipeline.run()
    try:
        result.wait_until_finish()
    finally:
        # Dask's, whose workers on this machine would stay.
        client = getattr(result, "client", None)
        if client is not None:
            client.close()


def _gather(plan: Plan, workers: int | None, threads: int, run_shards: int | None) -> BuildMix:
    """The pipeline of a gather; ``workers`` are this machine's, None are another's."""
    shards = plan.layout.num_shards
    local = workers is not None
    crews = (workers or 1) * crews_of(threads)
    run = run_shards or default_run_shards(shards, crews, local)
    # Another machine's worker has a run for each of its crews, and is given more when it is done.
    span = max(run, -(-shards // workers)) if workers else run * crews
    spans = SpansOfShards(shards, span, run)
    return BuildMix(plan.folder.uri, spans, WriteShards(plan.folder.uri, threads))


def _scatter(plan: Plan, threads: int, run_shards: int | None) -> BuildMix:
    """The pipeline of a scatter by another machine's workers; a run's rows fit into memory."""
    path, shards = plan.folder.uri, plan.layout.num_shards
    fitting = max(1, MAX_SHARD_BYTES // decoded_shard_bytes(plan))
    run = min(run_shards or _REMOTE_RUN, fitting, shards)
    return BuildMix(
        path, SpansOfShards(shards, run, run), ScatterShards(path, _TASK_GROUPS, threads)
    )


def _scatter_waves(
    plan: Plan, workers: int, threads: int, run_shards: int | None, memory: int, spill: str
) -> list[BuildMix]:
    """The pipelines of a scatter by this machine, one after another.

    Each but the last writes a wave of shards: their rows fit onto half of the free disk, and what
    the runner holds of them fits into ``memory``. The last writes what is left, finds the others
    standing, and publishes.
    """
    path, layout = plan.folder.uri, plan.layout
    rows = int(plan.manifest.document["num_rows"]) * layout.batches_per_shard // layout.num_batches
    held = _COPIES * (REQUEST.itemsize + PLACE.itemsize) * max(1, rows)
    disk = shutil.disk_usage(os.path.dirname(spill)).free // 2
    shards = layout.num_shards
    wave = min(shards, max(1, min(memory // held, disk // decoded_shard_bytes(plan))))
    tasks = -(-len(SourceGroups(plan.catalog)) // workers)
    run = run_shards or 2 * threads
    mixes = []
    for first in range(0, shards, wave):
        last = first + wave >= shards
        start, count = (0, shards) if last else (first, wave)
        spans = SpansOfShards(count, -(-count // workers), run, start)
        write = ScatterShards(path, tasks, threads, spill)
        mixes.append(BuildMix(path, spans, write, publish=last))
    return mixes


def default_run_shards(shards: int, crews: int, local: bool) -> int:
    """Shards in a run. Here: one run a crew, since every run decodes its first row groups anew.

    A remote runner has no known number of workers: short runs let it spread and retry them.
    """
    return -(-shards // crews) if local else min(_REMOTE_RUN, shards)


def parse_options(flags: Sequence[str]) -> PipelineOptions:
    """Beam's options from command-line flags.

    Raises:
        BuildError: a flag that Beam does not know, a value that does not fit, or a runner that
            cannot be imported.
    """
    named = _parser()
    named.add_argument("--runner", default="")
    runner = named.parse_known_args(list(flags))[0].runner
    if "." in runner:  # such a module may bring options of its own
        _imported(runner)
    parser = _parser()
    for kind in PipelineOptions.__subclasses__():
        kind._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise BuildError(
            f"{' '.join(unknown)}: neither an option of `mixshards build` nor one of Beam"
        )
    return PipelineOptions(list(flags))


def _imported(runner: str) -> None:
    try:
        importlib.import_module(runner.rpartition(".")[0])
    except (ImportError, AttributeError) as error:
        extra = ": it needs `pip install 'mixshards[dask]'`" if runner == _DASK else ""
        raise BuildError(f"--runner {runner} cannot be used{extra}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    return parser


def _refuse(message: str) -> NoReturn:
    raise BuildError(f"an option of Beam does not fit: {message}")


def check_runner(plan: Plan, options: PipelineOptions, shared_filesystem: bool) -> bool:
    """Whether the runner that the options name works in this machine's processes.

    Raises:
        BuildError: the runner would lose elements, or cannot see a local path.
    """
    runner = options.view_as(StandardOptions).runner or LOCAL_RUNNERS[0]
    mode = options.view_as(DirectOptions).direct_running_mode
    if mode == "multi_threading":
        raise BuildError(
            "--direct_running_mode=multi_threading is refused: Beam was seen to lose elements in "
            "that mode without a word; leave it out: the build uses all cores by itself "
            "(--threads), and multi_processing works too"
        )
    local = _named_local(runner)
    if not local:
        try:
            beam.runners.create_runner(runner)
        except (ValueError, ImportError, AttributeError) as error:
            raise BuildError(f"--runner {runner} cannot be used: {error}") from error
    workers = options.view_as(DirectOptions).direct_num_workers
    if workers < 0:
        raise BuildError(f"--direct_num_workers must be at least 0, found {workers}")
    if not local and not shared_filesystem:
        paths = [plan.manifest.document["config"]["output"]]
        paths += [file.path for dataset in plan.catalog.datasets for file in dataset.files[:1]]
        for path in paths:
            if is_local(path):
                raise BuildError(
                    f"runner {runner} may work on other machines, but {path!r} is a path on this "
                    "one; use URIs that every worker can open, or say --shared-filesystem if the "
                    "path is the same folder on all of them"
                )
    return local


def _named_local(runner: str) -> bool:
    # Beam takes runners by path, by name in any case, and without the last part of it.
    name = runner.rpartition(".")[2].lower().removesuffix("runner")
    return name in {known.lower().removesuffix("runner") for known in LOCAL_RUNNERS}


def _runner(options: PipelineOptions) -> str:
    name = options.view_as(StandardOptions).runner
    # Beam's DirectRunner first tries to fetch the binary of another runner from the network.
    return LOCAL_RUNNERS[0] if name is None or _named_local(name) else str(name)


def _reason(error: BaseException) -> str:
    """What a person needs of a failed pipeline: our own error where there is one, else one line."""
    ours = [str(seen) for seen in _chain(error) if isinstance(seen, MixError)]
    text = ours[0] if ours else str(error)
    if not text:
        return (
            f"the runner did not answer ({type(error).__name__}): is its service running, and are "
            "its address and --job_endpoint right?"
        )
    # Runners hand on a worker's error as the text of its traceback.
    at = [found.start() for found in re.finditer(r"^pipeline\.[\w.]+Error: ", text, re.MULTILINE)]
    if at:
        text = text[at[-1] :].split(": ", 1)[1].partition(" [while running '")[0]
    elif "Traceback (most recent call last)" in text:
        lines = re.findall(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b.*", text, re.MULTILINE)
        text = lines[-1] if lines else text
        if "No module named 'pipeline" in text:
            text += "; the workers need mixshards: give --setup_file, or a container that has it"
    return re.sub(r"\s*\[while running '[^']*'\]", "", text).strip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that it came of."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


@contextlib.contextmanager
def _locked(folder: Folder) -> Iterator[None]:
    """Hold a local output folder for one build; scratch that a killed build left is removed.

    Raises:
        BuildError: another build is at work there.
    """
    if not folder.local:
        yield
        return
    try:
        os.makedirs(folder.path("_mix"), exist_ok=True)
        lock = _lock(folder.path(LOCK))
    except BlockingIOError as error:
        raise BuildError(
            f"{folder.root}: another build is writing there; wait for it to end"
        ) from error
    except OSError as error:
        raise BuildError(
            f"output {folder.root} cannot be written to: {error.strerror}; choose another `output`"
        ) from error
    with lock:
        try:
            for name in folder.names(SCRATCH):
                if name.endswith(".part"):
                    folder.delete(f"{SCRATCH}/{name}")
            yield
        finally:
            folder.delete(LOCK)


def _lock(path: str) -> IO[str]:
    """A file that is locked. Raises BlockingIOError where another process holds it."""
    while True:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may just have removed it, and then it keeps nobody out.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()
                    return file
