"""A language model on several processes: killed in the middle of a step, resumed on others."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from .mixes import small_mix

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "_train_lm.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
STEPS, EVERY, BATCH = 16, 4, 12


@pytest.fixture(scope="module")
def train_lm() -> ModuleType:
    """The script itself, as a module."""
    spec = importlib.util.spec_from_file_location("_train_lm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the mix ``out``."""
    folder = tmp_path_factory.mktemp("train")
    small_mix(folder, batch_size=BATCH, num_batches=STEPS)
    return folder


def command(run: str, ranks: int, *options: str) -> list[str]:
    small = ["--context", "16", "--width", "8", "--layers", "1", "--checkpoint-every", str(EVERY)]
    train = [sys.executable, str(SCRIPT), "train", "out", run, "--ranks", str(ranks)]
    return [*train, *small, *options]


def train(folder: Path, run: str, ranks: int) -> None:
    done = subprocess.run(
        command(run, ranks),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def lines(run: Path) -> list[list[str]]:
    """The words of each line of a run's log."""
    log = run / "steps.log"
    return [line.split() for line in log.read_text().splitlines() if line] if log.exists() else []


def kill_in_step(number: int, folder: Path, run: str, ranks: int) -> None:
    """Train, and kill every process in the middle of step ``number``, or of a later one."""
    # The pause, between gradients and their sum, leaves time to be killed in.
    with subprocess.Popen(
        command(run, ranks, "--pause", "0.2"), cwd=folder, env=ENVIRONMENT, start_new_session=True
    ) as trainer:
        try:
            while not (last := [["start"], *lines(folder / run)][-1])[0].isdigit() or (
                len(last) == 3 or int(last[0]) < number
            ):
                assert trainer.poll() is None, "the training ended before it was killed"
                time.sleep(0.005)
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
    assert trainer.returncode == -signal.SIGKILL
    assert len(lines(folder / run)[-1]) == 2  # its batch, and no loss


@pytest.fixture(scope="module")
def undisturbed(mixed: Path) -> Path:
    """A run on two processes from the first batch to the last."""
    train(mixed, "undisturbed", 2)
    return mixed / "undisturbed"


@pytest.fixture(scope="module")
def killed(mixed: Path) -> Path:
    """A run on two processes that was killed between its first checkpoint and its second."""
    kill_in_step(EVERY + 2, mixed, "killed", 2)
    return mixed / "killed"


@pytest.mark.slow
def test_two_go_on_to_the_same_losses_and_the_same_model(
    train_lm: ModuleType,
    mixed: Path,
    undisturbed: Path,
    killed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resumed = shutil.copytree(killed, mixed / "resumed")
    train(mixed, "resumed", 2)

    assert train_lm.compare(str(mixed / "out"), undisturbed, resumed)
    told = capsys.readouterr().out
    assert told.count("yes  ") == 4
    assert "processes: 2 from batch 0, then 2 from batch 4; killed in the middle of step 6" in told
    steps = {words[0]: words for words in lines(resumed) if words[0] != "start"}
    assert [*steps.values()] == [words for words in lines(undisturbed) if words[0] != "start"]
    assert [int(number) for number in steps] == [*range(STEPS)]

    before = (resumed / "checkpoint.pt").read_bytes()
    train(mixed, "resumed", 1)  # nothing is left to train
    assert lines(resumed)[-2:] == [[*steps.values()][-1], ["start", "16", "1"]]
    assert (resumed / "checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_one_then_three_go_on_with_the_same_global_batches(
    train_lm: ModuleType,
    mixed: Path,
    undisturbed: Path,
    killed: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resized = shutil.copytree(killed, mixed / "resized")
    kill_in_step(2 * EVERY + 1, mixed, "resized", 1)
    train(mixed, "resized", 3)

    assert train_lm.compare(str(mixed / "out"), undisturbed, resized)
    assert capsys.readouterr().out.count("yes  ") == 4
    starts = [words for words in lines(resized) if words[0] == "start"]
    assert starts == [["start", "0", "2"], ["start", "4", "1"], ["start", "8", "3"]]
    digests = {words[0]: words[1] for words in lines(resized) if words[0] != "start"}
    assert [*digests.items()] == [(n, digest) for n, digest, _ in lines(undisturbed)[1:]]
    assert len(set(digests.values())) == STEPS


@pytest.mark.parametrize(
    ("change", "untrue"),
    [
        ("nothing", None),
        ("another batch", "both learned the 16 global batches"),
        ("one step less", "both learned the 16 global batches"),
        ("another lost batch", "steps that were made again"),
        ("another loss", "the loss curves are equal"),
        ("another lost loss", "the loss curves are equal"),
        ("half a step", "the loss curves are equal"),
        ("another model", "the models are equal"),
        ("another first loss of three", "the first loss of another number of processes"),
        ("another later loss of three", "the losses after it"),
    ],
)
def test_compare_tells_runs_that_differ(
    train_lm: ModuleType,
    mixed: Path,
    tmp_path: Path,
    change: str,
    untrue: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mix = str(mixed / "out")
    steps = [[str(n), digest, (5 - n / 10).hex()] for n, digest in train_lm.mix_digests(mix)]
    write_run(tmp_path / "undisturbed", [["start", "0", "2"], *steps], weight=1.0)

    last = "3" if change.endswith("three") else "2"
    log = [["start", "0", "2"], *steps[:7], steps[7][:2], ["start", "4", last], *steps[4:]]
    lost, first, later = 7, 10, 15
    if change.endswith("batch"):
        at = lost if "lost" in change else later
        log[at] = [log[at][0], "0123456789abcdef", *log[at][2:]]
    elif change == "one step less":
        del log[-1]
    elif change == "half a step":
        log[-1] = log[-1][:2]
    elif "loss" in change:
        at, share = {
            "another loss": (later, 2**-40),
            "another lost loss": (lost, 2**-40),
            "another first loss of three": (first, 1e-4),
            "another later loss of three": (later, 0.02),
        }[change]
        log[at] = [*log[at][:2], (float.fromhex(log[at][2]) * (1 + share)).hex()]
    write_run(tmp_path / "killed", log, weight=0.5 if change == "another model" else 1.0)

    alike = train_lm.compare(mix, tmp_path / "undisturbed", tmp_path / "killed")
    told = capsys.readouterr().out.splitlines()
    false = [line.removeprefix("NO   ") for line in told if line.startswith("NO ")]
    assert alike == (untrue is None)
    assert len(false) == (untrue is not None)
    assert untrue is None or false[0].startswith(untrue)


def test_a_batch_that_went_into_a_model_twice_is_an_error(
    train_lm: ModuleType, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", [["start", "0", "2"], ["0", "ab", "0x1p+1"], ["0", "ab"]], 1.0)
    with pytest.raises(SystemExit, match="run: batch 0 went into the model twice"):
        train_lm.History.of(tmp_path / "run")


def write_run(run: Path, log: list[list[str]], weight: float) -> None:
    """A run's folder with this log and a model of one weight."""
    run.mkdir()
    (run / "steps.log").write_text("".join(" ".join(words) + "\n" for words in log))
    torch.save({"model": {"weight": torch.tensor([weight])}}, run / "checkpoint.pt")


def test_the_demo_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").touch()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "train_demo"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"{tmp_path} is neither empty nor an earlier demo's" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "precious"]
