"""The whole way of a mix over a real S3 server: sources, build, kill, rebuild, verify, read."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyarrow import fs

from pipeline.catalog import CatalogError, DatasetSpec, scan_datasets
from pipeline.cli import main
from pipeline.plan import PlanError, plan
from pipeline.reader import ShardReader
from pipeline.registry import Cursor
from pipeline.shard import ShardError
from pipeline.storage import Folder, StorageError, resolve
from pipeline.transforms import build
from pipeline.verify import verify
from pipeline.writing import BuildError

from .mixes import FORMS, WEIGHTS, config, digests, table, write_as, write_sources
from .s3_server import ENVIRONMENT, Fault, Proxy, Request, serving

ROOT = Path(__file__).parents[1]
ROWS = {"web": [40, 0, 60], "code": [50, 23], "books": [11]}
KEYS = {"num_batches": 30, "on_exhausted": "repeat", "batches_per_row_group": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """The credentials, and few tries: with more a lasting fault would take half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_MAX_ATTEMPTS": "6"}.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module")
def proxy(server: int, environment: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture(autouse=True)
def _undisturbed(proxy: Proxy) -> Iterator[None]:
    proxy.reset()
    yield
    proxy.reset()


NUMBERS = itertools.count()


def bucket(proxy: Proxy) -> str:
    """A bucket of its own."""
    name = f"bucket-{next(NUMBERS)}"
    options = {"endpoint_override": f"127.0.0.1:{proxy.server_port}", "scheme": "http"}
    made = fs.S3FileSystem(**options, region="us-east-1", allow_bucket_creation=True)
    made.create_dir(name)
    return name


def upload(folder: Path, into: Folder) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            into.put(str(path.relative_to(folder)), path.read_bytes())


class World:
    """The same sources here and on the server, and the mix that is built of those here."""

    def __init__(self, proxy: Proxy, folder: Path) -> None:
        self.proxy = proxy
        self.bucket = bucket(proxy)
        write_sources(folder / "data", **ROWS)
        upload(folder / "data", Folder.at(proxy.uri(f"{self.bucket}/data")))
        self.local = folder / "out"
        build(plan(config(folder, WEIGHTS, **KEYS)))
        self.shards = {k: v for k, v in digests(self.local).items() if k.startswith("shards/")}

    def config(self, name: str, **keys: Any) -> dict[str, Any]:
        """A config of this mix from and into the server, by every way to name sources."""
        source = f"{self.bucket}/data"
        uri = self.proxy.uri
        files = [uri(f"{source}/code/part-00{number}.parquet") for number in range(2)]
        paths: dict[str, Any] = {
            "web": uri(f"{source}/web/"),
            "code": files,
            "books": uri(f"{source}/bo?ks/*.parquet"),
        }
        return {
            "output": self.uri(name),
            "batch_size": 8,
            "batches_per_shard": 4,
            "datasets": {n: {"path": paths[n], "weight": w} for n, w in WEIGHTS.items()},
            **KEYS,
            **keys,
        }

    def uri(self, name: str) -> str:
        """A folder on the server, reached through the proxy."""
        return self.proxy.uri(f"{self.bucket}/{name}")

    def folder(self, name: str) -> Folder:
        return Folder.at(self.uri(name))

    def copied(self, name: str) -> Folder:
        """Another copy of the finished mix on the server; what that took is forgotten."""
        source, folder = self.folder("mix"), self.folder(name)
        for file in source.names():
            folder.put(file, source.read(file))
        self.proxy.reset()
        return folder

    def whole(self, name: str) -> bool:
        """Whether a mix on the server has the shards of the local one, and nothing is amiss."""
        return shards(self.folder(name)) == self.shards and verify(self.uri(name)) == []


@pytest.fixture(scope="module")
def world(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(proxy, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def mix(world: World) -> str:
    """The URI of a finished mix that tests only read."""
    build(plan(world.config("mix")))
    return world.uri("mix")


def shards(folder: Folder) -> dict[str, str]:
    """Sha256 of every object below ``shards/``."""
    names = [f"shards/{name}" for name in folder.names("shards")]
    return {name: hashlib.sha256(folder.read(name)).hexdigest() for name in names}


def command(*words: str) -> Any:
    """A command of mixshards; its exit code and what it printed."""
    return CliRunner().invoke(main, words)


def building(folder: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """A build in a process of its own."""
    path = folder / f"mix-{next(NUMBERS)}.yaml"
    path.write_text(json.dumps(settings))
    words = [sys.executable, "-m", "pipeline", "build", str(path), "--threads=2"]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    scratch = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(words, cwd=ROOT, env=scratch, **pipes)


def some(fault: Fault, takes: Callable[[Request], bool], times: int) -> Callable[..., Any]:
    """A fault for the first so many requests that a condition takes."""
    left = [times]

    def faults(request: Request) -> Fault | None:
        if not left[0] or not takes(request):
            return None
        left[0] -= 1
        return fault

    return faults


def puts(proxy: Proxy) -> list[str]:
    return [request.key for request in proxy.requests if request.method == "PUT"]


# The whole way


def test_a_mix_from_and_into_s3_has_the_bytes_of_a_local_one(world, mix):
    assert len(world.shards) == 8
    assert world.whole("mix")
    assert verify(mix, sources=True) == []


def test_verify_and_inspect_take_uris(world, mix):
    told = command("verify", mix)
    assert (told.exit_code, told.output.count("is whole: 8 shards, 240 rows")) == (0, 1)
    told = command("inspect", mix)
    assert "weighted mix: 30 batches, 240 rows, 8 shards" in told.output
    told = command("inspect", mix, "--shard", "2", "--json")
    rows = json.loads(told.output)["rows"]
    assert {row["dataset"] for row in rows} == set(WEIGHTS)
    for row in rows:
        prefix = f"s3://{world.bucket}/data/{row['dataset']}/part-"
        assert row["path"].startswith(prefix)
        assert row["path"].endswith(f".parquet{world.proxy.query}")


def test_the_reader_gives_what_a_local_one_gives_and_resumes(world, mix):
    here, there = ShardReader(world.local), ShardReader(mix)
    for rank in range(2):
        ours = there.batches(start_shard=3, rank=rank, world_size=2)
        assert list(ours) == list(here.batches(start_shard=3, rank=rank, world_size=2))
    iterator = there.batches()
    seen = list(itertools.islice(iterator, 11))
    state = iterator.state_dict()
    again = ShardReader(mix)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert [*seen, *again.batches()] == list(here.batches())


FORK = """
import os, sys
from pipeline.reader import ShardReader
reader = ShardReader(sys.argv[1])
expected = list(ShardReader(sys.argv[2]).batches(read_ahead=0))
iterator = reader.batches(read_ahead=0)
assert next(iterator) == expected[0] and reader[13] == expected[13]
children = []
for child in range(3):
    if not (pid := os.fork()):
        places = [15, 12] * 5 + [(child * 7 + at) % 29 for at in range(20)]
        right = all(reader[place] == expected[place] for place in places)
        right = right and list(iterator) == expected[1:]
        os._exit(0 if right else 1)
    children.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def test_forked_processes_that_share_a_reader_get_the_right_rows(world, mix):
    words = [sys.executable, "-c", FORK, mix, str(world.local)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=60)


def test_a_second_build_keeps_every_shard(world, mix):
    before = world.folder("mix").read("manifest.json")
    build(plan(world.config("mix")))
    assert [key for key in puts(world.proxy) if "/shards/" in key] == []
    assert world.folder("mix").read("manifest.json") == before


def test_damaged_and_lacking_objects_are_found_and_mended(world, mix):
    folder = world.copied("damaged")
    names = list(world.shards)
    flipped = bytearray(folder.read(names[1]))
    flipped[len(flipped) // 2] ^= 1
    folder.put(names[1], bytes(flipped))
    folder.put(names[4], folder.read(names[4])[:-1])
    folder.delete(names[6])
    assert {fault.file for fault in verify(world.uri("damaged"))} == {
        names[1],
        names[4],
        names[6],
    }
    with pytest.raises(ShardError, match=rf"{names[6]}.*cannot be opened"):
        list(ShardReader(world.uri("damaged")).batches(start_shard=6))
    world.proxy.reset()
    build(plan(world.config("damaged")))
    written = {key.rpartition("shards/")[2] for key in puts(world.proxy) if "/shards/" in key}
    assert written - {""} == {os.path.basename(names[place]) for place in (1, 4, 6)}
    assert world.whole("damaged")


def test_a_stray_object_is_refused_and_told(world, mix):
    folder = world.copied("stray")
    folder.put("shards/shard-0.bak", b"not a shard")
    assert [fault.file for fault in verify(world.uri("stray"))] == ["shards/shard-0.bak"]
    with pytest.raises(PlanError, match=r"/stray: shards/shard-0\.bak: no place in this mix"):
        build(plan(world.config("stray")))


def test_a_killed_build_leaves_whole_shards_and_goes_on_from_them(world, tmp_path):
    process = building(tmp_path, world.config("killed"))
    victim = f"{world.bucket}/killed/shards/shard-00000004.parquet"

    def kill(request: Request) -> Fault | None:
        if request.key != victim:
            return None
        process.send_signal(signal.SIGKILL)
        return "drop"

    world.proxy.faults = kill
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    world.proxy.reset()
    folder = world.folder("killed")
    stand = shards(folder)
    assert 0 < len(stand) < 8
    assert "shards/shard-00000004.parquet" not in stand
    assert stand.items() <= world.shards.items()
    assert folder.size("manifest.json") is None
    told = command("verify", world.uri("killed"))
    assert told.exit_code == 1
    assert "no finished mix" in told.output
    build(plan(world.config("killed")))
    # Of what stood, only a shard that was put and not yet noted is written again.
    again = {key.rpartition("killed/")[2] for key in puts(world.proxy)} & stand.keys()
    assert len(again) <= 1
    assert world.whole("killed")


def test_two_builds_at_once_end_in_one_whole_mix(world, tmp_path):
    begun = threading.Event()

    def notice(request: Request) -> None:
        if request.method == "PUT" and "/shards/" in request.key:
            begun.set()

    world.proxy.faults = notice
    with building(tmp_path, world.config("both")) as other:
        assert begun.wait(60)
        build(plan(world.config("both")))
        told = other.communicate(timeout=60)
    assert (other.returncode, f"built {world.bucket}/both: 8 shards" in told[0]) == (0, True), told
    assert world.whole("both")


# What reading costs


def test_what_a_row_group_of_a_source_costs_is_little_more_than_its_bytes(world, tmp_path):
    rows, group_rows = 20_000, 1_000
    rng = np.random.default_rng(5)
    values = pa.array(rng.integers(0, 2**60, rows * 16))
    wide = pa.table(
        {"id": np.arange(rows), "tokens": pa.FixedSizeListArray.from_arrays(values, 16)}
    )
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=group_rows, use_dictionary=False)
    name = bucket(world.proxy)
    upload(tmp_path, Folder.at(world.proxy.uri(name)))
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    group_bytes = sum(metadata.row_group(7).column(c).total_compressed_size for c in range(2))
    assert group_bytes > 100_000
    world.proxy.reset()
    catalog = scan_datasets([DatasetSpec("a", (world.proxy.uri(f"{name}/a.parquet"),))], "/")
    # To find it, to open it, and its end, which holds the footer.
    assert [request.method for request in world.proxy.requests] == ["HEAD", "HEAD", "GET"]
    assert world.proxy.sent <= 64 << 10
    world.proxy.reset()
    (piece,) = Cursor(catalog, catalog.datasets[0]).read(7 * group_rows, 1)
    assert piece.column(0).to_pylist() == [7 * group_rows]
    assert [request.method for request in world.proxy.requests] == ["HEAD", "GET", "GET"]
    assert group_bytes <= world.proxy.requests[2].sent <= 1.01 * group_bytes
    assert world.proxy.requests[1].sent <= 64 << 10


def test_a_large_row_group_comes_in_few_pieces_and_is_not_held_whole(world, tmp_path):
    rows = 160_000
    values = pa.array(np.random.default_rng(6).integers(0, 2**60, rows * 8))
    large = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, 8), "id": range(rows)})
    pq.write_table(large, tmp_path / "a.parquet", row_group_size=rows, use_dictionary=False)
    name = bucket(world.proxy)
    upload(tmp_path, Folder.at(world.proxy.uri(name)))
    catalog = scan_datasets([DatasetSpec("a", (world.proxy.uri(f"{name}/a.parquet"),))], "/")
    world.proxy.reset()
    cursor = Cursor(catalog, catalog.datasets[0])
    for start in range(0, rows, 1000):
        pieces = cursor.read(start, 1000)
        assert pa.Table.from_batches(pieces).column("id")[0].as_py() == start
    size = (tmp_path / "a.parquet").stat().st_size
    assert world.proxy.sent <= 1.01 * size + (64 << 10)
    assert max(request.sent for request in world.proxy.requests) <= 5 << 20
    assert len(world.proxy.requests) <= 2 + size // (1 << 20)


def test_opening_a_mix_and_reading_a_batch_costs_three_reads(world, mix):
    folder = Folder.at(mix)
    sizes = [folder.size(name) or 0 for name in ("manifest.json", "shards/shard-00000005.parquet")]
    world.proxy.reset()
    reader = ShardReader(mix)
    assert world.proxy.sent == sizes[0]
    reader[20]
    reads = [request for request in world.proxy.requests if request.method == "GET"]
    assert len(reads) == 3
    assert world.proxy.sent <= sum(sizes) + (64 << 10)


def test_a_small_object_is_put_with_one_request(world):
    world.proxy.reset()
    world.folder("one").put("shard", b"x" * (5 << 20))
    assert [request.method for request in world.proxy.requests] == ["PUT"]


# Faults in passing


@pytest.mark.parametrize("fault", ["busy", "broken", "cut", "drop", "lost"])
def test_every_operation_gets_through_a_fault_in_passing(world, fault):
    folder = world.folder(f"passing-{fault}")

    def once(act: Callable[[], Any]) -> Any:
        world.proxy.requests.clear()
        hit = {"cut": lambda request: request.method == "GET"}.get(fault, lambda request: True)
        world.proxy.faults = some(fault, hit, 2)
        return act()

    data = os.urandom(30_000)
    once(lambda: folder.put("a", data))
    assert once(lambda: folder.size("a")) == len(data)
    assert once(lambda: folder.read("a")) == data
    assert once(folder.names) == ["a"]
    with once(lambda: folder.open("a")) as file:
        assert once(lambda: file.read_at(1000, 500)) == data[500:1500]
    once(lambda: folder.delete("a"))
    assert once(lambda: folder.size("a")) is None
    once(lambda: folder.put("b", data))
    once(lambda: folder.delete_tree(""))
    assert folder.names() == []


def test_parts_and_ends_of_a_large_upload_get_through_faults_in_passing(world):
    folder = world.folder("parts")
    data = os.urandom(1 << 20) * 12
    count = itertools.count()
    kinds: list[Fault] = ["busy", "drop", "lost"]

    def every_other(request: Request) -> Fault | None:
        at = next(count)
        return kinds[at // 2 % 3] if at % 2 else None

    world.proxy.faults = every_other
    folder.put("large", data)
    world.proxy.reset()
    assert folder.read("large") == data


def test_a_build_and_a_reader_get_through_a_bad_hour(world):
    count = itertools.count()
    kinds: list[Fault] = ["busy", "cut", "drop", "broken", "lost"]

    def every_fifth(request: Request) -> Fault | None:
        at = next(count)
        return kinds[at // 5 % 5] if at % 5 == 0 else None

    world.proxy.faults = every_fifth
    build(plan(world.config("bad-hour")))
    read = list(ShardReader(world.uri("bad-hour")).batches())
    assert next(count) > 100
    world.proxy.reset()
    assert read == list(ShardReader(world.local).batches())
    assert world.whole("bad-hour")


def test_a_server_that_refuses_for_a_second_is_waited_for(world, mix):
    reader = ShardReader(mix)
    expected = ShardReader(world.local)[9]
    world.proxy.stop()
    back = threading.Timer(1, world.proxy.start)
    back.start()
    began = time.monotonic()
    assert reader[9] == expected
    assert time.monotonic() - began > 0.9
    back.join()


# Faults for good


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


@pytest.mark.usefixtures("impatient")
def test_a_lasting_fault_ends_a_build_with_the_object_named(world):
    lasting = "shard-00000002.parquet"
    world.proxy.faults = lambda request: "busy" if request.key.endswith(lasting) else None
    with pytest.raises(BuildError) as caught:
        build(plan(world.config("lasting")))
    assert f"shards/{lasting}: cannot be written: " in str(caught.value)
    assert "SLOW_DOWN" in str(caught.value)
    assert "the same build goes on from them" in str(caught.value)
    world.proxy.reset()
    folder = world.folder("lasting")
    assert folder.size("manifest.json") is None
    assert folder.size(f"shards/{lasting}") is None
    build(plan(world.config("lasting")))
    assert world.whole("lasting")


@pytest.mark.usefixtures("impatient")
def test_a_lasting_fault_ends_reading_with_the_object_named_and_not_called_damage(world, mix):
    reader = ShardReader(mix)
    batches = reader.batches(read_ahead=0)
    next(batches)
    world.proxy.faults = lambda request: "busy" if request.method == "GET" else None
    with pytest.raises(ShardError) as caught:
        list(batches)
    assert f"{world.bucket}/mix/shards/shard-0000000" in str(caught.value)
    assert "damaged" not in str(caught.value)
    world.proxy.reset()
    # The same iterator goes on from the batch that failed.
    left = len(batches)
    assert 0 < left < 30
    assert len(list(batches)) == left


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "act",
    [
        lambda folder: folder.size("mine/a"),
        lambda folder: folder.read("mine/a"),
        lambda folder: folder.open("mine/a"),
        lambda folder: folder.put("mine/a", b"x"),
        lambda folder: folder.delete("mine/a"),
        lambda folder: folder.names("mine"),
    ],
    ids=["size", "read", "open", "put", "delete", "names"],
)
def test_denied_access_is_told_at_once_with_the_object(world, act):
    folder = world.folder("denied")
    folder.put("mine/a", b"content")
    world.proxy.reset()
    world.proxy.faults = lambda request: "denied"
    with pytest.raises(OSError, match=r"ACCESS_DENIED|403") as caught:
        act(folder)
    assert len(world.proxy.requests) == 1
    assert world.bucket in str(caught.value)
    assert "denied/mine" in str(caught.value)


def test_denied_reading_of_an_open_object_names_it(world):
    folder = world.folder("denied")
    folder.put("late", b"content" * 1000)
    world.proxy.faults = lambda request: "denied" if request.method == "GET" else None
    with pytest.raises(OSError, match=rf"{world.bucket}/denied/late: .*ACCESS_DENIED"):
        folder.read("late")


def test_what_is_not_there_is_told_at_once(world, impatient):
    world.proxy.reset()
    with pytest.raises(FileNotFoundError, match=f"{world.bucket}/none/a"):
        world.folder("none").read("a")
    assert len(world.proxy.requests) == 1
    with pytest.raises(OSError, match=r"^When .*'a' in bucket 'no-such-bucket'.*NO_SUCH_BUCKET"):
        Folder.at(world.proxy.uri("no-such-bucket")).put("a", b"x")
    missing = world.uri("none/a.parquet")
    settings = world.config("none")
    settings["datasets"]["web"]["path"] = missing
    with pytest.raises(CatalogError) as caught:
        plan(settings)
    assert "dataset 'web'" in str(caught.value)
    assert f"{missing}: no such file or folder" in str(caught.value)


UPLOAD = """
import sys
from pipeline.storage import Folder
try:
    Folder.at(sys.argv[1]).put("large", b"x" * (25 << 20))
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        ("broken", lambda request: "partNumber=2" in request.query),
        ("drop", lambda request: "partNumber=3" in request.query),
        ("denied", lambda request: request.query == "uploads"),
    ],
    ids=["a part fails", "a part is cut off", "the upload cannot begin"],
)
def test_an_upload_that_fails_half_way_leaves_nothing_at_its_key(world, impatient, fault, hit):
    name = f"half-way-{next(NUMBERS)}"
    world.proxy.faults = lambda request: fault if hit(request) else None
    # In a process of its own, since one that ends lets go of its streams too.
    words = [sys.executable, "-c", UPLOAD, world.uri(name)]
    told = subprocess.run(words, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
    assert f"'{name}/large' in bucket '{world.bucket}'" in told.stdout
    world.proxy.reset()
    assert world.folder(name).names() == []


def test_an_upload_whose_process_is_killed_leaves_nothing_at_its_key(world):
    script = UPLOAD.replace("import sys", "import os, sys; print(os.getpid(), flush=True)")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", script, world.uri("shot")]
    with subprocess.Popen(words, cwd=ROOT, **pipes) as process:

        def kill(request: Request) -> Fault | None:
            if "partNumber=2" not in request.query:
                return None
            process.kill()
            return "drop"

        world.proxy.faults = kill
        assert process.wait(timeout=60) == -signal.SIGKILL
    world.proxy.reset()
    assert world.folder("shot").names() == []


# URIs


def test_the_environment_may_name_the_endpoint(world, mix, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{world.proxy.port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert ShardReader(f"s3://{world.bucket}/mix")[3] == ShardReader(mix)[3]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(OSError, match=rf"{world.bucket}.*NETWORK_CONNECTION"):
        Folder.at(f"s3://{world.bucket}/mix").size("manifest.json")


def test_a_web_address_is_a_source_and_gets_through_faults_in_passing(world, tmp_path):
    pytest.importorskip("aiohttp")
    name = bucket(world.proxy)
    pq.write_table(table("web", 40), tmp_path / "a b.parquet", row_group_size=10)
    public, _ = resolve(world.proxy.uri(name))
    with public.open_output_stream(f"{name}/a b.parquet", metadata={"ACL": "public-read"}) as file:
        file.write((tmp_path / "a b.parquet").read_bytes())
    address = f"http://127.0.0.1:{world.proxy.port}/{name}/a%20b.parquet"
    world.proxy.reset()
    count = itertools.count()
    kinds: list[Fault] = ["busy", "drop", "cut"]

    def first_of_three(request: Request) -> Fault | None:
        at = next(count)
        return kinds[at // 3 % 3] if at % 3 == 0 else None

    world.proxy.faults = first_of_three
    catalog = scan_datasets([DatasetSpec("web", (address,))], "/")
    pieces = Cursor(catalog, catalog.datasets[0]).read(0, 40)
    assert pa.Table.from_batches(pieces).to_pylist() == table("web", 40).to_pylist()
    world.proxy.faults = lambda request: "denied"
    with pytest.raises(PermissionError, match=r"403.*a%20b\.parquet"):
        resolve(address)[0].open_input_file(resolve(address)[1])
    world.proxy.reset()
    with pytest.raises(CatalogError, match=r"none\.parquet: no such file or folder"):
        scan_datasets([DatasetSpec("web", (address.replace("a%20b", "none"),))], "/")


def test_an_output_among_the_sources_is_refused(world):
    with pytest.raises(PlanError, match=rf"would take the shards in {world.bucket}/data/web/mix"):
        plan(world.config("data/web/mix"))


def test_a_mistaken_query_is_refused_with_what_it_may_have(world):
    with pytest.raises(StorageError, match=r"unknown 'endpoint' in its query, which may have reg"):
        resolve(f"s3://{world.bucket}/mix?endpoint=127.0.0.1:1")


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_mix_of_any_format_is_that_of_local_files(
    world: World, proxy: Proxy, tmp_path: Path, form: str
) -> None:
    sources, schema = f"{world.bucket}/{form}", table("a", 1).schema
    made = world.config(f"of-{form}")
    for name, files in ROWS.items():
        path = tmp_path / f"{name}.{form}"
        write_as(path, table(name, sum(files)), form)
        Folder.at(proxy.uri(sources)).put(path.name, path.read_bytes())
        made["datasets"][name]["path"] = proxy.uri(f"{sources}/{path.name}")
        if "json" in form:
            types = {field.name: str(field.type) for field in schema}
            made["datasets"][name]["schema"] = types
    build(plan(made))
    found = pa.concat_tables(ShardReader(world.uri(f"of-{form}")).batches())
    # Rows of a dataset are told by their values, however its files were cut.
    expected = pa.concat_tables(ShardReader(str(world.local)).batches())
    assert found.select(["mix_dataset", "mix_row", "mix_epoch"]).equals(
        expected.select(["mix_dataset", "mix_row", "mix_epoch"])
    )
    assert [text.split(":")[:2] for text in found["text"].to_pylist()] == [
        text.split(":")[:2] for text in expected["text"].to_pylist()
    ]
    assert world.folder(f"of-{form}").names("_mix/stage") == []
    assert verify(world.uri(f"of-{form}"), sources=True) == []
