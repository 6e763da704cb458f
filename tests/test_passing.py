"""Batches on their way between processes: whole, in memory that is used again, never too early."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from pipeline.passing import Batch, PassingError  # noqa: E402
from pipeline.tensors import Padded, Ragged  # noqa: E402

linux = pytest.mark.skipif(sys.platform != "linux", reason="pieces need Linux")


def _batch() -> Batch:
    return Batch(
        {
            "mix_batch": 7,
            "text": ["a", None],
            "label": torch.arange(3, dtype=torch.int16),
            "none": torch.empty(0, 4),
            "flag": torch.tensor([True, False]),
            "ragged": Ragged(Ragged(torch.arange(2.0), torch.tensor([0, 2])), torch.tensor([0, 1])),
            "padded": Padded(torch.ones(2, 3, 4, dtype=torch.float16), torch.tensor([3, 1])),
            "box": {"x": torch.arange(5, dtype=torch.uint8), "name": ["n"]},
            "column": torch.arange(6).reshape(2, 3).T,
        }
    )


def _numbers(n: int, size: int = 1000) -> Batch:
    return Batch(n=n, x=torch.full((size,), n))


def _received(batch: Batch) -> Any:
    return pickle.loads(ForkingPickler.dumps(batch))


def _tensors(value: Any) -> list[Any]:
    """The tensors within a value that hold anything."""
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if isinstance(value, str | int | None):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in _tensors(part)]


def _pieces() -> set[int]:
    """The pieces that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "mixshards-batch" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


class _Source(IterableDataset):  # type: ignore[misc]
    """Batches of a size each, or of the sizes given."""

    def __init__(self, count: int, sizes: tuple[int, ...] = (1000,)) -> None:
        self.count, self.sizes = count, sizes

    def __iter__(self) -> Iterator[Batch]:
        for n in range(self.count):
            yield _numbers(n, self.sizes[n % len(self.sizes)])


def test_a_batch_arrives_as_it_was_sent_in_one_piece_of_memory() -> None:
    batch = _batch()
    for _ in range(5):
        received = _received(batch)
        assert type(received) is Batch
        assert str(received) == str(batch)
        assert len({tensor.untyped_storage().data_ptr() for tensor in _tensors(received)}) == 1
        assert received["padded"].values.dtype == torch.float16
    assert not any(tensor.data_ptr() % 64 for tensor in _tensors(received))


def test_tensors_that_torch_may_have_to_track_stay_what_they_are() -> None:
    for _ in range(3):
        assert _received(Batch(learned=torch.ones(2, requires_grad=True)))["learned"].requires_grad


def test_a_batch_without_numbers_arrives_too() -> None:
    for batch in (Batch(), Batch(text=["a"]), Batch(none=torch.empty(0, 4), text=[])):
        assert str(_received(batch)) == str(batch)


def test_a_batch_is_a_dict_everywhere_else() -> None:
    batch = _batch()
    for other in (copy.copy(batch), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert isinstance(other, dict)
        assert str(other) == str(batch)


@linux
def test_what_was_let_go_of_is_used_again() -> None:
    for n in range(100):
        received = _received(_numbers(n))
        assert received["x"].tolist() == [n] * 1000
        del received
    assert len(_pieces()) <= 2


@linux
def test_memory_grows_with_the_batches_and_is_not_kept_twice() -> None:
    for n in range(60):
        size = 1000 * (n + 1)
        assert _received(_numbers(n, size))["x"].tolist() == [n] * size
    assert len(_pieces()) <= 2


@pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (3, "fork"), (2, "spawn")])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_are_kept_are_never_written_over(workers: int, context: str) -> None:
    loader = DataLoader(
        _Source(60, (1000, 5000, 10)),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
    )
    kept = []
    for batch in loader:
        # Some wholly, some a part of them, some in another guise, and some not at all.
        x = batch["x"]
        kept.append((batch["n"], [x, x[3:7], x.numpy()[:5], None][batch["n"] % 4]))
        del batch, x
    assert len(kept) == 60 * workers
    for n, part in kept:
        assert part is None or set(part.tolist()) == {n}


def test_writing_into_a_batch_reaches_no_later_one() -> None:
    loader = DataLoader(_Source(30), batch_size=None, num_workers=1)
    for n, batch in enumerate(loader):
        assert batch["x"].tolist() == [n] * 1000
        batch["x"] += 1000
        batch["x"].mul_(2)


@linux
def test_a_second_reception_is_refused() -> None:
    _received(_numbers(0))
    sent = ForkingPickler.dumps(_numbers(1))
    assert pickle.loads(sent)["n"] == 1
    with pytest.raises(PassingError, match=r"received twice.*or send dict\(batch\)"):
        pickle.loads(sent)


@linux
def test_a_process_forked_by_the_receiver_frees_nothing() -> None:
    _received(_numbers(0))
    held = _received(_numbers(1))
    child = os.fork()
    if child == 0:
        del held
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for n in range(2, 40):
        _received(_numbers(n))
    assert held["x"].tolist() == [1] * 1000


def _send_in_a_fork() -> None:
    inherited = _pieces()
    assert inherited
    for n in range(100, 109):
        assert _received(_numbers(n))["x"].tolist() == [n] * 1000
    assert _pieces() - inherited


@linux
def test_a_process_forked_by_the_sender_sends_in_memory_of_its_own() -> None:
    _received(_numbers(0))
    held = [_received(_numbers(n)) for n in range(3)]
    _received(_numbers(3))  # leaves a free one, too
    child = multiprocessing.get_context("fork").Process(target=_send_in_a_fork)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert [batch["x"].tolist() for batch in held] == [[n] * 1000 for n in range(3)]


def test_threads_may_send_at_the_same_time() -> None:
    wrong: list[int] = []

    def send(first: int) -> None:
        for n in range(first, first + 200):
            if _received(_numbers(n))["x"].tolist() != [n] * 1000:
                wrong.append(n)

    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@linux
def test_where_a_sender_is_not_found_or_may_not_share_torch_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = """
        import os, pickle
        from multiprocessing.reduction import ForkingPickler
        import torch
        from pipeline.passing import Batch

        def forbidden(*arguments):
            raise PermissionError("not in this sandbox")

        {setting}
        for n in range(40):
            x = pickle.loads(ForkingPickler.dumps(Batch(x=torch.full((9,), n))))["x"]
            assert x.tolist() == [n] * 9
        assert x.untyped_storage().is_shared()
        """
    # As where sender and receiver are numbered apart, and where the system call is forbidden.
    for setting in ("os.getpid = lambda: 2**22 + 1", "os.memfd_create = forbidden"):
        program = textwrap.dedent(code).format(setting=setting)
        subprocess.run([sys.executable, "-c", program], check=True)


@linux
def test_no_more_than_a_few_batches_of_a_worker_are_kept_for_use_again() -> None:
    held = [_received(_numbers(n)) for n in range(50)]
    assert len(_pieces()) <= 16
    assert [int(batch["x"][0]) for batch in held] == list(range(50))


@linux
def test_a_small_shared_memory_folder_is_enough_for_large_batches() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mounting needs more rights")
    program = """
        from torch.utils.data import DataLoader
        from tests.test_passing import _Source

        for batch in DataLoader(_Source(12, (400_000,)), batch_size=None, num_workers=2):
            assert batch["x"].min() == batch["x"].max() == batch["n"]
        """
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", small, sys.executable, textwrap.dedent(program)]
    subprocess.run(command, check=True, timeout=60)


def test_a_batch_held_to_the_end_of_the_process_makes_no_noise() -> None:
    program = """
        import torch
        from torch.utils.data import DataLoader
        from tests.test_passing import _Source

        batches = iter(DataLoader(_Source(50), batch_size=None, num_workers=2))
        held = [next(batches) for _ in range(20)]
        kept = held[5]["x"].numpy()
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_received_batch_may_be_sent_on() -> None:
    for n in range(20):
        received = _received(_numbers(n))
        onward = _received(received)
        del received
        assert onward["x"].numpy().tolist() == np.full(1000, n).tolist()
