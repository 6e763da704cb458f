"""How far a build has come, told from the folder it writes into, since runners do not say."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from .manifest import SCRATCH
from .plan import Plan
from .shard import SHARDS

_PLAIN_SECONDS = 10.0


class Watch:
    """While it is entered, shows shards, rows/s, bytes/s and time left on standard error.

    A bar on a terminal; elsewhere a plain line every ten seconds.
    """

    def __init__(self, plan: Plan) -> None:
        self._folder = plan.folder
        self._total = plan.layout.num_shards
        self._rows_per_shard = int(plan.manifest.document["num_rows"]) / self._total
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = time.monotonic()
        self._at_first: int | None = None

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

    def _look(self) -> tuple[int, float, float]:
        """Shards that stand, rows a second, bytes a second since the watch began."""
        written = sum(name.endswith(".json") for name in self._folder.names(SCRATCH))
        standing = self._folder.filesystem.get_file_info(_all_below(self._folder.path(SHARDS)))
        sizes = [info.size for info in standing if info.is_file]
        if self._at_first is None:
            self._at_first = written
        new = max(0, written - self._at_first)
        seconds = max(1e-6, time.monotonic() - self._begun)
        mean = sum(sizes) / len(sizes) if sizes else 0.0
        return written, new * self._rows_per_shard / seconds, new * mean / seconds

    def _run(self) -> None:
        console = Console(stderr=True)
        if not sys.stderr.isatty():
            self._lines(console)
            return
        columns = (
            TextColumn("building"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} shards"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("build", total=self._total, speed="")
            while not self._done.is_set():
                self._show(progress, task)

    def _show(self, progress: Progress, task: TaskID) -> None:
        began = time.monotonic()
        written, rows, size = self._look()
        progress.update(task, completed=written, speed=_speed(rows, size))
        # Looking at a folder of a million shards takes a while: do it rarely then.
        self._done.wait(max(0.5, 10 * (time.monotonic() - began)))

    def _lines(self, console: Console) -> None:
        while not self._done.wait(_PLAIN_SECONDS):
            written, rows, size = self._look()
            left = ""
            if self._at_first is not None and written > self._at_first:
                each = (time.monotonic() - self._begun) / (written - self._at_first)
                left = f", about {each * (self._total - written):,.0f} s left"
            console.print(f"{written}/{self._total} shards, {_speed(rows, size)}{left}")


def _all_below(path: str) -> object:
    from pyarrow import fs

    return fs.FileSelector(path, recursive=True, allow_not_found=True)


def _speed(rows: float, size: float) -> str:
    return f"{rows:,.0f} rows/s, {size / 1e6:,.1f} MB/s"
