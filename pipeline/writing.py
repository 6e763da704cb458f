"""A shard's rows to the file that stands in its place, for both ways of bringing rows together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import pyarrow as pa

from mixcore import RowMap

from .errors import MixError
from .pages import PageError
from .planned import Plan
from .shard import (
    ColumnSizeError,
    Footer,
    ShardError,
    ShardRecord,
    check_shard,
    file_sha256,
    one_chunk,
    open_shard,
    provenance,
    shard_name,
    write_shard,
)
from .standing import Standing


class BuildError(MixError):
    """A mix cannot be built as planned."""


class ShardWriter:
    """Writes the shards of one plan from their rows; may be shared by threads.

    Raises BuildError where this pyarrow is not the one that the plan was made with.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.options.pyarrow != pa.__version__:
            raise BuildError(
                f"this worker has pyarrow {pa.__version__}, but the plan was made with "
                f"{plan.options.pyarrow}, and a shard's bytes depend on it; install "
                f"pyarrow=={plan.options.pyarrow} here, or plan again with this version"
            )
        self.plan = plan
        self._standing = Standing(plan.folder, plan.manifest.bytes_id)
        self._states = plan.manifest.states(plan.folder)
        self._mixture = plan.mixture
        self._names = pa.array(plan.manifest.names, pa.string())

    def footer(self, shard: int) -> Footer:
        """What a planned shard says of itself."""
        first, batches = self.plan.layout.shard(shard)
        return Footer(self.plan.manifest.bytes_id, shard, first, batches)

    def standing(self, footer: Footer) -> ShardRecord | None:
        """The record of a shard that stands whole from an earlier build of this plan."""
        return self._standing.find(footer)

    def row_map(self, footer: Footer) -> RowMap:
        """Which item stands in which row of a shard; batches numbered from 0 at its start."""
        return self._mixture.rows(self._states[footer.shard], footer.num_batches)

    def groups(self, footer: Footer, row_map: RowMap) -> list[RowMap]:
        """A shard's row map, cut into its row groups."""
        return [
            row_map.between(start, stop)
            for start, stop in self.plan.layout.groups(footer.num_batches)
        ]

    def table(self, footer: Footer, group: RowMap, rows: pa.Table) -> pa.Table:
        """A row group of a shard: payload rows in order and provenance, one chunk a column.

        Raises:
            ColumnSizeError: a column of the rows is too large for that.
        """
        columns = provenance(group, footer.first_batch, self._names)
        return one_chunk(
            pa.Table.from_arrays(
                [*rows.columns, *(pa.chunked_array([column]) for column in columns)],
                schema=self.plan.schema,
            )
        )

    def write(self, footer: Footer, tables: Iterable[pa.Table]) -> str:
        """Write a shard's row groups, a table each, to a scratch file; its path.

        Raises:
            BuildError: the file cannot be written, its pages are not whole, or a column is too
                large for its type. Nothing is left behind any error.
        """
        scratch = self.plan.folder.scratch(shard_name(footer.shard))
        with _writing(scratch, footer.shard):
            self.encode(scratch, footer, tables)
        return scratch

    def encode(self, path: str, footer: Footer, tables: Iterable[pa.Table]) -> None:
        """Write a shard's row groups, a table each, to a file of any path."""
        write_shard(path, self.plan.schema, self.plan.options, footer, tables)

    def finish(self, scratch: str, footer: Footer) -> ShardRecord:
        """Read a scratch file back, hold it against the plan, and put it in place in one step.

        Raises:
            BuildError: it did not read back as planned, or cannot be put in place.
        """
        name = shard_name(footer.shard)
        with _writing(scratch, footer.shard):
            try:
                shard = open_shard(scratch, name)
                with shard.parquet:
                    rows = shard.parquet.metadata.num_rows
                    check_shard(shard, footer, self.plan.manifest.group_rows(footer.shard), name)
                with open(scratch, "rb") as file:
                    sha256, size = file_sha256(file)
            except ShardError as error:
                raise BuildError(f"what was just written did not read back: {error}") from error
            self.plan.folder.place(scratch, name)
        record = ShardRecord(
            footer.shard, footer.first_batch, footer.num_batches, rows, size, sha256
        )
        self._standing.note(record)
        return record


@contextlib.contextmanager
def _writing(scratch: str, shard: int) -> Iterator[None]:
    """Name the shard in what the operating system says, and leave no scratch behind an error."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.remove(scratch)
        name = shard_name(shard)
        if isinstance(error, ColumnSizeError):
            raise BuildError(f"{name}: {error}") from error
        if isinstance(error, PageError):
            raise BuildError(
                f"what was just written did not read back: {name}: {error}; the shards that stand "
                "are kept, and the same build goes on from them"
            ) from error
        if not isinstance(error, OSError):
            raise
        raise BuildError(
            f"{name}: cannot be written: {error}; the shards that stand are kept, "
            "and the same build goes on from them"
        ) from error
