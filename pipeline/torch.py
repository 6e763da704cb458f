"""A finished mix as torch datasets: the same batches for any number of workers and ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .decoder import Decoder, checked_columns
from .errors import ReaderError
from .manifest import Manifest
from .passing import Batch
from .reader import Batches, PaddedBatch, Part, ShardReader, Stand, copied, padded
from .shard import MIX_BATCH
from .share import Remainder, Share, Skips, Split, batch_number, integer, state
from .tensors import NullError, Padded, Ragged, as_tensors

__all__ = ["MixedBatches", "MixedShards", "Padded", "Ragged", "ReaderError"]

# That workers can tell the main process to skip.
_MOST_RANGES = 1_000
Collate = Callable[[dict[str, Any]], Any]


class MixedShards(IterableDataset[Any]):
    """The batches of a finished mix that a rank trains on, in order, as dicts of torch tensors.

    For ``DataLoader(mix, batch_size=None, num_workers=N)`` and for torchdata's
    ``StatefulDataLoader``: the batches come in the same order for any N.

    Columns are numbers, booleans and times as tensors of shape [rows]; lists of a fixed size as
    [rows, size]; binaries of a fixed width as uint8 of [rows, width]; other lists of these as
    ``Ragged(values, offsets)``, or as ``Padded(values, lengths)`` where ``pad`` has a value for
    them; structs as dicts of their fields; text and all else as lists. Tensors share Arrow's memory
    where they can; nothing else does. ``"mix_batch"`` is one int: the batch's number, whatever
    ``columns`` are asked for. ``fill`` maps columns to what stands for their nulls, which tensors
    cannot hold. ``collate`` makes anything else of such a dict.

    Without ``rank`` and ``world_size`` they are those of ``torch.distributed`` where it is
    initialised, else those in the environment that ``torchrun`` sets, else 0 of 1.

    A pass begins at ``start_batch``, and the first one after :meth:`load_state_dict` at the state,
    in worker processes too. A worker reads in one thread, as torch computes in one, and leaves it
    to the loader to be ahead. The other arguments are those of :meth:`ShardReader.batches`; ``len``
    is how many batches the next pass has.

    Raises:
        ManifestError: there is no finished mix, one of a newer format, or a damaged one.
        ReaderError: an argument is wrong, as ``ShardReader.batches`` has it; while iterating: a
            null in a column of tensors.
        ShardError: a shard is gone or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        split: Split | None = None,
        columns: Sequence[str] | None = None,
        uneven: bool = False,
        remainder: Remainder = "drop",
        read_ahead: int = 2,
        pad: Mapping[str, object] | None = None,
        fill: Mapping[str, object] | None = None,
        collate: Collate | None = None,
        micro_batches: int | None = None,
        skip_batches: Iterable[tuple[int, int]] = (),
        start_batch: int = 0,
    ) -> None:
        super().__init__()
        self._reader = ShardReader(path)
        self._asked = Skips.of(skip_batches, len(self._reader))
        self._share = Share.of(
            self._reader.manifest,
            *_ranks(rank, world_size),
            split,
            uneven,
            remainder,
            micro_batches,
            self._asked,
        )
        self._columns = _payload(self._reader, columns)
        self._read_ahead, self._pad = read_ahead, pad
        self._in_micro_batches = micro_batches is not None
        self._convert = _Convert.of(self._reader, self._columns, fill, collate)
        self._start = start_batch
        self._loaded: dict[str, Any] | None = None
        # Seen by all processes: the first pass since a state was loaded, and how many were loaded.
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        # How many ranges of batches the states that workers loaded leave out, and these.
        self._told = torch.zeros(1 + _MOST_RANGES, 2, dtype=torch.int64).share_memory_()
        self._num_loaded, self._loaded_here = 0, False
        self._refused: ReaderError | None = None
        self._latest = self._stream((0, 1)).where

    def __len__(self) -> int:
        start = self._start
        if self._loaded is not None and not int(self._shared[0]):
            start = self._loaded["next_batch"]
        share = self._share_now()
        return len(share.places(share.begin(start)))

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            pa.set_cpu_count(1)
            if int(self._shared[1]) != self._num_loaded:
                return _raising(
                    ReaderError(
                        "a state was loaded after this worker had started, and persistent workers "
                        "keep what they started with: make a new DataLoader after load_state_dict"
                    )
                )
            if self._refused is not None:
                return _raising(self._refused)
        stream = self._stream(_turn(), self._loaded if self._goes_on() else None)
        self._loaded, self._loaded_here, self._latest = None, False, stream.where
        return stream

    def state_after(self, batch_number: int) -> dict[str, Any]:
        """The state of a run that has trained on a batch and on all before it: a few bytes of JSON.

        It is the same for every rank of a step. With the number of the batch that came out of the
        loader, ``batch["mix_batch"]``, it does not matter what workers have read ahead.

        Raises:
            ReaderError: no rank is given such a batch.
        """
        share = self._share_now()
        return state(self._reader.manifest, share, share.place(share.after(batch_number)))

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator of this process stands, or the state that was loaded since.

        Worker processes have iterators of their own: what these gave, ``state_after`` tells.
        """
        return self._latest.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin at a state; what it skips is left out of later passes, too.

        Raises:
            ReaderError: it is no state, of a mix with another order, in the middle of a step of
                this world size, or of another worker.
        """
        if get_worker_info() is None:
            self._load(state)
            self._shared[0] = 0
            self._shared[1] += 1
            self._told[0, 0] = 0
            self._num_loaded += 1
            return
        try:
            self._load(state)
            self._tell(self._share.skips)
            self._refused = None
        except ReaderError as error:
            self._refused = error
        self._loaded_here = True

    def _load(self, state: Mapping[str, Any]) -> None:
        stream = self._stream(_turn())
        stream.load_state_dict(state)
        self._latest, self._loaded = stream.where, stream.state_dict()
        self._share = replace(self._share, skips=stream.where.stand.share.skips)

    def _tell(self, skips: Skips) -> None:
        """Let all processes skip what a worker's state does: each worker of a pass tells the same.

        Raises:
            ReaderError: there is no room for so many ranges.
        """
        count = len(skips.ranges)
        if count > _MOST_RANGES:
            raise ReaderError(
                f"the state of a StatefulDataLoader's workers skips {count} ranges of batches, and "
                f"at most {_MOST_RANGES} can be shared with the main process: resume from a state "
                "of state_after"
            )
        self._told[1 : 1 + count] = torch.tensor(skips.ranges).reshape(-1, 2)
        self._told[0, 0] = count

    def _share_now(self) -> Share:
        """The share, without what the state of a worker leaves out."""
        count = int(self._told[0, 0])
        if count == 0:
            return self._share
        told = Skips.of(self._told[1 : 1 + count].tolist())
        return replace(self._share, skips=self._share.skips | told)

    def _stream(self, turn: tuple[int, int], state: Mapping[str, Any] | None = None) -> _Stream:
        batches = Batches(
            self._reader.folder,
            self._reader.manifest,
            self._share_now(),
            self._start,
            self._asked,
            self._columns,
            self._read_ahead if get_worker_info() is None else 0,
            self._pad,
            self._in_micro_batches,
            turn,
            self._convert,
        )
        stream = _Stream(batches, _Where(self._reader.manifest, batches.stand, turn))
        if state is not None:
            stream.load_state_dict(state)
        return stream

    def _goes_on(self) -> bool:
        """Whether the pass that begins is the first since a state was loaded.

        Worker processes are begun anew for each pass, all from one object: they tell a pass from
        the next by the seed that a loader draws for it, noted in memory that they share. A state
        that a worker loads itself is its own.
        """
        if self._loaded is None or self._loaded_here:
            return True
        worker = get_worker_info()
        noted, mark = int(self._shared[0]), 1 if worker is None else -1 - (worker.seed - worker.id)
        if noted == 0:
            self._shared[0] = mark
        return noted == 0 or (worker is not None and noted == mark)


def _raising(error: ReaderError) -> Iterator[Any]:
    # With the first batch: before that, an error in a worker keeps its loader from ending in time.
    raise error
    yield


@dataclass(frozen=True)
class _Where:
    """Where a stream stands, to be told also when it is gone."""

    manifest: Manifest
    stand: Stand
    turn: tuple[int, int]

    @property
    def worker(self) -> dict[str, int]:
        """What decides which batches a worker's turn has, besides where it stands."""
        return {"number": self.turn[0], "of": self.turn[1], "step": self.stand.share.stride}

    def state(self) -> dict[str, Any]:
        """The stream's state, which says so where it is that of one of several workers."""
        told = state(self.manifest, self.stand.share, self.stand.place)
        return told if self.turn[1] == 1 else {**told, "worker": self.worker}


class _Stream(Iterator[Any]):
    """A pass over a rank's batches, or over those of one worker's turn.

    The state of a worker's turn says so, and goes on in that turn alone; others go on anywhere.
    """

    def __init__(self, batches: Batches, where: _Where) -> None:
        self._batches = batches
        self.where = where

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return self.where.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "worker" not in state:
            self._batches.load_state_dict(state)
            return
        bare = {key: value for key, value in state.items() if key != "worker"}
        if state["worker"] != self.where.worker:
            raise ReaderError(
                f"the state is that of one of several DataLoader workers, {state['worker']}, and "
                f"does not go on in {self.where.worker}: a StatefulDataLoader needs as many "
                "workers as its state has, and with split='batches' as many ranks; a state of "
                "state_after does not"
            )
        recorded = Skips.of(bare.get("skip_batches", ()))
        if recorded | self._batches.asked != recorded:
            raise ReaderError(
                f"skip_batches asks for more than {list(recorded.ranges)}, which the state of a "
                "StatefulDataLoader's workers leaves out, and these stand at different batches: "
                "to skip more, resume from a state of state_after"
            )
        self._batches.load_state_dict(bare, own=True)


class MixedBatches(Dataset[Any]):
    """The batches of a finished mix by their number, as dicts of torch tensors.

    ``len`` is the mix's number of batches, ``[n]`` batch n, whole and in memory of its own. For
    ``DataLoader(batches, batch_size=None, sampler=..)``. The arguments and dicts are those of
    :class:`MixedShards`.

    Raises:
        ManifestError, ReaderError, ShardError: as MixedShards does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        pad: Mapping[str, object] | None = None,
        fill: Mapping[str, object] | None = None,
        collate: Collate | None = None,
    ) -> None:
        self._reader = ShardReader(path)
        names = _payload(self._reader, columns)
        self._decoder = Decoder(self._reader.folder, self._reader.manifest, names)
        self._convert = _Convert.of(self._reader, names, fill, collate)
        self._pad = None if pad is None else self._decoder.pad_values(pad, 0)

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, n: int) -> Any:
        n = batch_number(n, len(self))
        table = self._decoder.batch(n)
        # A row group is kept for the next call: what is done to these tensors must not reach it.
        part = Part(n, n, 0, 1, copied(table, np.arange(table.num_rows)))
        return self._convert(part if self._pad is None else padded(part, self._pad))


@dataclass(frozen=True)
class _Convert:
    """Makes of a rank's rows of a batch what a trainer is given."""

    fill: dict[str, pa.Scalar]
    collate: Collate | None

    @classmethod
    def of(
        cls,
        reader: ShardReader,
        columns: Sequence[str],
        fill: Mapping[str, object] | None,
        collate: Collate | None,
    ) -> _Convert:
        """Raises ReaderError where a value to fill with is none of its column."""
        if collate is not None and not callable(collate):
            raise ReaderError(f"collate must be a function of a batch, found {collate!r}")
        if fill is not None and not isinstance(fill, Mapping):
            raise ReaderError(
                f"fill must map names of columns to values, such as {{'score': 0}}, found {fill!r}"
            )
        scalars = {}
        for name, value in (fill or {}).items():
            if name not in columns:
                raise ReaderError(f"fill: no column {name!r}; asked for are {', '.join(columns)}")
            kind = reader.schema.field(name).type
            try:
                if value is None or pa.types.is_nested(kind):
                    raise TypeError("expected a value, for a column that is no list or struct")
                # Arrow would cut a fraction off.
                whole = integer("a value", value) if pa.types.is_integer(kind) else value
                scalars[name] = pa.scalar(whole, kind)
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                raise ReaderError(
                    f"fill: {value!r} is no value for column {name!r} of type {kind}: {error}"
                ) from error
        return cls(scalars, collate)

    def __call__(self, part: Part) -> Any:
        batch: dict[str, Any] = {MIX_BATCH: part.number}
        dense = part.rows if isinstance(part.rows, PaddedBatch) else None
        table = part.rows if dense is None else dense.table
        for name, column in zip(table.column_names, table.columns, strict=True):
            if name in self.fill:
                column = column.fill_null(self.fill[name])
            try:
                batch[name] = as_tensors(column)
            except NullError as error:
                way = "" if pa.types.is_nested(column.type) else f"fill={{{name!r}: ..}} or "
                raise ReaderError(
                    f"{part.cell(name, error.row)} is null or holds one, and a tensor cannot: "
                    f"use {way}columns= without it"
                ) from error
        if dense is not None:
            for name, values in dense.dense.items():
                lengths = torch.from_numpy(dense.lengths[name])
                batch[name] = Padded(torch.from_numpy(values), lengths)
        made = batch if self.collate is None else self.collate(batch)
        return Batch(made) if type(made) is dict and get_worker_info() is not None else made


def _payload(reader: ShardReader, columns: Sequence[str] | None) -> Sequence[str]:
    """The columns to decode: the number of the batch is known without its column."""
    names = checked_columns(columns, reader.manifest)
    return [name for name in names if name != MIX_BATCH]


def _turn() -> tuple[int, int]:
    """The number of this DataLoader worker, and of how many."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size, found where they are not given.

    Raises:
        ReaderError: only one of them is given, or the environment has only one, or no integers.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise ReaderError(
            f"rank {rank} and world_size {world_size}: give both, or neither to take them from "
            "torch.distributed or from RANK and WORLD_SIZE in the environment"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if found == (None, None):
        return 0, 1
    try:
        return int(found[0] or ""), int(found[1] or "")
    except ValueError:
        raise ReaderError(
            f"the environment has RANK={found[0]} and WORLD_SIZE={found[1]}, expected two integers "
            "or neither; give rank= and world_size="
        ) from None
