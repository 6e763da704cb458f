"""A language model trained from a mix by several processes, which die and come back as others.

    _train_lm.py train MIX RUN --ranks R    train with R processes, or go on from RUN's checkpoint
    _train_lm.py compare MIX RUN RUN        did two runs learn the mix's batches, and the same?

The model is a small causal transformer over bytes; gloo joins the processes on this machine. A
run's folder holds ``checkpoint.pt``, replaced in one step, and ``steps.log``: a line a start, and
one a step. A step's line begins with its batch, and ends with its loss once it is done.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from pipeline.reader import ShardReader
from pipeline.torch import MixedShards

PROVENANCE = ["mix_dataset", "mix_row", "mix_epoch"]
NO_BYTE = 256  # stands before a text and behind its end
ROUNDING = 1e-5  # share of a loss: another number of ranks adds floats up in another order
DRIFT = 1e-2  # share of a loss: what that comes to in later steps

Row = tuple[str, int, int]


@dataclass(frozen=True)
class Options:
    """How a run is trained, the same for all its ranks."""

    mix: str
    run: Path
    ranks: int
    context: int
    width: int
    layers: int
    workers: int
    checkpoint_every: int
    pause: float


class ByteModel(nn.Module):
    """Which byte comes next: symbols [texts, context] to logits [texts, context, 256]."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(NO_BYTE + 1, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.logits = nn.Linear(width, NO_BYTE)
        past = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("past", past, persistent=False)

    def forward(self, symbols: Tensor) -> Tensor:
        hidden = self.symbols(symbols) + self.places
        logits: Tensor = self.logits(self.blocks(hidden, mask=self.past, is_causal=True))
        return logits


@dataclass(frozen=True)
class Collate:
    """A batch's texts as symbols, int64 [rows, 1 + context], and where its rows came from."""

    context: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        symbols = torch.full((len(batch["text"]), 1 + self.context), NO_BYTE)
        for row, text in enumerate(batch["text"]):
            found = bytearray(text.encode()[: self.context])  # no text is empty
            symbols[row, 1 : 1 + len(found)] = torch.frombuffer(found, dtype=torch.uint8)
        rows, epochs = batch["mix_row"].tolist(), batch["mix_epoch"].tolist()
        came_from = list(zip(batch["mix_dataset"], rows, epochs, strict=True))
        return {"number": batch["mix_batch"], "symbols": symbols, "rows": came_from}


def digest_of(rows: list[Row]) -> str:
    """Tells whether two batches hold the same rows of the same datasets in the same order."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def global_batch(share: list[Row]) -> list[Row]:
    """The rows of all ranks in the order of the global batch, at rank 0; elsewhere nothing."""
    ranks = dist.get_world_size()
    shares: list[list[Row]] | None = [[]] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(share, shares)
    shares = shares or []
    whole = [row for rows in shares for row in rows]
    for rank, rows in enumerate(shares):
        whole[rank::ranks] = rows  # rank r of R takes rows r, r + R, ..
    return whole


def learn(
    model: ByteModel, optimizer: torch.optim.Optimizer, symbols: Tensor, pause: float
) -> float:
    """A step on the global batch, of which this rank has ``symbols``; the loss in nats a byte."""
    seen, following = symbols[:, :-1], symbols[:, 1:]
    loss = nn.functional.cross_entropy(
        model(seen).flatten(0, 1), following.flatten(), ignore_index=NO_BYTE, reduction="sum"
    )
    optimizer.zero_grad()
    loss.backward()
    time.sleep(pause)
    # Sums over all ranks, then one division: a mean of the ranks' means would give more weight to
    # the bytes of a rank whose texts are short, and so change with the number of ranks.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    own = torch.stack([loss.detach(), (following != NO_BYTE).sum()])
    sums = torch.cat([parameters_to_vector(gradients), own])
    dist.all_reduce(sums)
    means = sums[:-1] / sums[-1]
    vector_to_parameters(means[:-1], gradients)
    optimizer.step()
    return float(means[-1])


def save(path: Path, saved: dict[str, Any]) -> None:
    """Replace the checkpoint in one step, so that there is a whole one whenever we are killed."""
    scratch = path.with_suffix(".part")
    with scratch.open("wb") as file:
        torch.save(saved, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def train_rank(rank: int, options: Options, meeting: Path) -> None:
    """Train to the end of the mix as one of several processes, from the checkpoint if there is."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group("gloo", meeting.as_uri(), rank=rank, world_size=options.ranks)

    model = ByteModel(options.context, options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Which rank of how many this is, the mix asks torch.distributed.
    collate = Collate(options.context)
    mix = MixedShards(options.mix, columns=["text", *PROVENANCE], collate=collate)
    checkpoint = options.run / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        mix.load_state_dict(saved["mix"])
        first = saved["mix"]["next_batch"]
    last = first + len(mix) - 1

    heard = options.run / "steps.log" if rank == 0 else Path(os.devnull)
    with heard.open("a") as log:
        print(f"\nstart {first} {options.ranks}", file=log, flush=True)
        if rank == 0:
            print(f"processes: {options.ranks}, from batch {first}", flush=True)
        for batch in DataLoader(mix, batch_size=None, num_workers=options.workers):
            number = batch["number"]
            digest = digest_of(global_batch(batch["rows"]))
            print(number, digest, end=" ", file=log, flush=True)
            loss = learn(model, optimizer, batch["symbols"], options.pause)
            print(loss.hex(), file=log, flush=True)
            if rank == 0 and ((number + 1) % options.checkpoint_every == 0 or number == last):
                found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(checkpoint, {**found, "mix": mix.state_after(number)})
            if rank == 0 and (number % (last // 6 + 1) == 0 or number == last):
                print(f"batch {number:5,}  loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


def train(options: Options) -> None:
    """Start the ranks, and wait for them."""
    options.run.mkdir(parents=True, exist_ok=True)
    meeting = (options.run / "meeting").resolve()
    meeting.unlink(missing_ok=True)  # of ranks that were killed
    importlib.import_module("torch._dynamo")  # optimizers do: here once, where ranks are forked
    method = mp.get_start_method()
    mp.start_processes(train_rank, (options, meeting), options.ranks, start_method=method)
    meeting.unlink(missing_ok=True)


@dataclass(frozen=True)
class Step:
    """A step as a run's log has it; the loss is NaN where the run died in the middle of it."""

    digest: str
    loss: float
    ranks: int


UNDONE = Step("", math.nan, 0)


@dataclass
class History:
    """What went into a run's model, by batch, and what was lost when it was killed."""

    run: Path
    learned: dict[int, Step] = field(default_factory=dict)
    lost: list[tuple[int, Step]] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, run: Path) -> History:
        """Read a log; a start forgets what lies past the checkpoint, as the model did."""
        history = cls(run)
        for line in (run / "steps.log").read_text().splitlines():
            words = line.split()
            if words[:1] == ["start"]:
                first, ranks = map(int, words[1:])
                history.starts.append((first, ranks))
                gone = [number for number in history.learned if number >= first]
                history.lost += [(number, history.learned.pop(number)) for number in gone]
            elif words:
                number = int(words[0])
                if number in history.learned:
                    raise SystemExit(f"error: {run}: batch {number} went into the model twice")
                loss = float.fromhex(words[2]) if len(words) > 2 else math.nan
                history.learned[number] = Step(words[1], loss, history.starts[-1][1])
        return history

    def batches(self) -> list[tuple[int, str]]:
        """The number and digest of each batch, in the order in which they were learned."""
        return [(number, step.digest) for number, step in self.learned.items()]

    def __str__(self) -> str:
        ranks = ", then ".join(f"{ranks} from batch {first}" for first, ranks in self.starts)
        halves = [f"step {number}" for number, step in self.lost if math.isnan(step.loss)]
        killed = f"; killed in the middle of {' and '.join(halves)}" if halves else ""
        return f"{self.run}: {len(self.learned)} steps, processes: {ranks}{killed}"


def model_digest(run: Path) -> str:
    """Equal for models that are equal to the last bit."""
    digest = hashlib.sha256()
    for weights in torch.load(run / "checkpoint.pt")["model"].values():
        digest.update(weights.numpy().tobytes())
    return digest.hexdigest()[:16]


def mix_digests(mix: str) -> list[tuple[int, str]]:
    """Every batch of a mix in order, read whole by one process and without torch."""
    found = []
    for batch in ShardReader(mix).batches(columns=["mix_batch", *PROVENANCE]):
        number, *provenance = batch.to_pydict().values()
        found.append((number[0], digest_of(list(zip(*provenance, strict=True)))))
    return found


def compare(mix: str, undisturbed: Path, killed: Path) -> bool:
    """Say in words whether a run that was killed learned what an undisturbed one did."""
    first, second = History.of(undisturbed), History.of(killed)
    print(f"{first}\n{second}")
    batches = mix_digests(mix)
    found = {
        f"both learned the {len(batches)} global batches of the mix, each once, in its order": (
            first.batches() == second.batches() == batches
        )
    }
    again = [(step, second.learned.get(number, UNDONE)) for number, step in second.lost]
    if again:
        found["steps that were made again after a kill had the same batches"] = all(
            step.digest == other.digest for step, other in again
        )
    pairs = list(zip(first.learned.values(), second.learned.values(), strict=False))
    if all(step.ranks == other.ranks for step, other in pairs):
        found["the loss curves are equal to the last bit"] = all(
            step.loss == other.loss for step, other in pairs
        ) and all(math.isnan(step.loss) or step.loss == other.loss for step, other in again)
        found["the models are equal to the last bit"] = model_digest(undisturbed) == model_digest(
            killed
        )
    else:
        off = [
            abs(step.loss - other.loss) / step.loss
            for step, other in pairs
            if step.ranks != other.ranks
        ]
        found[
            f"the first loss of another number of processes is equal but for {off[0]:.0e} of it"
        ] = off[0] <= ROUNDING
        found[f"the losses after it are equal but for {max(off):.0e} of them"] = all(
            share <= DRIFT for share in off
        )
    for claim, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return all(found.values())


def main() -> None:
    """Run a subcommand; exit code 1 where runs that should be alike are not."""
    parser = argparse.ArgumentParser(description="Train a language model from a mix.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train, or go on from the checkpoint in RUN")
    command.add_argument("mix")
    command.add_argument("run", type=Path)
    command.add_argument("--ranks", type=int, default=2, help="how many processes")
    command.add_argument("--context", type=int, default=96, help="bytes of a text that are read")
    command.add_argument("--width", type=int, default=64)
    command.add_argument("--layers", type=int, default=2)
    command.add_argument("--workers", type=int, default=1, help="DataLoader workers of a process")
    command.add_argument("--checkpoint-every", type=int, default=15, metavar="STEPS")
    command.add_argument("--pause", type=float, default=0.0, help="seconds, in the midst of a step")
    command = commands.add_parser("compare", help="did two runs learn the same?")
    command.add_argument("mix")
    command.add_argument("undisturbed", type=Path)
    command.add_argument("killed", type=Path)
    options = vars(parser.parse_args())
    if options.pop("command") == "train":
        train(Options(**options))
    else:
        sys.exit(not compare(**options))


if __name__ == "__main__":
    main()
