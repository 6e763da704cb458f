"""Paths, folders and one-step writes on real disks, and mapping with threads."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from pipeline.plan import plan
from pipeline.reader import ShardReader
from pipeline.storage import Folder, StorageError, in_threads, is_local, resolve, split_query
from pipeline.transforms import build
from pipeline.verify import verify

from .mixes import WEIGHTS, config, small_mix


def store(root: Path) -> Folder:
    """A folder that is no local disk to the code, as object stores are not."""
    root.mkdir(exist_ok=True)
    return Folder(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), "mix", "store://mix")


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# Paths and URIs


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("data/a.parquet", "/base/data/a.parquet"),
        ("data/", "/base/data"),
        ("./data/../other", "/base/other"),
        ("../up", "/up"),
        (".", "/base"),
        ("", "/base"),
        ("/abs/a.parquet", "/abs/a.parquet"),
        ("a b/é?#[1].parquet", "/base/a b/é?#[1].parquet"),
        ("file:///data/a.parquet", "/data/a.parquet"),
        ("file:///data/", "/data"),
        ("file:///", "/"),
        ("file:///data/a%20b", "/data/a b"),
        ("file:///data/a b/größe", "/data/a b/größe"),
        ("file:///data/part-[0-9]?.parquet", "/data/part-[0-9]?.parquet"),
        ("file:///data/a#b", "/data/a#b"),
        ("file:///data?region=here", "/data"),
    ],
)
def test_resolves_paths_against_the_base_and_uris_as_they_are(written, expected):
    filesystem, path = resolve(written, "/base")
    assert filesystem.type_name == "local"
    assert path == expected
    assert is_local(written)


def test_a_relative_base_starts_at_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("a")[1] == str(tmp_path / "a")
    assert resolve("a", "sub")[1] == str(tmp_path / "sub" / "a")


@pytest.mark.parametrize("uri", ["nope://bucket/x", "file://host/x", "file:///100%"])
def test_a_uri_that_cannot_be_opened_is_named_with_what_would_do(uri):
    with pytest.raises(StorageError) as caught:
        resolve(uri)
    assert str(caught.value).startswith(f"cannot open {uri!r}: ")
    assert "expected a local path, or a URI such as file:///folder, s3://" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (
            "s3://b/x?region=r&endpoint_override=h:1",
            ("s3://b/x", "?region=r&endpoint_override=h:1"),
        ),
        ("s3://b/part-?.parquet", ("s3://b/part-?.parquet", "")),
        ("s3://b/part-?.parquet?region=r", ("s3://b/part-?.parquet", "?region=r")),
        ("data/a?b=c", ("data/a?b=c", "")),
    ],
)
def test_a_question_mark_begins_a_query_only_in_a_uri_and_before_a_name(path, parts):
    assert split_query(path) == parts


def test_only_paths_and_file_uris_are_local():
    assert not is_local("s3://bucket/x")
    assert Folder.at("file:///data/mix/").uri == "/data/mix"
    assert Folder.at("mix", "/data").uri == "/data/mix"


# Object stores


@pytest.mark.parametrize(
    ("uri", "secret", "found"),
    [
        ("s3://AKIAKEY:hush@bucket/x", "hush", "a user or password stands before 'bucket'"),
        ("s3://AKIAKEY@bucket/x", "AKIAKEY", "a user or password stands before 'bucket'"),
        ("gs://anonymous@bucket/x", "anonymous@", "a user or password stands before 'bucket'"),
        ("https://me:hush@host/x.parquet", "hush", "a user or password stands before 'host'"),
        ("s3://bucket/x?region=r&secret_key=hush", "hush", "its query has 'secret_key'"),
        ("s3://bucket/x?access_key=AKIAKEY", "AKIAKEY", "its query has 'access_key'"),
        ("s3://bucket/x?session_token=hush", "hush", "its query has 'session_token'"),
        ("abfs://box/x?account_key=hush", "hush", "its query has 'account_key'"),
        ("https://host/x?X-Amz-Signature=hush", "hush", "its query has 'X-Amz-Signature'"),
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri, secret, found):
    with pytest.raises(StorageError) as caught:
        resolve(uri)
    told = str(caught.value)
    assert found in told
    assert "give credentials by the environment, such as AWS_ACCESS_KEY_ID" in told
    assert secret not in told


def test_a_user_that_is_no_credential_may_stand_in_a_uri():
    with pytest.raises(StorageError, match=r"pip install fsspec adlfs"):
        resolve("abfs://container@account.dfs.core.windows.net/x")


S3 = "?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"


def test_s3_uris_open_there_with_what_their_query_says():
    filesystem, path = resolve(f"s3://bucket/a%20b/größe c/{S3}&anonymous=true")
    assert (filesystem.type_name, path) == ("s3", "bucket/a b/größe c")
    assert filesystem.region == "us-east-1"
    assert Folder.at(f"s3://bucket/mix{S3}").uri == f"s3://bucket/mix{S3}"
    assert Folder.at(f"s3://bucket/mix{S3}").root == "bucket/mix"
    assert resolve(f"s3://bucket{S3}")[1] == "bucket"


def test_uris_of_one_store_share_a_client_until_query_or_environment_differ(monkeypatch):
    first, _ = resolve(f"s3://bucket/a{S3}")
    assert resolve(f"s3://bucket/b{S3}")[0] is first
    assert resolve(f"s3://bucket/b{S3}&anonymous=true")[0] is not first
    monkeypatch.setenv("AWS_PROFILE", "another")
    assert resolve(f"s3://bucket/a{S3}")[0] is not first


def test_gs_uris_open_there_with_what_their_query_says():
    query = "?anonymous=true&endpoint_override=127.0.0.1:1&scheme=http&project_id=p"
    filesystem, path = resolve(f"gs://bucket/folder/{query}")
    assert (filesystem.type_name, path) == ("gcs", "bucket/folder")
    assert resolve(f"gcs://bucket/folder{query}")[0] is filesystem


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_query_that_the_store_does_not_know_is_refused(scheme):
    with pytest.raises(StorageError) as caught:
        resolve(f"{scheme}://bucket/x?speed=fast&anonymous=true")
    assert f"cannot open '{scheme}://bucket/x': unknown 'speed' in its query" in str(caught.value)
    assert "endpoint_override, anonymous" in str(caught.value)


def test_a_uri_without_a_bucket_is_refused():
    with pytest.raises(StorageError, match=r"cannot open 's3:///x': no bucket is named"):
        resolve(f"s3:///x{S3}")


def test_other_schemes_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for uri, install in [
        ("memory://a", "pip install fsspec;"),
        ("https://host/a.parquet", "pip install fsspec aiohttp;"),
        ("abfs://container/a", "pip install fsspec adlfs;"),
    ]:
        with pytest.raises(StorageError) as caught:
            resolve(uri)
        assert f"goes through fsspec, which is not here: {install}" in str(caught.value)


def test_a_query_of_a_web_address_is_refused():
    with pytest.raises(StorageError, match=r"'https://host/a.parquet': a web address may have no"):
        resolve("https://host/a.parquet?download=1")


def test_an_option_that_a_driver_does_not_take_is_refused():
    with pytest.raises(StorageError, match=r"cannot open 'github://x'"):
        resolve("github://x?flavour=sweet")


@pytest.fixture
def memory() -> Folder:
    """A folder of a store that fsspec keeps in memory."""
    return Folder.at(f"memory://{uuid.uuid4().hex}/a%20folder")


def test_a_folder_of_another_scheme_works_as_a_store_does(memory):
    assert not memory.local
    assert memory.names() == []
    assert memory.size("sub/a") is None
    memory.put("sub/a", pa.py_buffer(b"0123456789"))
    memory.put("b", b"")
    memory.put("b", b"1")
    assert memory.names() == ["b", "sub/a"]
    assert Folder.at(memory.uri).size("sub/a") == 10
    with memory.open("sub/a") as file:
        assert file.size() == 10
        assert file.read_at(3, 4) == b"456"
        assert file.read_at(5, 8) == b"89"
        file.seek(0)
        assert file.read() == b"0123456789"
    memory.delete("b")
    memory.delete("b")
    with pytest.raises(FileNotFoundError, match=r"a folder/b"):
        memory.read("b")
    memory.delete_tree("")
    memory.delete_tree("none")
    assert memory.names() == []


def test_a_mix_from_and_into_another_scheme_has_the_bytes_of_a_local_one(memory, tmp_path):
    out, _ = small_mix(tmp_path)
    for path in (tmp_path / "data").rglob("*.parquet"):
        memory.put(f"data/{path.relative_to(tmp_path / 'data')}", path.read_bytes())
    settings = config(tmp_path, WEIGHTS, num_batches=30, on_exhausted="repeat")
    for name, dataset in settings["datasets"].items():
        dataset["path"] = f"{memory.uri}/data/{name}/*.parquet"
    build(plan({**settings, "output": f"{memory.uri}/out"}))
    there = Folder.at(f"{memory.uri}/out")
    for path in sorted((out / "shards").iterdir()):
        assert there.read(f"shards/{path.name}") == path.read_bytes()
    assert verify(f"{memory.uri}/out", sources=True) == []
    assert ShardReader(f"{memory.uri}/out")[17] == ShardReader(out)[17]


# Names


OUTSIDE = ["../x", "..", "a/../../x", "a/..", "/etc/x", "..\\x"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize(
    "act",
    [
        lambda folder, name: folder.path(name),
        lambda folder, name: folder.size(name),
        lambda folder, name: folder.names(name),
        lambda folder, name: folder.open(name),
        lambda folder, name: folder.read(name),
        lambda folder, name: folder.put(name, b"x"),
        lambda folder, name: folder.delete(name),
        lambda folder, name: folder.delete_tree(name),
    ],
    ids=["path", "size", "names", "open", "read", "put", "delete", "delete_tree"],
)
def test_no_method_takes_a_name_that_leads_out_of_the_folder(tmp_path, act, name):
    (tmp_path / "x").write_bytes(b"outside")
    with pytest.raises(StorageError) as caught:
        act(Folder.at(str(tmp_path / "mix")), name)
    expected = f"{name!r} leads out of {tmp_path / 'mix'}; names in a mix are relative"
    assert str(caught.value) == expected
    assert files(tmp_path) == ["x"]


def test_dots_inside_a_name_lead_nowhere_and_are_fine(tmp_path):
    folder = Folder.at(str(tmp_path))
    folder.put("a..b/..c", b"x")
    assert folder.read("a..b/..c") == b"x"


# Whole files


def test_what_is_put_is_read_back_with_its_size(tmp_path):
    folder = Folder.at(str(tmp_path / "not" / "yet"))
    folder.put("a/b/c.bin", b"\0\1" * 1000)
    folder.put("empty", b"")
    folder.put("buffer", pa.py_buffer(b"arrow"))
    assert folder.read("a/b/c.bin") == b"\0\1" * 1000
    assert [folder.size(n) for n in ("a/b/c.bin", "empty", "buffer")] == [2000, 0, 5]
    with folder.open("buffer") as file:
        assert file.read_at(3, 1) == b"rro"


def test_size_tells_files_from_folders_and_from_nothing(tmp_path):
    folder = Folder.at(str(tmp_path))
    folder.put("sub/file", b"1")
    assert folder.size("sub") is None
    assert folder.size("none") is None
    assert folder.size("sub/none") is None


def test_names_are_relative_sorted_and_recursive(tmp_path):
    folder = Folder.at(str(tmp_path))
    written = ["z", "b/2", "b/10", "é", "a", "b/c/d", "B"]
    for name in written:
        folder.put(name, b"")
    assert folder.names() == sorted(written)
    assert folder.names("b") == ["10", "2", "c/d"]
    assert folder.names("b/none") == []


def test_names_where_a_file_stands_is_an_error_that_says_so(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        Folder.at(str(tmp_path / "out")).names()
    assert str(caught.value) == f"{tmp_path / 'out'}: expected a folder, found a file; move it away"


@pytest.mark.parametrize("make", [lambda path: Folder.at(str(path)), store], ids=["local", "store"])
def test_put_replaces_a_file_and_leaves_no_scratch(tmp_path, make):
    folder = make(tmp_path / "disk")
    folder.filesystem.create_dir(folder.root)
    for data in (b"first, and longer", b"second"):
        folder.put("name", data)
        assert folder.read("name") == data
    assert folder.names() == ["name"]


@pytest.mark.parametrize("make", [lambda path: Folder.at(str(path)), store], ids=["local", "store"])
def test_place_moves_a_scratch_file_to_its_name(tmp_path, make):
    folder = make(tmp_path / "disk")
    folder.filesystem.create_dir(f"{folder.root}/shards")
    scratch = folder.scratch("shards/shard-0.parquet")
    assert not os.path.exists(scratch)
    Path(scratch).write_bytes(b"rows")
    assert folder.names("shards") == []
    folder.place(scratch, "shards/shard-0.parquet")
    assert folder.read("shards/shard-0.parquet") == b"rows"
    assert not os.path.exists(scratch)
    assert folder.names() == ["shards/shard-0.parquet"]


def test_scratch_paths_are_fresh_and_lie_inside_a_local_mix_but_apart_from_a_store(tmp_path):
    folder = Folder.at(str(tmp_path / "mix"))
    paths = {folder.scratch("shards/a") for _ in range(50)}
    assert len(paths) == 50
    assert {os.path.dirname(path) for path in paths} == {str(tmp_path / "mix" / "_mix" / "tmp")}
    remote = store(tmp_path / "disk").scratch("shards/a")
    assert os.path.dirname(remote) == tempfile.gettempdir()


def test_a_put_that_fails_keeps_what_stood_there_and_leaves_no_scratch(tmp_path):
    folder = Folder.at(str(tmp_path))
    folder.put("name", b"old")
    with pytest.raises(TypeError):
        folder.put("name", "text is no bytes")  # type: ignore[arg-type]
    assert folder.read("name") == b"old"
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="taken: cannot be written: Is a directory"):
        folder.put("taken", b"new")
    assert files(tmp_path) == ["name"]


def test_place_of_a_missing_scratch_file_puts_nothing_there(tmp_path):
    folder = Folder.at(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        folder.place(str(tmp_path / "gone.part"), "name")
    assert folder.names() == []


def test_an_open_reader_keeps_the_file_that_a_put_replaces(tmp_path):
    folder = Folder.at(str(tmp_path))
    folder.put("name", b"old")
    with folder.open("name") as file:
        folder.put("name", b"new")
        assert file.read() == b"old"
    assert folder.read("name") == b"new"


def test_readers_see_one_file_or_the_other_and_never_a_part(tmp_path):
    folder = Folder.at(str(tmp_path))
    contents = [bytes([letter]) * 3_000_000 for letter in b"ab"]
    folder.put("name", contents[0])
    done = threading.Event()
    broken: list[int] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            found = folder.read("name")
            reads += 1
            if found not in contents:
                broken.append(len(found))

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        for data in contents:
            folder.put("name", data)
    done.set()
    reader.join()
    assert reads > 1
    assert broken == []


# Removal


@pytest.mark.parametrize("make", [lambda path: Folder.at(str(path)), store], ids=["local", "store"])
def test_deleting_what_is_not_there_is_fine(tmp_path, make):
    folder = make(tmp_path / "disk")
    folder.delete("none")
    folder.delete("no/such/folder")
    folder.delete_tree("none")


def test_deleting_takes_just_what_was_named(tmp_path):
    folder = Folder.at(str(tmp_path))
    for name in ("a", "b", "tree/1", "tree/deep/2", "trees/3"):
        folder.put(name, b"x")
    folder.delete("a")
    folder.delete("a")
    folder.delete_tree("tree")
    assert folder.names() == ["b", "trees/3"]


# Free space


def test_free_space_of_a_folder_that_is_not_there_yet_is_that_of_its_disk(tmp_path):
    folder = Folder.at(str(tmp_path / "not" / "yet"))
    free = folder.free_bytes()
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert not (tmp_path / "not").exists()


def test_a_store_has_no_bound_on_space(tmp_path):
    assert store(tmp_path / "disk").free_bytes() is None


# Threads


@pytest.mark.parametrize(("threads", "window"), [(1, 1), (4, 2), (16, 256)])
def test_results_keep_the_order_of_the_items(threads, window):
    def slow_first(item: int) -> int:
        time.sleep(0.002 * (item % 3 == 0))
        return item * item

    items = list(range(300))
    assert in_threads(slow_first, items, threads, window) == [item * item for item in items]
    assert in_threads(slow_first, []) == []


def test_items_run_at_once():
    meeting = threading.Barrier(4, timeout=10)
    assert len(in_threads(lambda item: meeting.wait(), list(range(4)), threads=4)) == 4


def within(seconds: float, act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still busy after {seconds} s"


def test_the_error_of_the_first_item_is_raised_though_a_later_one_fails_sooner():
    later = threading.Event()

    def fail(item: int) -> None:
        if item == 1:
            later.wait(10)
        else:
            later.set()
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=r"^item 1$"):
        in_threads(fail, [1, 2], threads=2)


def test_an_error_stops_what_waits_and_nothing_hangs():
    started: list[int] = []
    errors: list[Exception] = []

    def work(item: int) -> None:
        started.append(item)
        if item == 0:
            raise ValueError("item 0")
        time.sleep(0.02)

    def run() -> None:
        try:
            in_threads(work, list(range(10_000)), threads=2, window=64)
        except ValueError as error:
            errors.append(error)

    within(10, run)
    assert [str(error) for error in errors] == ["item 0"]
    assert len(started) < 32


@pytest.mark.parametrize(
    "uri", ["/some/where", "s3://bucket/mix?region=eu-west-1&endpoint_override=127.0.0.1:5000"]
)
def test_a_pickled_folder_is_its_uri(uri: str) -> None:
    folder = Folder.at(uri)
    assert folder.__reduce__() == (Folder.at, (folder.uri,))
    copy = pickle.loads(pickle.dumps(folder))
    assert copy == folder
    assert b"S3FileSystem" not in pickle.dumps(folder)
