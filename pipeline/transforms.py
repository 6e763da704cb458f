"""The Beam PTransforms that build a mix, and ``build``, which runs them.

The pipeline is one linear chain with one output type, a record a run, so that it runs on every
runner. Its steps may be used in other pipelines: ``SpansOfShards() | WriteShards(path) |
PublishManifest(path)``, after ``Plan.save`` has written the plan there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import apache_beam as beam
import apache_beam.runners.portability.fn_api_runner
from apache_beam.options.pipeline_options import (
    DirectOptions,
    PipelineOptions,
    StandardOptions,
)

from .commit import commit
from .errors import MixError
from .gather import RunWriter
from .manifest import SCRATCH, Manifest
from .plan import Plan
from .shard import ShardRecord
from .storage import Folder, is_local
from .writing import BuildError

Run = tuple[int, int]
"""Consecutive shards (first, past the last) that one thread writes in one go."""
Span = tuple[int, int, int]
"""Consecutive shards that one worker writes, and how many of them make a run."""
RunRecord = tuple[ShardRecord, ...]
"""The shards of a run, as written or found standing."""

LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner")


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


def _spans(_: bytes, shards: int, width: int, size: int) -> Iterator[Span]:
    for at in range(0, shards, width):
        yield at, min(at + width, shards), size


class SpansOfShards(beam.PTransform):
    """From the pipeline's root: spans that cover the shards of a plan, spread over the workers.

    ``num_shards`` in all; ``span_shards`` is what one worker takes at a time, ``run_shards`` what
    one of its threads does.
    """

    def __init__(self, num_shards: int, span_shards: int, run_shards: int) -> None:
        super().__init__()
        self.num_shards = num_shards
        self.span_shards = span_shards
        self.run_shards = run_shards

    def expand(self, root: Any) -> Any:
        sizes = (self.num_shards, self.span_shards, self.run_shards)
        spans = (
            root
            | "Begin" >> beam.Impulse()  # b""
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


class BuildMix(beam.PTransform):
    """From the pipeline's root: builds the mix whose plan is saved at ``path``."""

    def __init__(
        self, path: str, num_shards: int, span_shards: int, run_shards: int, threads: int = 1
    ) -> None:
        super().__init__()
        self.path = path
        self.spans = SpansOfShards(num_shards, span_shards, run_shards)
        self.threads = threads

    def expand(self, root: Any) -> Any:
        return (
            root
            | "SpansOfShards" >> self.spans
            | "WriteShards" >> WriteShards(self.path, self.threads)
            | "PublishManifest" >> PublishManifest(self.path)
        )


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
            yield tuple(run.result())


def _keyed(record: RunRecord) -> tuple[int, RunRecord]:
    return 0, record


def _commit(together: tuple[int, Iterable[RunRecord]], path: str) -> int:
    plan, records = Plan.load(Folder.at(path)), together[1]
    commit(plan, itertools.chain.from_iterable(records))
    return plan.layout.num_shards


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build(
    plan: Plan,
    beam_options: Sequence[str] = (),
    *,
    overwrite: bool = False,
    threads: int | None = None,
    run_shards: int | None = None,
    shared_filesystem: bool = False,
) -> Manifest:
    """Write a plan's shards with Beam and publish its manifest; the finished mix.

    Shards that stand whole from an earlier build of the same plan are kept. ``beam_options`` are
    command-line options of Beam; without a runner among them the work is done in this process.
    ``threads`` a worker, two to a run, write runs of ``run_shards`` shards; by default all cores
    are used, and each pair of threads gets one run. ``shared_filesystem`` says that a local
    output path means the same folder on every worker of a remote runner.

    Raises:
        PlanError: another mix stands in the output folder.
        BuildError: the runner cannot be used, or the build failed; nothing was published.
    """
    options = parse_options(beam_options)
    local = check_runner(plan, options, shared_filesystem)
    workers = int(options.view_as(DirectOptions).direct_num_workers or 1) if local else 1
    threads = threads or (max(1, available_cores() // workers) if local else 1)
    shards = plan.layout.num_shards
    with _locked(plan.folder):
        plan = plan.save(overwrite)
        run = run_shards or default_run_shards(shards, workers * crews_of(threads), local)
        span = max(run, -(-shards // workers)) if local else run
        pipeline = beam.Pipeline(runner=_runner(options), options=options)
        _ = pipeline | "BuildMix" >> BuildMix(plan.folder.uri, shards, span, run, threads)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:
            if any(isinstance(seen, KeyboardInterrupt) for seen in _chain(error)):
                raise KeyboardInterrupt from error
            raise BuildError(_reason(error)) from error
        return Manifest.load(plan.folder)


def default_run_shards(shards: int, crews: int, local: bool) -> int:
    """Shards in a run. Here: one run a crew, since every run decodes its first row groups anew.

    A remote runner has no known number of workers: short runs let it spread and retry them.
    """
    return -(-shards // crews) if local else min(8, shards)


def parse_options(flags: Sequence[str]) -> PipelineOptions:
    """Beam's options from command-line flags.

    Raises:
        BuildError: a flag that Beam does not know, or a value that does not fit.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    for kind in PipelineOptions.__subclasses__():
        kind._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise BuildError(
            f"{' '.join(unknown)}: neither an option of `mixshards build` nor one of Beam"
        )
    return PipelineOptions(list(flags))


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
    local = runner.rpartition(".")[2] in LOCAL_RUNNERS
    if not local and not shared_filesystem:
        paths = [plan.manifest.document["config"]["output"]]
        paths += [file.path for dataset in plan.catalog.datasets for file in dataset.files[:1]]
        for path in paths:
            if is_local(path):
                raise BuildError(
                    f"runner {runner} works on other machines, but {path!r} is a path on this one; "
                    "use URIs that every worker can open, or say --shared-filesystem if the path "
                    "is the same folder on all of them"
                )
    return local


def _runner(options: PipelineOptions) -> str:
    name = options.view_as(StandardOptions).runner
    # Beam's DirectRunner first tries to fetch the binary of another runner from the network.
    return LOCAL_RUNNERS[0] if name in (None, *LOCAL_RUNNERS) else str(name)


def _reason(error: BaseException) -> str:
    """What a person needs of a failed pipeline: our own error where there is one, else the last."""
    ours = [str(seen) for seen in _chain(error) if isinstance(seen, MixError)]
    text = ours[0] if ours else str(error)
    # Runners hand on a worker's error as the text of its traceback.
    at = [found.start() for found in re.finditer(r"^pipeline\.[\w.]+Error: ", text, re.MULTILINE)]
    if at:
        text = text[at[-1] :].split(": ", 1)[1]
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
    path = folder.path(f"{SCRATCH}/lock")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        opened = open(path, "w")  # noqa: SIM115 (it is the context of the whole build below)
    except OSError as error:
        raise BuildError(
            f"output {folder.root} cannot be written to: {error.strerror}; choose another `output`"
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildError(
                f"{folder.root}: another build is writing there; wait for it to end"
            ) from error
        for name in folder.names(SCRATCH):
            if name.endswith(".part"):
                folder.delete(f"{SCRATCH}/{name}")
        try:
            yield
        finally:
            folder.delete(f"{SCRATCH}/lock")
