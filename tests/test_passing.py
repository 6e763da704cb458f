"""Batches on their way between processes: whole, in memory that is used again, never too early."""

from __future__ import annotations

import copy
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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from pipeline import passing  # noqa: E402
from pipeline.passing import Batch, PassingError  # noqa: E402
from pipeline.tensors import Padded, Ragged  # noqa: E402

SIZE = 2000  # more than what goes with the message
linux = pytest.mark.skipif(sys.platform != "linux", reason="pieces need Linux")


@pytest.fixture(autouse=True)
def _no_pieces() -> None:
    passing._begin_anew()


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


def _numbers(n: int, size: int = SIZE) -> Batch:
    return Batch(n=n, x=torch.full((size,), n))


def _received(batch: Batch) -> Any:
    return pickle.loads(ForkingPickler.dumps(batch))


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

    def __init__(self, count: int, sizes: tuple[int, ...] = (SIZE,)) -> None:
        self.count, self.sizes = count, sizes

    def __iter__(self) -> Iterator[Batch]:
        for n in range(self.count):
            yield _numbers(n, self.sizes[n % len(self.sizes)])


def test_a_batch_arrives_as_it_was_sent_in_a_dict() -> None:
    batch = _batch()
    for _ in range(5):
        received = _received(batch)
        assert type(received) is dict
        assert str(received) == str(dict(batch))
        assert received["padded"].values.dtype == torch.float16
        assert received["column"].stride() == batch["column"].stride()


@pytest.mark.parametrize("size", [3, 5000])
def test_what_shares_memory_does_so_again_and_nothing_else(size: int) -> None:
    x = torch.arange(2 * size).reshape(2, size)
    batch = Batch(
        inputs=x[:, :-1],
        targets=x[:, 1:],
        octets=x.view(torch.uint8)[0],
        shifted=torch.arange(size + 9)[9:],
        wide=torch.ones(1).expand(size),
    )
    for _ in range(3):
        received = _received(batch)
        assert {name: t.tolist() for name, t in received.items()} == {
            name: t.tolist() for name, t in batch.items()
        }
        received["inputs"][0, 1] = -7
        assert received["targets"][0, 0] == -7
        assert received["octets"][8:16].tolist() == [249] + [255] * 7
        assert len({t.untyped_storage().data_ptr() for t in received.values()}) == 3
        assert received["shifted"].untyped_storage().nbytes() <= size * 8 + 64
        received["inputs"][0, 1] = 1


def test_tensors_over_one_place_with_ends_of_their_own_arrive() -> None:
    numbers = np.arange(5000)
    batch = Batch(part=torch.from_numpy(numbers[:3000]), whole=torch.from_numpy(numbers))
    for _ in range(3):
        received = _received(batch)
        assert received["part"].tolist() == numbers[:3000].tolist()
        assert received["whole"].tolist() == numbers.tolist()


def test_a_small_column_keeps_nothing_else_in_memory(tmp_path: Path) -> None:
    kept = [_received(Batch(n=torch.tensor([n]), x=torch.full((50_000,), n))) for n in range(9)]
    if sys.platform == "linux":
        assert len(_pieces()) == 8  # the first one came with the greeting
        kept = [batch["n"] for batch in kept]
        passing._begin_anew()
        assert len(_pieces()) == 0
    torch.save(kept, tmp_path / "kept")
    assert (tmp_path / "kept").stat().st_size < 20_000


def test_a_received_batch_can_be_saved_and_loaded(tmp_path: Path) -> None:
    for n in range(3):
        received = _received(Batch(x=torch.full((9000,), n), y=torch.full((9000,), n / 2)))
    torch.save(received, tmp_path / "batch")
    loaded = torch.load(tmp_path / "batch")
    assert str(loaded) == str(received)


def test_tensors_that_torch_may_have_to_track_stay_what_they_are() -> None:
    for _ in range(3):
        assert _received(Batch(learned=torch.ones(2, requires_grad=True)))["learned"].requires_grad


def test_a_batch_without_numbers_arrives_too() -> None:
    for batch in (Batch(), Batch(text=["a"]), Batch(none=torch.empty(0, 4), text=[])):
        assert str(_received(batch)) == str(batch)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_tensors_of_any_kind_arrive() -> None:
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(5),
        "brain": torch.ones(5000, dtype=torch.bfloat16),
    }
    for _ in range(3):
        assert str(_received(Batch(kinds))) == str(kinds)


def test_a_batch_is_a_dict_until_it_is_sent() -> None:
    batch = _batch()
    for other in (copy.copy(batch), pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert isinstance(other, dict)
        assert str(other) == str(batch)


@linux
def test_large_columns_lie_in_one_piece_and_aligned() -> None:
    batch = Batch({str(n): torch.full((SIZE + n,), n, dtype=torch.float64) for n in range(9)})
    _received(batch)
    held = [_received(batch) for _ in range(3)]
    assert len(_pieces()) == 3
    assert not any(tensor.data_ptr() % 64 for received in held for tensor in received.values())


@linux
def test_what_was_let_go_of_is_used_again() -> None:
    for n in range(100):
        received = _received(_numbers(n))
        assert received["x"].tolist() == [n] * SIZE
        del received
    assert len(_pieces()) <= 2


@linux
def test_memory_grows_with_the_batches_and_is_not_kept_twice() -> None:
    for n in range(60):
        size = SIZE * (n + 1)
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
        assert batch["x"].tolist() == [n] * SIZE
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
def test_a_process_forked_by_the_receiver_keeps_what_it_was_given_and_frees_nothing() -> None:
    _received(_numbers(0))
    for n in range(1, 30):
        held = _received(_numbers(n))
        go, gone = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gone)
            os.read(go, 1)  # until the parent has let go
            os._exit(0 if held["x"].tolist() == [n] * SIZE else 1)
        del held
        for other in range(5):
            _received(_numbers(100 + other))
        os.close(gone)
        assert os.waitpid(child, 0)[1] == 0
        os.close(go)
    assert len(_pieces()) <= 3


def _send_in_a_fork() -> None:
    inherited = _pieces()
    assert inherited
    for n in range(100, 109):
        assert _received(_numbers(n))["x"].tolist() == [n] * SIZE
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
    assert [batch["x"].tolist() for batch in held] == [[n] * SIZE for n in range(3)]


def test_threads_may_send_at_the_same_time() -> None:
    wrong: list[int] = []

    def send(first: int) -> None:
        for n in range(first, first + 200):
            if _received(_numbers(n))["x"].tolist() != [n] * SIZE:
                wrong.append(n)

    threads = [threading.Thread(target=send, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
@linux
def test_where_a_sender_is_not_found_or_may_not_share_torch_sends() -> None:
    code = """
        import os, pickle
        from multiprocessing.reduction import ForkingPickler
        import torch
        from pipeline.passing import Batch

        def forbidden(*arguments):
            raise PermissionError("not in this sandbox")

        {setting}
        for n in range(40):
            x = pickle.loads(ForkingPickler.dumps(Batch(x=torch.full((2000,), n))))["x"]
            assert x.tolist() == [n] * 2000
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
        assert onward["x"].numpy().tolist() == np.full(SIZE, n).tolist()
