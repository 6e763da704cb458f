"""A batch of tensors, and its way from a loader's worker to the process that trains."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import torch

from .errors import MixError
from .tensors import Padded, Ragged

_ALIGNMENT = 64
# What is no larger goes with the message, in memory of its own: kept, it keeps nothing else.
_SMALL = 8192
# So many batches of a sender lie in memory that is used again, if receivers hold as many at once.
_MOST_PIECES = 16
# A receiver that has not answered so many does not reach the sender's memory, or has yet to begin.
_MOST_GREETINGS = 32
_FREE, _TAKEN, _LEFT = 0, -1, -2


class Batch(dict[str, Any]):
    """The columns of a batch by name, as a worker sends them; they arrive as a dict.

    Its tensors go in one piece of shared memory, which is used again once the receiver has let go
    of them. A piece made for each batch would be cleared page by page, and its descriptor would
    cost a round trip.
    """


class PassingError(MixError, RuntimeError):
    """A batch that was received twice."""


class _Address(NamedTuple):
    """Where other processes find a piece, and the use of it that is meant."""

    process: int
    descriptor: int
    use: int


class _Piece(mmap.mmap):
    """Shared memory that begins with a note: the use it is offered for, or taken, free, or left.

    A sender offers what is free; a receiver takes what is offered, and frees it when its last
    tensor is gone. So one of them at a time has the say. A receiver that forks leaves it for good.
    """

    _descriptor = -1
    _taker = 0
    _held: ClassVar[weakref.WeakSet[_Piece]] = weakref.WeakSet()

    @classmethod
    def made(cls, size: int) -> _Piece:
        """A free one, with room for larger batches: what none fills takes no memory."""
        descriptor = os.memfd_create("mixshards-batch")
        try:
            os.ftruncate(descriptor, 1 << (_ALIGNMENT + size - 1).bit_length())
            piece = cls(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        piece._descriptor = descriptor
        weakref.finalize(piece, os.close, descriptor)
        return piece

    @classmethod
    def taken(cls, address: _Address) -> _Piece:
        """A piece that was offered.

        Raises:
            OSError: this process does not reach the sender's memory.
            PassingError: it was taken before.
        """
        descriptor = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDWR)
        try:
            piece = cls(descriptor, 0)
        finally:
            os.close(descriptor)
        if piece.note != address.use:
            raise PassingError(
                "a batch was received twice, and its memory may hold another by now: unpickle what "
                "was sent once, or send dict(batch)"
            )
        piece.note, piece._taker = _TAKEN, os.getpid()
        cls._held.add(piece)
        return piece

    @classmethod
    def leave_all(cls) -> None:
        """Never free what is held now, since a process that is forked will hold it, too."""
        for piece in list(cls._held):
            piece.note, piece._taker = _LEFT, 0

    def address(self, use: int) -> _Address:
        return _Address(os.getpid(), self._descriptor, use)

    @property
    def note(self) -> int:
        return int.from_bytes(self[:8], "little", signed=True)

    @note.setter
    def note(self, value: int) -> None:
        self[:8] = value.to_bytes(8, "little", signed=True)

    def __del__(self) -> None:
        if self._taker == os.getpid():
            self.note = _FREE


class _Pool:
    """The pieces that this process sends batches in.

    The first holds none: its address goes with the first batches as a greeting, and once a receiver
    has freed it, receivers are known to reach this process's memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # every queue sends in a thread of its own
        self._pieces: list[_Piece] = []
        self._uses = 0
        self._greetings = 0

    def offer(self, size: int) -> tuple[_Piece | None, _Address | None]:
        """A piece with room for so many bytes, with its address.

        Without a piece there may be the greeting's; if not, there is neither: receivers do not
        answer, all pieces are in use, or none can be made.
        """
        if sys.platform != "linux":
            return None, None
        with self._lock, contextlib.suppress(OSError):  # a sandbox may forbid what makes pieces
            notes = [piece.note for piece in self._pieces]
            free = [i for i, note in enumerate(notes) if note in (_FREE, _LEFT)]
            if not free and self._uses < 2:  # none but the greeting was sent, nor is it answered
                return None, self._greeting()
            least = _ALIGNMENT + size
            fit = [i for i in free if notes[i] == _FREE and len(self._pieces[i]) >= least]
            number = (fit or free or [len(self._pieces)])[0]
            if number < _MOST_PIECES:
                if not fit:
                    self._pieces[number : number + 1] = [_Piece.made(size)]
                return self._pieces[number], self._offered(number)
        return None, None

    def _greeting(self) -> _Address | None:
        self._greetings += 1
        if self._greetings > _MOST_GREETINGS:
            return None
        if not self._pieces:
            self._pieces.append(_Piece.made(0))
            return self._offered(0)
        return self._pieces[0].address(self._uses)

    def _offered(self, number: int) -> _Address:
        self._uses += 1
        self._pieces[number].note = self._uses
        return self._pieces[number].address(self._uses)


_pool = _Pool()


def _begin_anew() -> None:
    global _pool
    _pool = _Pool()


# A forked process would send in its parent's pieces.
os.register_at_fork(before=_Piece.leave_all, after_in_child=_begin_anew)


class _Region:
    """The part of a storage that tensors of a batch lie in, from octet ``start`` to ``stop``."""

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self._storage = storage
        self.start, self.stop = storage.nbytes(), 0

    def add(self, tensor: torch.Tensor) -> None:
        first = int(tensor.storage_offset())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        past = first + sum((length - 1) * stride for length, stride in steps) + 1
        # Tensors find their place again by a number of elements, whatever the size of these.
        self.start = min(self.start, first * tensor.itemsize // _ALIGNMENT * _ALIGNMENT)
        self.stop = max(self.stop, past * tensor.itemsize)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def room(self) -> int:
        """What it takes in a piece."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT if self.size > _SMALL else 0

    def octets(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self._storage, self.start, (self.size,), (1,))


class _Place(NamedTuple):
    """Stands where a tensor was, and tells where it lies."""

    region: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _reduced(batch: Batch) -> tuple[Any, ...]:
    regions: dict[tuple[int, int], _Region] = {}
    columns = {name: _taken_out(value, regions) for name, value in batch.items()}
    room = sum(region.room for region in regions.values())
    piece, address = _pool.offer(room) if room else (None, None)
    if room and address is None:
        return dict, (dict(batch),)  # as torch sends tensors, each in shared memory made for it
    # Of each region where it began, its size, and its octets or where in the piece they are.
    parts: list[tuple[int, int, bytearray | int]] = []
    end = _ALIGNMENT
    for region in regions.values():
        octets = region.octets()
        if piece is None or not region.room:
            parts.append((region.start, region.size, bytearray(octets.numpy())))
        else:
            _octets(piece, end, region.size).copy_(octets)
            parts.append((region.start, region.size, end))
            end += region.room
    return _rejoined, (columns, parts, address, piece is None)


def _rejoined(
    columns: dict[str, Any],
    parts: Sequence[tuple[int, int, bytearray | int]],
    address: _Address | None,
    greeting: bool,
) -> dict[str, Any]:
    piece = None
    if greeting and address is not None:
        with contextlib.suppress(OSError, PassingError):
            _Piece.taken(address)  # and let go at once, which answers it
    elif address is not None:
        piece = _Piece.taken(address)
    storages = []
    for start, size, held in parts:
        octets = _octets(piece, held, size) if isinstance(held, int) else _octets(held, 0, size)
        storages.append((start, octets.untyped_storage()))
    return {name: _put_back(value, storages) for name, value in columns.items()}


def _octets(buffer: Any, start: int, size: int) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)


def _taken_out(value: Any, regions: dict[tuple[int, int], _Region]) -> Any:
    """A column with places instead of its tensors, whose regions are added."""
    if _is_plain(value):
        value = value.resolve_conj().resolve_neg()  # which memory does not tell
        storage = value.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        region = regions.setdefault(key, _Region(len(regions), storage))
        region.add(value)
        layout = value.storage_offset(), tuple(value.shape), value.stride()
        return _Place(region.number, value.dtype, *layout)
    if isinstance(value, Ragged | Padded):
        return type(value)(*(_taken_out(part, regions) for part in value))
    if type(value) is dict:
        return {name: _taken_out(part, regions) for name, part in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor with numbers in memory, and with nothing to it but these."""
    return bool(
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel()
        and not (value.requires_grad or value.is_quantized)
    )


def _put_back(value: Any, storages: Sequence[tuple[int, torch.UntypedStorage]]) -> Any:
    if isinstance(value, _Place):
        start, storage = storages[value.region]
        offset = value.offset - start // value.dtype.itemsize
        return torch.empty(0, dtype=value.dtype).set_(storage, offset, value.shape, value.stride)
    if isinstance(value, Ragged | Padded):
        return type(value)(*(_put_back(part, storages) for part in value))
    if type(value) is dict:
        return {name: _put_back(part, storages) for name, part in value.items()}
    return value


ForkingPickler.register(Batch, _reduced)
