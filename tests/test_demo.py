"""The demonstration's data, its trainer that dies and comes back, and the folder that it takes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
DATASETS = ("code", "packages", "prose")
BATCHES, BATCHES_PER_SHARD = 100, 16


def script(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *map(str, arguments)]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def started(*command: str, cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=cwd, env=ENVIRONMENT)


def succeed(*command: str, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of a few files, and the mix ``out`` of it."""
    folder = tmp_path_factory.mktemp("demo")
    succeed(*script("_demo_data.py", "data", "--limit", 20), cwd=folder)
    (folder / "mix.yaml").write_text(
        f"output: out/\nbatch_size: 32\nnum_batches: {BATCHES}\n"
        f"batches_per_shard: {BATCHES_PER_SHARD}\non_exhausted: repeat\ndatasets:\n"
        + "".join(f"  {name}: {{path: data/{name}/, weight: {len(name)}}}\n" for name in DATASETS)
    )
    succeed(sys.executable, "-m", "pipeline", "build", "--quiet", "mix.yaml", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(mixed: Path) -> Path:
    succeed(*script("_demo_train.py", "train", "out", "undisturbed"), cwd=mixed)
    return mixed / "undisturbed"


@pytest.mark.slow
def test_data_has_one_schema_and_tokens_of_its_text(mixed: Path) -> None:
    expected = pa.schema(
        [
            ("text", pa.string()),
            ("source", pa.string()),
            ("line", pa.int32()),
            ("tokens", pa.list_(pa.int32())),
        ]
    )
    for name in DATASETS:
        table = pq.read_table(mixed / "data" / name)
        assert table.schema.equals(expected)
        assert table.num_rows > 100
        for text, tokens in zip(
            table["text"].to_pylist(), table["tokens"].to_pylist(), strict=True
        ):
            assert bytes(tokens).decode() == text != ""


@pytest.mark.slow
def test_code_says_where_it_stands(mixed: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    for row in pq.read_table(mixed / "data" / "code").slice(0, 200).to_pylist():
        lines = (library / row["source"]).read_text("utf-8").split("\n")
        assert row["text"].split("\n")[0] == lines[row["line"] - 1].rstrip()


@pytest.mark.slow
def test_data_is_the_same_when_prepared_again(mixed: Path, tmp_path: Path) -> None:
    stale = tmp_path / "data" / "code" / "part-00099.parquet"
    stale.parent.mkdir(parents=True)
    stale.touch()
    succeed(*script("_demo_data.py", "data", "--limit", 20), cwd=tmp_path)
    for root, other in ((mixed, tmp_path), (tmp_path, mixed)):
        for path in (root / "data").rglob("*.parquet"):
            assert path.read_bytes() == (other / path.relative_to(root)).read_bytes()


@pytest.mark.slow
def test_killed_training_resumes_to_the_same_model(mixed: Path, undisturbed: Path) -> None:
    command = script("_demo_train.py", "train", "out", "killed", "--checkpoint-every", 15)
    log = mixed / "killed" / "batches.log"
    for lines in (25, 60):
        # The pause leaves time to be killed in, on however slow a machine.
        with started(*command, "--pause", "0.02", cwd=mixed) as trainer:
            while not log.exists() or len(log.read_text().splitlines()) < lines:
                assert trainer.poll() is None, "the training ended before it was killed"
                time.sleep(0.005)
            trainer.kill()
        assert trainer.returncode == -signal.SIGKILL
    assert "resuming at batch" in succeed(*command, cwd=mixed)

    told = succeed(*script("_demo_train.py", "compare", "undisturbed", "killed"), cwd=mixed)
    assert told.count("yes  ") == 3
    assert "of them twice" in told
    assert log.read_text().count("resume") == 2


@pytest.mark.slow
def test_a_finished_training_has_nothing_left_to_do(mixed: Path, undisturbed: Path) -> None:
    before = (undisturbed / "checkpoint.npz").read_bytes()
    assert "trained 0 batches" in succeed(
        *script("_demo_train.py", "train", "out", "undisturbed"), cwd=mixed
    )
    assert (undisturbed / "checkpoint.npz").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another batch", "one less", "another model"])
def test_compare_tells_runs_that_differ(mixed: Path, undisturbed: Path, change: str) -> None:
    other = mixed / change
    shutil.copytree(undisturbed, other)
    lines = (other / "batches.log").read_text().splitlines()
    if change == "another batch":
        lines[7] = "7 0123456789abcdef"
    elif change == "one less":
        del lines[7]
    else:
        # A model of one batch: the checkpoint of a run that is killed right after it.
        options = ("--checkpoint-every", 1, "--pause", 9)
        command = script("_demo_train.py", "train", "out", "begun", *options)
        checkpoint = mixed / "begun" / "checkpoint.npz"
        with started(*command, cwd=mixed) as trainer:
            while not checkpoint.exists():
                assert trainer.poll() is None
                time.sleep(0.01)
            trainer.kill()
        shutil.copy(checkpoint, other)
    (other / "batches.log").write_text("\n".join(lines) + "\n")
    done = run(*script("_demo_train.py", "compare", "undisturbed", other.name), cwd=mixed)
    assert done.returncode == 1
    assert done.stdout.count("NO ") == 1


@pytest.mark.slow
def test_a_shard_begins_with_what_was_trained_there(mixed: Path, undisturbed: Path) -> None:
    told = succeed(*script("_demo_train.py", "shard", "out", "undisturbed", 3), cwd=mixed)
    assert f"batch {3 * BATCHES_PER_SHARD}:" in told
    assert "yes  " in told


@pytest.mark.slow
def test_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    done = run("bash", str(SCRIPTS / "demo"), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert "neither empty nor an earlier demo" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]
