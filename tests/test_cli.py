"""The command line as a person meets it: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.manifest import Manifest
from pipeline.storage import Folder
from pipeline.verify import verify
from pipeline.version import __version__

from .mixes import digests, small_mix, write_sources

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "output": "out",
    "batch_size": 8,
    "num_batches": 30,
    "on_exhausted": "repeat",
    "batches_per_shard": 7,
}
DATASETS = {
    "web": {"path": "data/web", "weight": 3},
    "code": {"path": "data/code/*.parquet", "weight": 2},
    "books": {"path": "data/books/part-000.parquet", "weight": 1},
}


def write_config(folder: Path, **keys: Any) -> str:
    """A config beside the sources (JSON is YAML); a key that is None is left out."""
    found = {**SETTINGS, "datasets": DATASETS, **keys}
    path = folder / "mix.yaml"
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return str(path)


def run(*arguments: str | Path) -> Result:
    """The command in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def process(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment(),
        timeout=120,
    )


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def rows_of(text: str) -> list[list[str]]:
    """The cells of a printed table, up to its first empty line."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.split("\n\n")[0].splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources and nothing else."""
    write_sources(tmp_path / "data", web=[40, 60], code=[50, 23], books=[11])
    return tmp_path


@pytest.fixture(scope="session")
def mix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished mix of 30 batches in 5 shards; only read."""
    return small_mix(tmp_path_factory.mktemp("mix"), batches_per_shard=7)[0]


# plan


def test_plan_shows_what_a_person_decides_from_and_writes_nothing(folder: Path) -> None:
    config = write_config(folder)
    before = listing(folder)
    done = process("plan", "mix.yaml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert listing(folder) == before
    assert rows_of(done.stdout) == [
        ["dataset", "rows", "weight", "asked", "given", "rows used", "epochs", "first batch"],
        ["web", "100", "3", "50.0000%", "50.0000%", "120", "1.200", "0"],
        ["code", "73", "2", "33.3333%", "33.3333%", "80", "1.096", "0"],
        ["books", "11", "1", "16.6667%", "16.6667%", "40", "3.636", "0"],
    ]
    assert "30 batches of 8 = 240 rows in 5 shard(s) of at most 7 batches" in done.stdout
    assert "on_exhausted: repeat" in done.stdout
    assert re.search(rf"about [\d.]+ kB into {folder}/out, [\d.]+ [GT]B free", done.stdout)
    assert re.search(r"order [0-9a-f]{16}  bytes [0-9a-f]{16}", done.stdout)
    assert run("plan", config).stdout.splitlines()[:4] == done.stdout.splitlines()[:4]


def test_plan_as_json_holds_all_of_it_with_large_integers_as_text(folder: Path) -> None:
    heavy = {**DATASETS, "web": {"path": "data/web", "weight": 2**53 + 1}}
    done = run("plan", write_config(folder, datasets=heavy), "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [entry["name"] for entry in found["datasets"]] == ["web", "code", "books"]
    assert [entry["weight"] for entry in found["datasets"]] == [str(2**53 + 1), 2, 1]
    assert found["num_batches"] == 30
    assert [warning.split(":")[0] for warning in found["warnings"]] == [
        "dataset 'code' gets no row",
        "dataset 'books' gets no row",
    ]


def test_a_dataset_that_gets_no_row_is_a_warning_with_its_due_batch(folder: Path) -> None:
    tiny = {**DATASETS, "tiny": {"path": "data/books", "weight": "see below"}}
    config = write_config(folder, datasets=tiny)
    Path(config).write_text(Path(config).read_text().replace('"see below"', "0.000001"))
    for done in (run("plan", config), run("build", config, "--quiet")):
        assert done.exit_code == 0
        assert (
            "warning: dataset 'tiny' gets no row: at weight 1 of 6000001 its first item is due "
            "about batch 375001, and the mix ends at 30" in done.stderr
        )
    row = rows_of(run("plan", config).stdout)[-1]
    assert row[3:5] == ["1.7e-05%", "0.0000%"]  # a share that is asked for is not shown as none
    assert row[-1] == "about 375,001 (not in the mix)"


def test_names_that_look_like_markup_and_long_ones_are_printed_as_they_are(folder: Path) -> None:
    names = ["[red]web[/]", ":smile:", "n" * 200, "книги"]
    datasets = {name: {"path": "data/web", "weight": 1} for name in names}
    done = process("plan", write_config(folder, datasets=datasets), cwd=folder)
    assert [row[0] for row in rows_of(done.stdout)[1:]] == names


UNWEIGHTED = {name: {"path": dataset["path"]} for name, dataset in DATASETS.items()}
OTHER_MIXTURES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "frame_budget": (
        {"frame_budget": 80, "pool_size": 50, "length_of": "text", "num_batches": 12},
        ["dataset", "rows", "dropped", "given", "rows", "used", "epochs"],
        r"12 batches of \d+\.\d on average = .* \(frame_budget: 80, \d+\.\d\d% padding; by scatt",
    ),
    "reservoir": (
        {"batch_size": 8, "max_simultaneous": 2, "passes": 2},
        ["dataset", "rows", "files", "given", "rows", "used", "epochs"],
        r"\d+ batches of 8 = .* \(at most 2 files at once, passes: 2\)",
    ),
}


@pytest.mark.parametrize("kind", OTHER_MIXTURES)
def test_other_mixtures_are_planned_built_inspected_and_verified(kind: str, folder: Path) -> None:
    keys, headings, said = OTHER_MIXTURES[kind]
    bare = dict.fromkeys(SETTINGS, None) | {"output": "out", "batches_per_shard": 2}
    config = write_config(folder, **{**bare, "mixture": kind, "datasets": UNWEIGHTED, **keys})
    planned = run("plan", config)
    assert planned.exit_code == 0, planned.output
    assert planned.output.splitlines()[0].split() == headings
    assert re.search(said, planned.output), planned.output
    preview = json.loads(run("plan", config, "--json").output)
    assert preview["mixture"]["kind"] == kind
    built = run("build", config)
    assert built.exit_code == 0, built.output
    shown = run("inspect", folder / "out")
    assert shown.output.startswith(f"{kind} mix: ")
    assert "weight" not in shown.output
    shard = run("inspect", folder / "out", "--shard", "1")
    assert "state before it: {" in shard.output
    assert run("verify", folder / "out", "--sources").exit_code == 0
    whole = digests(folder / "out")
    for path in ("gather", "scatter"):
        shutil.rmtree(folder / "out")
        again = run("build", config, "--write-path", path, "--quiet")
        assert again.exit_code == 0, again.output
        assert digests(folder / "out") == whole


def test_config_errors_list_all_problems_without_a_traceback(folder: Path) -> None:
    config = write_config(folder, batch_size=0, shard_bytes="1MB", compresion="zstd")
    planned, built = process("plan", config, cwd=folder), run("build", config)
    assert (planned.returncode, built.exit_code) == (1, 1)
    for done in (planned, built):
        assert (done.stdout, done.stderr.splitlines()[0]) == ("", f"error: {config}: 3 problems")
        for told in (
            "batch_size: expected a whole number of at least 1, found 0",
            "shard_bytes: given beside batches_per_shard; give one of the two",
            'compresion: unknown key; did you mean "compression"?',
        ):
            assert told in done.stderr
        assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"datasets": {"web": {"path": "data/nowhere", "weight": 1}}}, "no such file or folder"),
        ({"on_exhausted": "error"}, "dataset 'books': has 11 row(s), but 30 batches need 40"),
        ({"output": "data"}, "choose an `output` apart from the sources"),
    ],
)
def test_a_mix_that_cannot_be_made_is_refused_before_anything_is_written(
    folder: Path, keys: dict[str, Any], told: str
) -> None:
    config = write_config(folder, **keys)
    before = listing(folder)
    for command in ("plan", "build"):
        done = run(command, config)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert told in done.stderr
        assert listing(folder) == before


def test_a_config_that_is_missing_or_a_folder_is_an_error(folder: Path) -> None:
    missing = run("plan", folder / "none.yaml")
    assert (missing.exit_code, "no such file" in missing.stderr) == (1, True)
    a_folder = run("plan", folder)
    assert (a_folder.exit_code, "is a directory" in a_folder.stderr) == (2, True)


# build


def test_build_shows_the_plan_and_the_result_and_a_second_one_keeps_every_shard(
    folder: Path,
) -> None:
    write_config(folder)
    first = process("build", "mix.yaml", cwd=folder)
    assert (first.returncode, first.stderr) == (0, "")
    plan = process("plan", "mix.yaml", cwd=folder)
    assert first.stdout.splitlines()[:6] == plan.stdout.splitlines()[:6]
    assert not re.search(r"[\x1b\r━]", first.stdout + plan.stdout)  # plain in a pipe
    last = first.stdout.splitlines()[-1]
    assert re.fullmatch(rf"built {folder}/out: 5 shards, 240 rows, [\d.]+ kB in [\d.]+ s", last), (
        last
    )
    stamps, found = listing(folder / "out" / "shards"), digests(folder / "out")
    assert verify(folder / "out", sources=True) == []

    again = run("build", folder / "mix.yaml")
    assert again.exit_code == 0
    assert "built " in again.stdout
    assert ": 5 shards (5 stood whole and were kept), 240 rows, " in again.stdout
    assert listing(folder / "out" / "shards") == stamps
    assert digests(folder / "out") == found


def test_a_build_mends_a_damaged_and_a_missing_shard_and_keeps_the_rest(folder: Path) -> None:
    config = write_config(folder)
    assert run("build", config, "--quiet").exit_code == 0
    found = digests(folder / "out")
    shards = sorted((folder / "out" / "shards").iterdir())
    data = bytearray(shards[1].read_bytes())
    data[50] ^= 1
    shards[1].write_bytes(data)
    shards[3].unlink()
    done = run("build", config)
    assert "5 shards (3 stood whole and were kept)" in done.stdout
    assert digests(folder / "out") == found


def test_a_quiet_build_prints_nothing(folder: Path) -> None:
    write_config(folder)
    done = process("build", "mix.yaml", "--quiet", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert verify(folder / "out") == []


def test_another_mix_in_the_output_is_refused_by_what_differs_and_replaced_on_demand(
    folder: Path,
) -> None:
    assert run("build", write_config(folder), "--quiet").exit_code == 0
    found = digests(folder / "out")
    weights = {**DATASETS, "web": {"path": "data/web", "weight": 4}}
    config = write_config(folder, datasets=weights, batches_per_shard=10)
    refused = run("build", config)
    assert refused.exit_code == 1
    assert "another mix stands or is being built there" in refused.stderr
    assert "dataset 'web': weight 3 there, 4 here" in refused.stderr
    assert "batches_per_shard: 7 there, 10 here" in refused.stderr
    assert "choose another `output`, or build with --overwrite" in refused.stderr
    assert digests(folder / "out") == found
    done = run("build", config, "--overwrite")
    assert done.exit_code == 0
    assert "3 shards, 240 rows" in done.stdout
    assert verify(folder / "out", sources=True) == []
    assert len(list((folder / "out" / "shards").iterdir())) == 3


def test_a_manifest_that_is_damaged_is_refused_and_replaced_on_demand(folder: Path) -> None:
    config = write_config(folder, batches_per_shard=2**60)  # all in one shard
    assert run("build", config, "--quiet").exit_code == 0
    found = digests(folder / "out")
    (folder / "out" / "manifest.json").write_text("{}")
    refused = run("build", config)
    assert refused.exit_code == 1
    assert "manifest.json: is no manifest of a mix" in refused.stderr
    assert "restore the file, or build with --overwrite" in refused.stderr
    assert run("build", config, "--quiet", "--overwrite").exit_code == 0
    assert digests(folder / "out") == found
    assert verify(folder / "out") == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nonsense"], "--nonsense: neither an option of `mixshards build` nor one of Beam"),
        (["--overwrit"], "--overwrit: neither an option"),
        (["stray"], "stray: neither an option"),
        (["--direct_running_mode=multi_threading"], "Beam was seen to lose elements"),
        (["--direct_running_mode", "multi_threading"], "leave it out: the build uses all cores"),
        (["--direct_running_mode", "sideways"], "an option of Beam does not fit: "),
        (
            ["--runner", "DataflowRunner"],
            "runner DataflowRunner may work on other machines, but 'out' is a path on this one; "
            "use URIs that every worker can open, or say --shared-filesystem",
        ),
        (["--runner=FlinkRunner"], "runner FlinkRunner may work on other machines"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_reason(
    folder: Path, options: list[str], told: str
) -> None:
    done = run("build", write_config(folder), "--quiet", *options)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert not (folder / "out").exists()


def test_options_before_the_config_are_refused_with_the_order(folder: Path) -> None:
    done = run("build", "--runner", "DirectRunner", write_config(folder))
    assert done.exit_code == 2
    assert "CONFIG comes first, and Beam's options after it; found --runner" in done.stderr
    for option in ("--threads=0", "--run-shards=0", "--threads=x"):
        assert run("build", write_config(folder), option).exit_code == 2


def test_another_runner_threads_and_runs_give_the_same_bytes(folder: Path) -> None:
    found: list[dict[str, str]] = []
    for options in ([], ["--runner", "DirectRunner"], ["--threads=3", "--run-shards=2"]):
        shutil.rmtree(folder / "out", ignore_errors=True)
        done = run("build", write_config(folder), "--quiet", *options)
        assert (done.exit_code, done.stderr) == (0, "")
        found.append(digests(folder / "out"))
    assert found[0] == found[1] == found[2]


def test_an_output_that_cannot_be_written_is_an_error_and_no_traceback(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    done = run("build", write_config(folder, output="file/out"), "--quiet")
    assert (done.exit_code, done.stdout) == (1, "")
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")
    assert f"{folder}/file" in done.stderr


def test_a_source_damaged_under_its_footer_ends_the_build_in_one_line(folder: Path) -> None:
    path = folder / "data" / "code" / "part-000.parquet"
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)
    write_config(folder)
    done = process("build", "mix.yaml", "--quiet", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: dataset 'code': ")
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "out" / "manifest.json").exists()
    assert list((folder / "out" / "_mix" / "tmp").glob("*.part")) == []


# inspect


def test_inspect_says_what_a_mix_is(mix: Path) -> None:
    done = process("inspect", mix, cwd=mix)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = Manifest.load(Folder.at(str(mix)))
    for told in (
        "weighted mix: 30 batches, 240 rows, 5 shards of 7 batches",
        f"format 2.0, algorithm 1, mixshards {__version__}",
        f"order {manifest.order_id}",
        f"bytes {manifest.bytes_id}",
        "  books  weight 1, 16.6667% of the mix, 40 rows (3.636 epochs of 11)",
        "columns text: string, tokens: list<element: int32>, mix_batch: int64",
    ):
        assert told in done.stdout
    assert json.loads(run("inspect", mix, "--json").stdout) == manifest.document


def test_inspect_of_a_shard_says_its_state_and_the_rows_of_the_sources(mix: Path) -> None:
    done = run("inspect", mix, "--shard", "4")
    title, state, heading, *rows = done.stdout.splitlines()
    assert title.startswith("shards/shard-00000004.parquet: batches 28 to 29, 16 rows, ")
    assert digests(mix)["shards/shard-00000004.parquet"] in title
    assert state.startswith('state before it: {"offsets": {"web": 112, "code": 75, "books": 37}')
    assert rows_of(heading) == [
        ["batch", "dataset", "epoch", "rows of the file", "count", "file"],
    ]
    assert rows[0].split()[:5] == ["28", "web", "1", "12..15", "4"]
    assert rows[0].rstrip().endswith("data/web/part-000.parquet")

    found = json.loads(run("inspect", mix, "--shard", "4", "--json").stdout)
    assert found["state"]["offsets"] == {"web": 112, "code": 75, "books": 37}
    assert len(found["rows"]) == len(rows)
    assert sum(row["count"] for row in found["rows"]) == 16


def test_inspect_of_a_batch_says_the_rows_of_the_sources(mix: Path) -> None:
    done = run("inspect", mix, "--batch", "29")
    assert done.stdout.startswith("batch 29, in shards/shard-00000004.parquet\n")
    found = json.loads(run("inspect", mix, "--batch", "29", "--json").stdout)
    assert {row["batch"] for row in found["rows"]} == {29}
    assert [row["dataset"] for row in found["rows"]] == ["web", "code", "books"]
    assert sum(row["count"] for row in found["rows"]) == 8


def test_inspect_outside_the_mix_or_without_one_is_an_error(mix: Path, tmp_path: Path) -> None:
    for arguments, told in [
        (["--shard", "5"], "error: shard 5 is outside 0..4"),
        (["--shard", "-1"], "error: shard -1 is outside 0..4"),
        (["--batch", "30"], "error: batch 30 is outside 0..29"),
        (["--batch", "-1"], "error: batch -1 is outside 0..29"),
    ]:
        done = run("inspect", mix, *arguments)
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"{told}\n")
    both = run("inspect", mix, "--batch", "1", "--shard", "1")
    assert (both.exit_code, "give --shard or --batch, not both" in both.stderr) == (2, True)
    nothing = run("inspect", tmp_path)
    assert (nothing.exit_code, "no finished mix" in nothing.stderr) == (1, True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": None},
        {"writer": {"pyarrow": "1"}, "mixture": {"kind": "weighted", "rows_per_batch": None}},
        {"datasets": [{"name": "web"}]},
        {"num_rows": "many"},
    ],
)
def test_inspect_of_a_damaged_manifest_is_an_error_and_no_traceback(
    mix: Path, tmp_path: Path, change: Mapping[str, Any]
) -> None:
    out = Path(shutil.copytree(mix, tmp_path / "copy"))
    document = {**json.loads((out / "manifest.json").read_text()), **change}
    (out / "manifest.json").write_text(json.dumps(document))
    refused = 0
    for arguments in ([], ["--shard", "1"], ["--batch", "3"], ["--json"]):
        done = run("inspect", out, *arguments)
        assert done.exit_code == (1 if done.stderr else 0)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        refused += done.exit_code
    assert refused >= 1


# verify


def test_verify_says_that_a_mix_is_whole(mix: Path) -> None:
    done = process("verify", mix, cwd=mix)
    assert (done.returncode, done.stderr) == (0, "")
    whole = f"{mix} is whole: 5 shards, 240 rows, every row where the mixture puts it"
    assert done.stdout == f"{whole}\n"
    sources = run("verify", mix, "--sources")
    assert (sources.exit_code, sources.stdout) == (
        0,
        f"{whole}, and as the sources give it\n",
    )
    assert json.loads(run("verify", mix, "--json").stdout) == []


def test_verify_lists_faults_and_ends_with_one(mix: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(mix, tmp_path / "copy"))
    (out / "shards" / "shard-00000002.parquet").unlink()
    (out / "shards" / "notes.txt").touch()
    done = process("verify", out, cwd=out)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"2 fault(s) in {out}:",
        "  shards/notes.txt: is a stray: the manifest names no such file",
        "  shards/shard-00000002.parquet: is missing",
    ]
    found = run("verify", out, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)[1] == {
        "file": "shards/shard-00000002.parquet",
        "reason": "is missing",
    }


def test_verify_without_a_mix_is_an_error(tmp_path: Path) -> None:
    done = run("verify", tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {tmp_path}: no manifest.json, so no finished mix; expected the output folder of "
        "`mixshards build`\n"
    )


# The command itself.


def test_help_and_version(tmp_path: Path) -> None:
    done = process("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("plan", "build", "inspect", "verify"):
        assert re.search(rf"^  {command} +\w", done.stdout, re.MULTILINE)
        told = run(command, "-h")
        assert (told.exit_code, "Usage:" in told.stdout) == (0, True)
    assert run("--version").stdout == f"mixshards, version {__version__}\n"
    unknown = run("bild")
    assert (unknown.exit_code, "bild" in unknown.stderr) == (2, True)


def test_a_reader_of_the_output_that_stops_early_is_no_error(mix: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m pipeline inspect {mix} --shard 0 | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert done.stdout.startswith("shards/shard-00000000.parquet")
    assert "Traceback" not in done.stderr


# Long builds.

LONG = {"num_batches": 300, "batch_size": 512, "batches_per_shard": 10}
SLOW = {"compression": "gzip", "compression_level": 9}


def long_config(folder: Path) -> str:
    """A build of several seconds, whatever the machine: 30 shards."""
    write_sources(folder / "data", web=[6000, 4000], code=[7000], books=[1000])
    return write_config(folder, **LONG, **SLOW)


def heed_interrupts() -> None:
    """In a child: begin as a shell's foreground command does, however these tests were started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_shards(folder: Path, count: int) -> None:
    for _ in range(1200):
        if len(list((folder / "out" / "shards").glob("*.parquet"))) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} shards within a minute")


@pytest.mark.slow
def test_an_interrupted_build_ends_at_once_with_a_hint_and_the_next_one_completes(
    tmp_path: Path,
) -> None:
    config = long_config(tmp_path)
    command = [sys.executable, "-m", "pipeline", "build", config]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
        env=environment(),
    ) as child:
        wait_for_shards(tmp_path, 4)
        child.send_signal(signal.SIGINT)
        begun = time.monotonic()
        output, errors = child.communicate(timeout=60)
        assert time.monotonic() - begun < 3
    assert child.returncode == 130
    assert errors.endswith("\ninterrupted; the same command goes on where it stopped\n")
    assert "Traceback" not in errors
    assert output.startswith("dataset")  # what was printed before is not lost
    assert not (tmp_path / "out" / "manifest.json").exists()
    refused = run("verify", tmp_path / "out")
    assert "a build was begun there and has not finished" in refused.stderr

    done = run("build", config)
    assert done.exit_code == 0
    kept = re.search(r"30 shards \((\d+) stood whole and were kept\)", done.stdout)
    assert kept is not None
    assert 3 <= int(kept[1]) < 30  # the last may have been placed and not yet noted
    assert verify(tmp_path / "out") == []
    assert list((tmp_path / "out" / "_mix" / "tmp").iterdir()) == []


class Terminal:
    """A command that runs on a terminal of its own, 120 columns wide."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._master, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=self._take_over,
            env=environment(TERM="xterm-256color", COLUMNS="120"),
        )
        os.close(slave)
        self.text = ""

    @staticmethod
    def _take_over() -> None:
        heed_interrupts()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def read_until(self, what: str | None, seconds: float = 60) -> str:
        """What was shown up to a pattern, or (None) to the end of the process."""
        end = time.monotonic() + seconds
        while what is None or not re.search(what, self.text):
            assert time.monotonic() < end, self.text
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if not ready:
                continue
            data = b""
            with contextlib.suppress(OSError):  # how a terminal without a process reads
                data = os.read(self._master, 65536)
            if not data:
                assert what is None, self.text
                break
            self.text += data.decode(errors="replace")
        return self.text

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


def test_a_terminal_shows_a_bar_and_ctrl_c_ends_the_build(tmp_path: Path) -> None:
    terminal = Terminal(["build", long_config(tmp_path)])
    try:
        terminal.read_until(r"[1-9]\d*/30 shards")
        assert "building" in terminal.text
        assert "━" in terminal.text
        assert re.search(r"[\d,]+ rows/s, [\d.]+ MB/s", terminal.text)
        terminal.press(b"\x03")
        begun = time.monotonic()
        terminal.read_until(None)
        assert terminal.child.wait(10) == 130
        assert time.monotonic() - begun < 3
        assert "interrupted; the same command goes on where it stopped" in terminal.text
        assert terminal.text.rstrip().endswith("stopped")
        assert "Traceback" not in terminal.text
        assert "\x1b[?25h" in terminal.text  # the cursor is shown again
    finally:
        terminal.close()
