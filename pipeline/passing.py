"""A batch of tensors, and its way from a loader's worker to the process that trains."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import MixError
from .tensors import Padded, Ragged

_ALIGNMENT = 64
# So many batches of a sender lie in memory that is used again, if receivers hold as many at once.
_MOST_PIECES = 16
# A receiver that has not answered so many does not reach the sender's memory, or has yet to begin.
_MOST_GREETINGS = 32
_FREE, _TAKEN = 0, -1


class Batch(dict[str, Any]):
    """The columns of a batch by name.

    A dict in all but its way from one process to another: there all its tensors lie in one piece of
    shared memory, which is used again once the receiver has let go of them. A piece made for each
    batch would be cleared page by page, and its descriptor would cost a round trip.
    """


class PassingError(MixError, RuntimeError):
    """A batch that was received twice."""


class _Address(NamedTuple):
    """Where other processes find a piece, and the use of it that is meant."""

    process: int
    descriptor: int
    use: int


class _Piece(mmap.mmap):
    """Shared memory that begins with a note: the use it is offered for, or taken, or free.

    A sender offers what is free; a receiver takes what is offered, and frees it when its last
    tensor is gone. So one of them at a time has the say.
    """

    _taker = 0

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
                "a batch was received twice, and its memory may hold another by now: receive each "
                "that was sent once, or send dict(batch)"
            )
        piece.note, piece._taker = _TAKEN, os.getpid()
        return piece

    @property
    def note(self) -> int:
        return int.from_bytes(self[:8], "little", signed=True)

    @note.setter
    def note(self, value: int) -> None:
        self[:8] = value.to_bytes(8, "little", signed=True)

    def tensor(self, size: int) -> torch.Tensor:
        """So many bytes behind the note, which keep the piece."""
        return torch.frombuffer(self, dtype=torch.uint8, count=size, offset=_ALIGNMENT)

    def __del__(self) -> None:
        if self._taker == os.getpid():  # a forked process inherits the piece, but has no say
            self.note = _FREE


class _Pool:
    """The pieces that this process sends batches in.

    The first holds none: its address goes with the first batches as a greeting, and once a receiver
    has freed it, receivers are known to reach this process's memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # every queue sends in a thread of its own
        self._descriptors: list[int] = []
        self._pieces: list[_Piece] = []
        self._uses = 0
        self._greetings = 0
        self._answered = False

    def offer(self, size: int) -> tuple[_Piece | None, _Address | None]:
        """A piece with room for so many bytes, with its address.

        Without a piece there may be the greeting's; if not, there is neither: receivers do not
        answer, all pieces are in use, or none can be made.
        """
        if sys.platform != "linux":
            return None, None
        with self._lock, contextlib.suppress(OSError):  # a sandbox may forbid what makes pieces
            free = [i for i, piece in enumerate(self._pieces) if piece.note == _FREE]
            self._answered = self._answered or bool(free)
            if not self._answered:
                return None, self._greeting()
            fit = [i for i in free if len(self._pieces[i]) >= _ALIGNMENT + size]
            number = (fit or free or [len(self._pieces)])[0]
            if number < _MOST_PIECES:
                if not fit:
                    self._make(number, size)
                return self._pieces[number], self._offered(number)
        return None, None

    def _greeting(self) -> _Address | None:
        self._greetings += 1
        if self._greetings > _MOST_GREETINGS:
            return None
        if not self._pieces:
            self._make(0, 0)
            return self._offered(0)
        return _Address(os.getpid(), self._descriptors[0], self._uses)

    def _offered(self, number: int) -> _Address:
        self._uses += 1
        self._pieces[number].note = self._uses
        return _Address(os.getpid(), self._descriptors[number], self._uses)

    def _make(self, number: int, size: int) -> None:
        """A new piece in a place, with room for larger batches: what none fills is no memory."""
        descriptor = os.memfd_create("mixshards-batch")
        try:
            os.ftruncate(descriptor, 1 << (_ALIGNMENT + size - 1).bit_length())
            piece = _Piece(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        for old in self._descriptors[number : number + 1]:
            os.close(old)
        self._descriptors[number : number + 1] = [descriptor]
        self._pieces[number : number + 1] = [piece]


_pool = _Pool()


def _begin_anew() -> None:
    global _pool
    _pool = _Pool()


# A forked process would send in its parent's pieces.
os.register_at_fork(after_in_child=_begin_anew)


def _reduced(batch: Batch) -> tuple[Any, ...]:
    tensors: list[torch.Tensor] = []
    columns = {name: _taken_out(value, tensors) for name, value in batch.items()}
    places, end = [], 0
    for tensor in tensors:
        places.append((end, end + tensor.nbytes, tensor.dtype, tensor.shape))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Nothing goes into an empty piece.
    piece, address = _pool.offer(end) if end else (None, None)
    octets = torch.empty(end, dtype=torch.uint8) if piece is None else piece.tensor(end)
    for tensor, place in zip(tensors, places, strict=True):
        _view(octets, *place).copy_(tensor)
    if piece is not None:
        return _sent_in_piece, (columns, places, end, address)
    if address is not None:
        return _sent_with_greeting, (columns, places, octets.numpy(), address)
    return _rejoined, (columns, places, octets)  # torch sends it in shared memory made for it


def _sent_with_greeting(
    columns: dict[str, Any], places: Sequence[Any], octets: NDArray[np.uint8], greeting: _Address
) -> Batch:
    with contextlib.suppress(OSError, PassingError):
        _Piece.taken(greeting)  # and let go at once, which answers it
    return _rejoined(columns, places, torch.from_numpy(octets))


def _sent_in_piece(
    columns: dict[str, Any], places: Sequence[Any], size: int, address: _Address
) -> Batch:
    return _rejoined(columns, places, _Piece.taken(address).tensor(size))


def _rejoined(columns: dict[str, Any], places: Sequence[Any], octets: torch.Tensor) -> Batch:
    tensors = iter([_view(octets, *place) for place in places])
    return Batch({name: _put_back(value, tensors) for name, value in columns.items()})


def _view(
    octets: torch.Tensor, start: int, stop: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    return octets[start:stop].view(dtype).reshape(shape)


class _Here(NamedTuple):
    """Stands where a tensor was."""


def _taken_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A column without its tensors, which go to the list in the order of ``_put_back``."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
        tensors.append(value)
        return _Here()
    if isinstance(value, Ragged | Padded):
        return type(value)(*(_taken_out(part, tensors) for part in value))
    if type(value) is dict:
        return {name: _taken_out(part, tensors) for name, part in value.items()}
    return value


def _put_back(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, _Here):
        return next(tensors)
    if isinstance(value, Ragged | Padded):
        return type(value)(*(_put_back(part, tensors) for part in value))
    if type(value) is dict:
        return {name: _put_back(part, tensors) for name, part in value.items()}
    return value


ForkingPickler.register(Batch, _reduced)
