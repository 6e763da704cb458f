"""Every runner builds the same files, and one that loses or alters elements publishes nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import click
import pytest
from apache_beam.pipeline import AppliedPTransform, PTransformOverride
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline import cli
from pipeline.plan import Plan, plan
from pipeline.planned import WritePath
from pipeline.transforms import (
    BuildMix,
    RequestRows,
    ServeRows,
    SpansOfShards,
    WriteShards,
    _gather,
    _scatter,
    build,
    parse_options,
)
from pipeline.writing import BuildError

from .mixes import WEIGHTS, config, digests, write_sources

PATHS: tuple[WritePath, ...] = ("gather", "scatter")
REPEATED = ["--direct_runner_bundle_repeat=1"]
TWO_PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
DASK = ["--runner=apache_beam.runners.dask.dask_runner.DaskRunner", "--dask_npartitions=2"]


def planned(sources: Path, **keys: Any) -> Plan:
    return plan(config(sources, WEIGHTS, **{"num_batches": 50, "on_exhausted": "repeat", **keys}))


def built(sources: Path, flags: list[str], **settings: Any) -> dict[str, str]:
    """All files of a mix that is built anew, in one and the same folder whatever builds it."""
    shutil.rmtree(sources / "out", ignore_errors=True)
    build(planned(sources), flags, **settings)
    return digests(sources / "out")


@pytest.fixture(scope="module")
def expected(sources: Path) -> dict[str, str]:
    """The files of the mix as one thread of this process builds them."""
    found = built(sources, [], threads=1, write_path="gather")
    assert len([name for name in found if name.startswith("shards/")]) == 13
    return found


@pytest.mark.parametrize("write_path", PATHS)
@pytest.mark.parametrize(
    "flags",
    [[], ["--runner=direct"], REPEATED, TWO_PROCESSES],
    ids=["in process", "by name", "every bundle twice", "two processes"],
)
def test_runners_of_this_machine_build_the_same_files(
    sources: Path, expected: dict[str, str], flags: list[str], write_path: WritePath
) -> None:
    assert built(sources, flags, run_shards=2, write_path=write_path) == expected


# Beam's job service, with workers in this process and in processes of their own.


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options that send a job to Beam's own job service, which runs on a free port of loopback."""
    folder = tmp_path_factory.mktemp("service")
    port = folder / "port"
    command = [sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main"]
    command += ["--port_file", str(port), "--staging_dir", str(folder / "staged")]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(1200):
            if port.exists() or server.poll() is not None:
                break
            time.sleep(0.05)
        assert port.exists(), (folder / "log").read_text()
        yield ["--runner=PortableRunner", f"--job_endpoint=localhost:{port.read_text()}"]
    finally:
        server.terminate()
        server.wait()


def subprocesses(before: str = "") -> list[str]:
    """Options for workers that are processes of their own and run some Python before they start."""
    code = f"{before}\nfrom apache_beam.runners.worker import sdk_worker_main as w\nw.main([])"
    command = shlex.join([sys.executable, "-c", code])
    kind = "--environment_type=beam:env:harness_subprocess_python:v1"
    return [kind, f"--environment_config={command}"]


@pytest.mark.parametrize("write_path", PATHS)
@pytest.mark.parametrize(
    "workers",
    [["--environment_type=LOOPBACK"], subprocesses()],
    ids=["loopback", "subprocesses"],
)
def test_jobs_of_a_job_service_build_the_same_files(
    sources: Path,
    expected: dict[str, str],
    service: list[str],
    workers: list[str],
    write_path: WritePath,
) -> None:
    settings = {"shared_filesystem": True, "run_shards": 2, "write_path": write_path}
    assert built(sources, service + workers, **settings) == expected


def refused(mix: Plan, flags: list[str]) -> str:
    """What a failing build says, in one line; it leaves no manifest."""
    with pytest.raises(BuildError) as raised:
        build(mix, flags, overwrite=True, shared_filesystem=True)
    assert not Path(mix.folder.path("manifest.json")).exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_source_that_a_worker_does_not_find_is_named_in_one_line(
    sources: Path, service: list[str]
) -> None:
    gone, away = sources / "data" / "web" / "part-002.parquet", sources / "away.parquet"
    mix = planned(sources, output=str(sources / "lacking"))
    gone.rename(away)
    try:
        text = refused(mix, [*service, "--environment_type=LOOPBACK"])
    finally:
        away.rename(gone)
    assert text == f"dataset 'web': {gone}: no such file"


def test_workers_without_this_package_are_told_from_those_with_it(
    sources: Path, service: list[str]
) -> None:
    flags = service + subprocesses("import sys; sys.modules['pipeline'] = None")
    text = refused(planned(sources, output=str(sources / "foreign")), flags)
    assert re.search(r"^ModuleNotFoundError: .*'pipeline.*the workers need mixshards: give", text)


def test_a_job_service_that_does_not_answer_is_said_to(sources: Path) -> None:
    flags = ["--runner=PortableRunner", "--job_endpoint=localhost:1", "--job_server_timeout=1"]
    text = refused(planned(sources, output=str(sources / "silent")), flags)
    assert re.search("the runner did not answer.*--job_endpoint", text)


# Runners that are not part of every test run.


def test_dask_builds_the_same_files(sources: Path, expected: dict[str, str]) -> None:
    pytest.importorskip("dask.distributed")
    for write_path in PATHS:
        settings = {"shared_filesystem": True, "run_shards": 2, "write_path": write_path}
        assert built(sources, DASK, **settings) == expected


def test_dask_that_is_not_installed_is_said_to_be() -> None:
    if importlib.util.find_spec("distributed"):
        pytest.skip("it is installed here")
    with pytest.raises(BuildError, match=r"DaskRunner cannot be used: it needs `pip install 'mixs"):
        parse_options(DASK)


@pytest.mark.parametrize("write_path", PATHS)
def test_a_cluster_builds_the_same_files(
    sources: Path, expected: dict[str, str], request: pytest.FixtureRequest, write_path: WritePath
) -> None:
    endpoint = request.config.getoption("--job_endpoint")
    if endpoint is None:
        pytest.skip("no --job_endpoint of a Flink or Spark is given")
    flags = ["--runner=PortableRunner", f"--job_endpoint={endpoint}"]
    flags += shlex.split(request.config.getoption("--job_options"))
    settings = {"shared_filesystem": True, "run_shards": 2, "write_path": write_path}
    assert built(sources, flags, **settings) == expected


# Runners that do what they should not.

Fault = Callable[[list[Any]], list[Any]]


class Faulty(FnApiRunner):
    """A runner that does something to all that comes out of one step."""

    step: type[beam.PTransform]
    fault: Fault

    def run_pipeline(self, pipeline: Any, options: Any) -> Any:
        pipeline.replace_all([_Put(Faulty.step, Faulty.fault)])
        return super().run_pipeline(pipeline, options)


class _Put(PTransformOverride):
    def __init__(self, step: type[beam.PTransform], fault: Fault) -> None:
        self.step, self.fault = step, fault

    def matches(self, applied: AppliedPTransform) -> bool:
        return type(applied.transform) is self.step

    def get_replacement_transform_for_applied_ptransform(self, applied: AppliedPTransform) -> Any:
        return _Faulted(applied.transform, self.fault)


class _Faulted(beam.PTransform):
    def __init__(self, step: beam.PTransform, fault: Fault) -> None:
        super().__init__()
        self.step, self.fault = step, fault

    def expand(self, into: Any) -> Any:
        out = self.step.expand(into)
        fault = self.fault
        return (
            out
            | "Key" >> beam.Map(lambda element: (0, element))
            | "Hold" >> beam.GroupByKey()
            | "Fault"
            >> beam.FlatMap(lambda held: fault(list(held[1]))).with_output_types(out.element_type)
        )


def twice(elements: list[Any]) -> list[Any]:
    return elements + elements


def backwards(elements: list[Any]) -> list[Any]:
    return elements[::-1]


def without_shard_4(runs: list[Any]) -> list[Any]:
    return [run for run in runs if run[1][0].shard != 4]


def with_another_digest(runs: list[Any]) -> list[Any]:
    def other(record: Any) -> Any:
        return dataclasses.replace(record, sha256="0" * 64) if record.shard == 5 else record

    return [(check_sum, tuple(map(other, records))) for check_sum, records in runs]


def without_the_third_span(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span[0] != 4]


def without_a_piece(pieces: list[Any]) -> list[Any]:
    lost = next(place for place, (run, _) in enumerate(pieces) if run == (4, 6))
    return pieces[:lost] + pieces[lost + 1 :]


def without_pieces_of_a_run(pieces: list[Any]) -> list[Any]:
    return [piece for piece in pieces if piece[0] != (4, 6)]


def with_a_flipped_bit(pieces: list[Any]) -> list[Any]:
    return [(run, _flipped(sealed) if run == (4, 6) else sealed) for run, sealed in pieces]


def with_a_flipped_bit_asked(requests: list[Any]) -> list[Any]:
    return [
        (task, (run, _flipped(sealed) if run == (4, 6) else sealed))
        for task, (run, sealed) in requests
    ]


def _flipped(sealed: Any) -> Any:
    check_sum, value = sealed
    data = bytearray(value[1] if isinstance(value, tuple) else value)
    data[len(data) // 2] ^= 1
    return check_sum, (value[0], bytes(data)) if isinstance(value, tuple) else bytes(data)


def without_a_request(requests: list[Any]) -> list[Any]:
    lost = next(place for place, (_, (run, _)) in enumerate(requests) if run == (4, 6))
    return requests[:lost] + requests[lost + 1 :]


LOST = r"the runner lost 2 of 13 shards, first 4, 5; nothing was published"
ALTERED = r"shards/shard-00000004\.parquet to 5: .*was altered on its way; nothing was published"
LACKING = r"shard-0000000[45]\.parquet: the runner brought \d+ rows of 32 planned: \d+ lacking"
DOUBLE = r"shard-000000\d\d\.parquet: the runner brought 64 rows of 32 planned: 32 double"


@pytest.mark.parametrize(
    ("step", "fault", "message"),
    [
        (SpansOfShards, without_the_third_span, LOST),
        (WriteShards, without_shard_4, LOST),
        (WriteShards, with_another_digest, ALTERED),
        (RequestRows, without_a_request, LACKING),
        (RequestRows, with_a_flipped_bit_asked, ALTERED),
        (ServeRows, without_a_piece, LACKING),
        (ServeRows, without_pieces_of_a_run, LOST),
        (ServeRows, twice, DOUBLE),
        (ServeRows, with_a_flipped_bit, ALTERED),
    ],
)
def test_what_a_runner_loses_doubles_or_alters_is_named_and_nothing_is_published(
    sources: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    step: type[beam.PTransform],
    fault: Fault,
    message: str,
) -> None:
    text = with_faults(sources, monkeypatch, step, fault)
    assert re.search(message, text or ""), text
    build(planned(sources))
    assert digests(sources / "out") == expected


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (SpansOfShards, twice),
        (SpansOfShards, backwards),
        (WriteShards, twice),
        (WriteShards, backwards),
        (RequestRows, backwards),
        (ServeRows, backwards),
    ],
)
def test_what_a_runner_repeats_or_reorders_without_harm_changes_no_byte(
    sources: Path,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    step: type[beam.PTransform],
    fault: Fault,
) -> None:
    assert with_faults(sources, monkeypatch, step, fault) is None
    assert digests(sources / "out") == expected


def with_faults(
    sources: Path, monkeypatch: pytest.MonkeyPatch, step: type[beam.PTransform], fault: Fault
) -> str | None:
    """What a build says that a faulty runner fails; None where it ends well."""
    monkeypatch.setattr(Faulty, "step", step, raising=False)
    monkeypatch.setattr(Faulty, "fault", staticmethod(fault), raising=False)
    path: WritePath = "scatter" if step in (RequestRows, ServeRows) else "gather"
    flags = [f"--runner={__name__}.Faulty"]
    try:
        built(sources, flags, shared_filesystem=True, run_shards=2, write_path=path)
    except BuildError as error:
        assert not (sources / "out" / "manifest.json").exists()
        return str(error)
    return None


# What is sent to a cluster.


@pytest.mark.parametrize("write_path", PATHS)
def test_a_job_of_a_million_shards_is_far_smaller_than_a_job_request_may_be(
    sources: Path, write_path: WritePath
) -> None:
    many = planned(sources, num_batches=10**6, batches_per_shard=1)
    assert many.layout.num_shards == 10**6
    mix: BuildMix = (
        _gather(many, None, 8, None) if write_path == "gather" else _scatter(many, 8, None)
    )
    pipeline = beam.Pipeline()
    _ = pipeline | "BuildMix" >> mix
    assert len(pipeline.to_runner_api().SerializeToString()) < 100_000


def test_a_worker_elsewhere_is_given_a_run_for_each_of_its_crews(sources: Path) -> None:
    spans = _gather(planned(sources), None, threads=4, run_shards=3).spans
    assert (spans.span_shards, spans.run_shards) == (6, 3)


def commands(page: Path) -> list[list[str]]:
    """The arguments of all `mixshards build` in the code blocks of a page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    words = (shlex.split(line, comments=True) for line in lines)
    return [found[2:] for found in words if found[:2] == ["mixshards", "build"]]


def test_every_option_that_the_page_on_runners_gives_exists() -> None:
    given = commands(Path(__file__).parent.parent / "docs" / "dataflow.md")
    assert len(given) >= 6
    kept = set()
    for arguments in given:
        with click.Context(cli.build, **cli.build.context_settings) as context:
            cli.build.parse_args(context, list(arguments))
        flags = list(context.params["beam_options"])
        runner = next(flag for flag in flags if flag.startswith("--runner=")).partition("=")[2]
        kept.add(runner.rpartition(".")[2])
        if "dask" in runner and not importlib.util.find_spec("distributed"):
            continue
        options = parse_options(flags).get_all_options(drop_default=True)
        assert options["runner"] == runner
    assert kept == {"DataflowRunner", "FlinkRunner", "PortableRunner", "SparkRunner", "DaskRunner"}


def test_an_option_that_does_not_exist_is_found_in_such_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\n# first\nmixshards build a.yaml \\\n  --runner=X --no_such_thing=1\n```"
    )
    assert commands(page) == [["a.yaml", "--runner=X", "--no_such_thing=1"]]
    with pytest.raises(BuildError, match="--no_such_thing=1: neither an option"):
        parse_options(commands(page)[0][1:])


def test_sources_of_this_module_are_as_they_were(sources: Path, tmp_path: Path) -> None:
    write_sources(tmp_path / "data", web=[40, 0, 60], code=[50, 23], books=[11])
    assert digests(sources / "data") == digests(tmp_path / "data")
