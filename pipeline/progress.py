"""How far a build has come, told from the folder it writes into, since runners do not say."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pyarrow import fs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .catalog import STAGE
from .manifest import MANIFEST, SCRATCH
from .planned import Plan
from .shard import SHARDS
from .stage import to_stage

PLAIN_SECONDS = 10.0
"""How often a build that is not on a terminal says how far it is."""


def scans(seconds: float = PLAIN_SECONDS) -> Callable[[int, int], None]:
    """What says on standard error how many sources are scanned of how many, every few seconds."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"scanned {done:,}/{total:,} source files", file=sys.stderr, flush=True)

    return told


class Watch:
    """While it is entered, shows shards, rows/s, bytes/s and time left on standard error.

    Before the first shard, it shows how far sources have come that are staged first. A bar on a
    terminal; elsewhere a plain line every ``seconds``. ``overwrite`` says that a finished mix that
    stands there is to be replaced.
    """

    def __init__(self, plan: Plan, overwrite: bool = False, seconds: float = PLAIN_SECONDS) -> None:
        self._folder = plan.folder
        self._bytes_id = plan.manifest.bytes_id
        self._overwrite = overwrite
        self._seconds = seconds
        self._total = plan.layout.num_shards
        self._to_stage = len(to_stage(plan.catalog))
        self._rows_per_shard = int(plan.manifest.document["num_rows"]) / self._total
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = time.monotonic()
        self._stale: set[tuple[str, Any]] = set()
        self._at_first: int | None = None
        self._standing = 0
        self._mean_bytes = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> str:
        """Count the shards that stand; the speed since the watch began, for people."""
        with contextlib.suppress(OSError, ValueError):  # the folder changes under the listing
            shards = self._files(SHARDS)
            self._mean_bytes = sum(info.size for info in shards) / max(1, len(shards))
            finished = self._folder.size(MANIFEST) is not None
            # Until the mix that is to be replaced is gone, nothing has begun.
            if not (finished and self._overwrite):
                standing = len(shards) if finished else len(self._noted())
                # The notes go when the mix is published, but what stood stands.
                self._standing = max(self._standing, min(standing, self._total))
                if self._at_first is None:
                    self._at_first = self._standing
        new = self._standing - (self._at_first or 0)
        each = new / max(1e-6, time.monotonic() - self._begun)
        return (
            f"{each * self._rows_per_shard:,.0f} rows/s, {each * self._mean_bytes / 1e6:,.1f} MB/s"
        )

    def _staging(self) -> str | None:
        """How far staging has come, None before it and once it is over."""
        if not self._to_stage or self._standing > (self._at_first or 0):
            return None
        with contextlib.suppress(OSError):
            done = self._files(STAGE)
            part = [info for info in self._files(SCRATCH) if info.path.endswith(".part")]
            if done or part:
                size = sum(info.size for info in [*done, *part]) / 1e6
                return f"staged {len(done)}/{self._to_stage} compressed files, {size:,.1f} MB"
        return None

    def _noted(self) -> set[tuple[str, Any]]:
        """The notes of this build's shards; a build of another plan may have left some."""
        notes = {
            (info.path, info.mtime_ns)
            for info in self._files(SCRATCH)
            if info.path.endswith(".json")
        }
        if self._at_first is None and notes:
            path, _ = min(notes)
            with self._folder.filesystem.open_input_file(path) as file:
                if json.loads(file.read()).get("bytes_id") != self._bytes_id:
                    self._stale = notes
        return notes - self._stale

    def _files(self, name: str) -> list[Any]:
        selector = fs.FileSelector(self._folder.path(name), recursive=True, allow_not_found=True)
        return [i for i in self._folder.filesystem.get_file_info(selector) if i.is_file]

    def _run(self) -> None:
        if not sys.stderr.isatty():
            self._lines()
            return
        columns = (
            TextColumn("building"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} shards"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("build", total=self._total, speed="")
            while not self._done.is_set():
                began = time.monotonic()
                speed = self._look()
                progress.update(task, completed=self._standing, speed=self._staging() or speed)
                # Looking at a folder of a million shards takes a while: do it rarely then.
                self._done.wait(max(0.5, 10 * (time.monotonic() - began)))

    def _lines(self) -> None:
        self._look()
        while not self._done.wait(self._seconds):
            speed = self._look()
            staging = self._staging()
            if staging:
                print(staging, file=sys.stderr, flush=True)
                continue
            new = self._standing - (self._at_first or 0)
            left = ""
            if new:
                each = (time.monotonic() - self._begun) / new
                left = f", about {each * (self._total - self._standing):,.0f} s left"
            line = f"{self._standing}/{self._total} shards, {speed}{left}"
            print(line, file=sys.stderr, flush=True)
