"""Five hundred small files: make them, build from them under a watch, compare with online."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 500


def make(folder: Path) -> None:
    """Write the files: 20 to 400 samples each, of a frame number and 16 x 16 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(11)
    total = 0
    for number in range(FILES):
        rows = int(rng.integers(20, 401))
        pixels = pa.array(rng.integers(0, 256, rows * 256, dtype=np.uint8))
        table = pa.table(
            {
                "frame": np.arange(rows),
                "pixels": pa.FixedSizeListArray.from_arrays(pixels, 256),
            }
        )
        pq.write_table(table, folder / f"video-{number:04d}.parquet")
        total += rows
    print(f"{FILES} files, {total:,} samples")


def build(config: str) -> None:
    """Run ``mixshards build``, and tell how many source files were ever open in it together."""
    child = subprocess.Popen(["mixshards", "build", "--quiet", config])
    data = f"{os.getcwd()}/data/"
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            folder = f"/proc/{child.pid}/fd"
            try:
                opened = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
            except OSError:
                continue
            most = max(most, sum(path.startswith(data) for path in opened))

    watcher = threading.Thread(target=watch)
    if os.path.isdir("/proc/self/fd"):
        watcher.start()
    status = child.wait()
    done.set()
    if status:
        sys.exit(status)
    print(f"source files open at once in the build: at most {most}")


def compare(mix: str, folder: Path) -> None:
    """Hold every batch against the online class, from the start and from a boundary's state."""
    from mixcore import StreamingDataset
    from pipeline.manifest import Manifest
    from pipeline.reader import ShardReader
    from pipeline.storage import Folder

    opened: set[int] = set()
    most = 0

    class Video:
        """The samples of one file, which says when it is open."""

        def __init__(self, number: int) -> None:
            self.number = number

        def get_iterator(self, offset: int) -> Any:
            nonlocal most
            rows = pq.read_table(folder / f"video-{self.number:04d}.parquet", columns=["frame"])
            opened.add(self.number)
            most = max(most, len(opened))
            try:
                yield from rows["frame"].to_pylist()[offset:]
            finally:
                opened.discard(self.number)

    reader = ShardReader(mix)
    folder_of_mix = Folder.at(mix)
    states = Manifest.load(folder_of_mix).states(folder_of_mix)
    for shard in (0, reader.num_shards // 2):
        online = StreamingDataset([Video(n) for n in range(FILES)], 16, passes=2)
        online.load_state_dict(states[shard])
        samples = iter(online)
        batches = 0
        for table in reader.batches(start_shard=shard, columns=["frame"]):
            expected = [frame for _, frame in islice(samples, 64)]
            assert table["frame"].to_pylist() == expected
            batches += 1
        assert next(samples, None) is None
        print(f"from shard {shard}: {batches:,} batches are the online ones, and then both end")
    print(f"videos open at once online: at most {most}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "make":
        make(Path(arguments[0]))
    elif command == "build":
        build(arguments[0])
    else:
        compare(arguments[0], Path(arguments[1]))
