"""Sources and disks that fail under a build: one error that names the thing, and all else kept."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import re
import resource
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import MixError
from pipeline.plan import Plan, plan
from pipeline.shard import shard_name
from pipeline.transforms import build
from pipeline.verify import verify
from pipeline.writing import BuildError

from .damage import write_again
from .mixes import WEIGHTS, config, digests, table, write_sources

FILES = {"web": [40, 0, 60], "code": [50, 23], "books": [11]}
BAD = "web/part-002.parquet"


def planned(folder: Path, **keys: Any) -> Plan:
    settings = {"num_batches": 40, "on_exhausted": "repeat", "batches_per_shard": 4}
    return plan(config(folder, WEIGHTS, **{**settings, **keys}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the shards over sources that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_sources(folder / "data", **FILES)
    write_again(planned(folder))
    return shards_of(folder / "out")


def shards_of(out: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(out).items() if name.startswith("shards/")}


# What can happen to a file, and what is said of it.


def changed(path: Path) -> None:
    pq.write_table(table("other", 60), path, row_group_size=17)


def grown(path: Path) -> None:
    rows = pa.concat_tables([pq.read_table(path), table("web", 5, 100)])
    pq.write_table(rows, path, row_group_size=17)


def shrunk(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 30), path, row_group_size=17)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def vanished(path: Path) -> None:
    path.unlink()


def renamed(path: Path) -> None:
    path.rename(path.with_name("part-003.parquet"))


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_another_format(path: Path) -> None:
    path.write_text('{"text": "a"}\n')


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.parquet")


def with_other_columns(path: Path) -> None:
    pq.write_table(pq.read_table(path).select(["text"]), path, row_group_size=17)


WHAT: list[tuple[Callable[[Path], None], str]] = [
    (changed, "has changed since it was planned: expected digest"),
    (grown, "has changed since it was planned"),
    (shrunk, "has changed since it was planned"),
    (with_other_columns, "has changed since it was planned"),
    (truncated, "truncated"),
    (emptied, "is empty"),
    (vanished, "no such file"),
    (renamed, "no such file"),
    (dangling, "no such file"),
    (made_another_format, "expected a Parquet file"),
    (made_a_folder, "cannot be read|Is a directory|not a regular file"),
]


@pytest.mark.parametrize(
    ("happens", "said"), WHAT, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_happens_to_a_source_between_plan_and_build_is_one_error_that_names_it(
    tmp_path: Path, undisturbed: dict[str, str], happens: Callable[[Path], None], said: str
) -> None:
    write_sources(tmp_path / "data", **FILES)
    shutil.copytree(tmp_path / "data", tmp_path / "kept")
    stale = planned(tmp_path)
    happens(tmp_path / "data" / BAD)
    with pytest.raises(MixError, match=rf"dataset 'web': \S*{BAD}: .*({said})") as caught:
        write_again(stale)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(tmp_path / "kept", tmp_path / "data")
    write_again(planned(tmp_path))
    assert shards_of(tmp_path / "out") == undisturbed
    assert verify(tmp_path / "out", sources=True) == []


def test_a_source_that_was_renamed_is_the_same_to_a_new_plan(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    write_sources(tmp_path / "data", **FILES)
    first = planned(tmp_path)
    first.save()
    renamed(tmp_path / "data" / BAD)
    write_again(planned(tmp_path))
    assert shards_of(tmp_path / "out") == undisturbed


# While a build is at work.


@contextlib.contextmanager
def once_begun(out: Path, happens: Callable[[], Any], shards: int = 3) -> Iterator[None]:
    """Let something happen in another thread as soon as some shards stand."""
    failed: list[BaseException] = []

    def work() -> None:
        end = time.monotonic() + 60
        while not (out / shard_name(shards - 1)).exists():
            if time.monotonic() > end:
                return
            time.sleep(0.0005)
        try:
            happens()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()
    assert failed == []


LONG: dict[str, Any] = {"num_batches": 400, "batches_per_shard": 4}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Sources of a mix of many shards, and these shards' digests."""
    folder = tmp_path_factory.mktemp("long")
    write_sources(folder / "data", **FILES)
    write_again(planned(folder, **LONG))
    return folder / "data", shards_of(folder / "out")


@pytest.mark.parametrize(
    ("write_path", "happens", "said"),
    [
        ("gather", changed, "has changed since it was planned"),
        ("gather", vanished, "no such file"),
        ("scatter", grown, "has changed since it was planned"),
    ],
)
def test_what_happens_while_building_is_named_and_what_was_built_is_kept(
    tmp_path: Path,
    long: tuple[Path, dict[str, str]],
    write_path: Any,
    happens: Callable[[Path], None],
    said: str,
) -> None:
    shutil.copytree(long[0], tmp_path / "data")
    out, bad = tmp_path / "out", tmp_path / "data" / BAD
    # A scatter reads its sources before it writes a shard, so it has to do so more than once.
    waves: dict[str, Any] = {"memory_limit": 1} if write_path == "scatter" else {}

    def happens_at_once() -> None:
        shutil.copy(bad, tmp_path / "aside")
        happens(tmp_path / "aside")
        bad.unlink() if happens is vanished else os.replace(tmp_path / "aside", bad)

    with once_begun(out, happens_at_once), pytest.raises(BuildError) as caught:
        build(planned(tmp_path, **LONG), threads=1, run_shards=1, write_path=write_path, **waves)
    text = str(caught.value)
    assert f"dataset 'web': {bad}: " in text
    assert said in text
    assert "\n" not in text
    assert not (out / "manifest.json").exists()
    stood = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    assert 3 <= len(stood) < 100
    bad.unlink(missing_ok=True)
    shutil.copy(long[0] / BAD, bad)
    build(planned(tmp_path, **LONG))
    assert shards_of(out) == long[1]
    # The last one may have been put in its place and not yet noted.
    kept = [path for path, written in stood.items() if path.stat().st_mtime_ns == written]
    assert len(kept) >= len(stood) - 1


def test_a_source_that_is_restored_between_two_reads_of_it_is_the_planned_one(
    tmp_path: Path, long: tuple[Path, dict[str, str]]
) -> None:
    """Only what is read counts: whenever a file is opened, its digest has to be the planned one."""
    shutil.copytree(long[0], tmp_path / "data")
    bad = tmp_path / "data" / BAD

    def replaced_by_a_copy() -> None:
        shutil.copy(bad, tmp_path / "copy")
        os.replace(tmp_path / "copy", bad)

    with once_begun(tmp_path / "out", replaced_by_a_copy):
        build(planned(tmp_path, **LONG), threads=1, run_shards=1)
    assert shards_of(tmp_path / "out") == long[1]


def test_a_source_of_which_the_mix_has_no_row_may_change(tmp_path: Path) -> None:
    """What stands in the shards depends on it in no way; the next plan takes it for another."""
    write_sources(tmp_path / "data", **FILES)
    settings = config(tmp_path, WEIGHTS, num_batches=40, on_exhausted="repeat")
    settings["datasets"]["web"]["rows"] = [0, 40]
    first = plan(settings)
    write_again(first)
    whole = shards_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    changed(tmp_path / "data" / BAD)
    write_again(first)
    assert shards_of(tmp_path / "out") == whole
    assert verify(tmp_path / "out", sources=True) == []
    with pytest.raises(MixError, match=r"differs in source file .*part-002\.parquet, which has ch"):
        write_again(plan(settings))


# What was staged.


def staged_lines(folder: Path) -> Plan:
    """The plan of a mix over compressed lines, which are staged before they are read."""
    settings = config(folder, WEIGHTS, num_batches=40, on_exhausted="repeat")
    for name, rows in FILES.items():
        path = folder / "data" / f"{name}.jsonl.gz"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with gzip.open(path, "wt") as file:
                file.writelines(
                    json.dumps(row) + "\n" for row in table(name, sum(rows)).to_pylist()
                )
        settings["datasets"][name]["path"] = str(path)
    return plan(settings)


def test_what_a_killed_build_staged_is_staged_again_where_it_is_not_whole(tmp_path: Path) -> None:
    build(staged_lines(tmp_path), keep_stage=True)
    whole = shards_of(tmp_path / "out")
    stage = tmp_path / "out" / "_mix" / "stage"
    [a, b, c] = sorted(stage.iterdir())
    kept = {path: path.read_bytes() for path in (a, b, c)}
    flipped = bytearray(kept[b])
    flipped[len(flipped) // 3] ^= 4
    for damaged in (
        {a: kept[a][: len(kept[a]) // 2], b: bytes(flipped), c: b""},
        {a: kept[b], b: kept[c], c: kept[a]},  # each is a file that can be read
    ):
        shutil.rmtree(tmp_path / "out" / "shards")
        for path, data in damaged.items():
            path.write_bytes(data)
        build(staged_lines(tmp_path), keep_stage=True)
        assert shards_of(tmp_path / "out") == whole
        assert {path: path.read_bytes() for path in (a, b, c)} == kept


# Who may read and write what.


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.test_source_faults"])
NOBODY = 65534


def _in_child(work: Callable[..., None], arguments: tuple[Any, ...], pipe: Any) -> None:
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work(*arguments)
        pipe.send(None)
    except BaseException as error:
        pipe.send((type(error).__name__, str(error)))


def as_nobody(work: Callable[..., None], *arguments: Any) -> tuple[str, str] | None:
    """Kind and text of the error that work ends with for a user without special rights."""
    ours, theirs = _FORKS.Pipe()
    child = _FORKS.Process(target=_in_child, args=(work, arguments, theirs))
    child.start()
    theirs.close()
    found: tuple[str, str] | None = ours.recv()
    child.join()
    return found


def ends_with(pattern: str, work: Callable[..., None], *arguments: Any) -> None:
    """Hold the one line that work ends with against a pattern."""
    found = as_nobody(work, *arguments)
    assert found is not None
    text = ": ".join(found)
    assert "\n" not in text, text
    assert re.search(pattern, text), text


def build_there(folder: Path) -> None:
    build(planned(folder), threads=1, run_shards=1)


def build_long(folder: Path) -> None:
    build(planned(folder, **LONG), threads=1, run_shards=1)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may read and write, with sources in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder / "data", **FILES)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield folder


def test_a_source_that_may_not_be_read_is_named(shared: Path, undisturbed: dict[str, str]) -> None:
    bad = shared / "data" / BAD
    bad.chmod(0)
    ends_with(rf"^CatalogError: dataset 'web': .*{BAD}: .*Permission denied", build_there, shared)
    assert not (shared / "out").exists()
    bad.chmod(0o666)
    (shared / "data" / "web").chmod(0)
    ends_with(r"^CatalogError: dataset 'web': .*Permission denied", build_there, shared)
    (shared / "data" / "web").chmod(0o777)
    assert as_nobody(build_there, shared) is None
    assert shards_of(shared / "out") == undisturbed


def test_a_source_that_may_no_longer_be_read_while_building_is_named(shared: Path) -> None:
    bad = shared / "data" / BAD

    def forbidden() -> None:
        bad.chmod(0)

    with once_begun(shared / "out", forbidden):
        ends_with(rf"^BuildError: dataset 'web': .*{BAD}: .*Permission denied", build_long, shared)
    assert not (shared / "out" / "manifest.json").exists()
    bad.chmod(0o666)
    stood = {path: path.stat().st_mtime_ns for path in (shared / "out" / "shards").iterdir()}
    assert as_nobody(build_long, shared) is None
    kept = [path for path, written in stood.items() if path.stat().st_mtime_ns == written]
    assert len(kept) >= len(stood) - 1 >= 2


@pytest.mark.parametrize("inside", ["", "shards", "_mix", "_mix/tmp"])
def test_a_folder_that_may_not_be_written_to_is_named(shared: Path, inside: str) -> None:
    folder = shared / "out" / inside
    folder.mkdir(parents=True)
    for path in [shared / "out", *(shared / "out").rglob("*")]:
        path.chmod(0o777)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    ends_with(
        rf"^(Build|Storage)Error: .*({shared}/out|shards/shard-0).* cannot be written.*Permission",
        build_there,
        shared,
    )
    assert not (shared / "out" / "manifest.json").exists()
    folder.chmod(0o777)
    assert as_nobody(build_there, shared) is None


# A disk that is full.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], bool]]:
    """Makes ``tmp_path / "disk"`` a disk of so many KiB, or makes it so large; whether it could."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def resized(kib: int) -> bool:
        options = f"size={kib}k" + (",remount" if os.path.ismount(disk) else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    yield resized
    if os.path.ismount(disk):
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _with_small_files(folder: Path, most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    build(planned(folder, batches_per_shard=4), threads=1, run_shards=1)


@pytest.mark.parametrize("write_path", ["gather", "scatter"])
def test_a_disk_that_fills_while_building_is_told_and_more_room_goes_on(
    tmp_path: Path,
    long: tuple[Path, dict[str, str]],
    small_disk: Callable[[int], bool],
    write_path: Any,
) -> None:
    if not small_disk(300):
        pytest.skip("no disk may be mounted here; the size of files is limited in another test")
    shutil.copytree(long[0], tmp_path / "data")
    out = tmp_path / "disk" / "out"
    mix = planned(tmp_path, output=str(out), **LONG)
    with pytest.raises(BuildError, match=r"(cannot be written|No space left)") as caught:
        build(mix, threads=1, write_path=write_path)
    text = str(caught.value)
    assert "No space left on device" in text
    assert str(out) in text or "shards/shard-" in text
    assert "\n" not in text
    assert not (out / "manifest.json").exists()
    stood = {path: path.stat().st_mtime_ns for path in (out / "shards").glob("*")}
    assert len(stood) > 3 or write_path == "scatter"
    assert small_disk(50_000)
    build(mix, threads=1)
    assert shards_of(out) == long[1]
    kept = [path for path, written in stood.items() if path.stat().st_mtime_ns == written]
    assert len(kept) >= len(stood) - 1


@pytest.mark.parametrize("kib", [4, 16])
def test_a_disk_that_is_full_before_the_first_shard_is_told(
    tmp_path: Path, small_disk: Callable[[int], bool], kib: int
) -> None:
    if not small_disk(kib):
        pytest.skip("no disk may be mounted here")
    write_sources(tmp_path / "data", **FILES)
    out = tmp_path / "disk" / "out"
    with pytest.raises((MixError, OSError), match="No space left on device") as caught:
        build(planned(tmp_path, output=str(out)))
    assert str(out) in str(caught.value)


def test_a_file_that_may_not_grow_so_large_is_a_shard_that_cannot_be_written(shared: Path) -> None:
    ends_with(
        r"^StorageError: .*/out/_mix/sources-.*: cannot be written: File too large",
        _with_small_files,
        shared,
        4096,
    )
    assert not (shared / "out" / "manifest.json").exists()
    assert as_nobody(build_there, shared) is None
