"""A trainer that dies and comes back: a byte-bigram model, trained from the batches of a mix.

    _demo_train.py train MIX RUN     train, or go on from RUN's checkpoint
    _demo_train.py compare RUN RUN   were two models made of the same batches, and are they equal?
    _demo_train.py shard MIX RUN K   the first batch of shard K, held against what RUN trained on

It needs no more than the base install. A run's folder holds ``checkpoint.npz``, replaced in one
step, and ``batches.log``, a line for every batch as it is trained and for every resumption.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.reader import ShardReader

PROVENANCE = ["mix_batch", "mix_dataset", "mix_row", "mix_epoch"]
SYMBOLS = 256
RATE = 0.5


@dataclass
class Bigrams:
    """Which byte follows which: a softmax over 256 logits for each byte, trained with Adagrad."""

    logits: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def untrained(cls) -> Bigrams:
        """Every byte is as likely as any other."""
        shape = (SYMBOLS, SYMBOLS)
        return cls(np.zeros(shape), np.full(shape, 1e-8))

    def step(self, tokens: pa.ListArray) -> float:
        """Learn from the texts of a batch; the loss before that, in nats a byte."""
        counts = pairs(tokens)
        shifted = self.logits - self.logits.max(axis=1, keepdims=True)
        log_odds = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        seen = counts.sum(axis=1, keepdims=True)
        gradient = (seen * np.exp(log_odds) - counts) / np.maximum(seen, 1)
        self.squares += gradient**2
        self.logits -= RATE * gradient / np.sqrt(self.squares)
        return float(-(counts * log_odds).sum() / max(1, seen.sum()))

    def digest(self) -> str:
        """Equal for models that are equal to the last bit."""
        return hashlib.sha256(self.logits.tobytes() + self.squares.tobytes()).hexdigest()


def pairs(tokens: pa.ListArray) -> NDArray[np.int64]:
    """How often each byte is followed by each other one, inside the texts."""
    values = tokens.flatten().to_numpy()  # no text is empty
    pair = values[:-1] * SYMBOLS + values[1:]
    ends = np.cumsum(pc.list_value_length(tokens).to_numpy())[:-1]
    pair = np.delete(pair, ends - 1)  # the last byte of a text and the first of the next
    return np.bincount(pair, minlength=SYMBOLS**2).reshape(SYMBOLS, SYMBOLS)


def provenance_digest(batch: pa.Table) -> str:
    """Tells whether two batches hold the same rows of the same datasets in the same order."""
    digest = hashlib.sha256()
    for name in PROVENANCE:
        digest.update(json.dumps(batch.column(name).to_pylist()).encode())
    return digest.hexdigest()[:16]


def save(path: Path, model: Bigrams, state: dict[str, Any]) -> None:
    """Replace the checkpoint in one step, so that there is a whole one whenever we are killed."""
    scratch = path.with_suffix(".part")
    with scratch.open("wb") as file:
        reader = np.array(json.dumps(state))
        np.savez(file, logits=model.logits, squares=model.squares, reader=reader)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load(path: Path) -> tuple[Bigrams, dict[str, Any]]:
    """The model and the reader's state of a checkpoint."""
    with np.load(path) as saved:
        return Bigrams(saved["logits"], saved["squares"]), json.loads(str(saved["reader"]))


def train(mix: str, run: Path, every: int, pause: float) -> None:
    """Train to the end of the mix, from the checkpoint where there is one."""
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoint.npz"
    reader = ShardReader(mix)
    model = Bigrams.untrained()
    with (run / "batches.log").open("a", buffering=1) as log:
        if checkpoint.exists():
            model, state = load(checkpoint)
            reader.load_state_dict(state)
            log.write(f"resume {state['next_batch']}\n")
            order, number = state["order_id"], state["next_batch"]
            print(f"resuming at batch {number:,} of the order {order[:16]}, from {checkpoint}")
        batches = reader.batches(columns=["tokens", *PROVENANCE])
        steps = len(batches)
        begun = time.monotonic()
        for batch in batches:
            loss = model.step(batch.column("tokens").combine_chunks())
            number = batch.column("mix_batch")[0].as_py()
            log.write(f"{number} {provenance_digest(batch)}\n")
            if (number + 1) % every == 0 or number + 1 == len(reader):
                save(checkpoint, model, reader.state_dict())
            if number % (len(reader) // 6) == 0 or number + 1 == len(reader):
                print(f"batch {number:5,}  loss {loss:.4f}", flush=True)
            time.sleep(pause)
    print(
        f"trained {steps:,} batches in {time.monotonic() - begun:.1f} s, "
        f"model {model.digest()[:16]}"
    )


@dataclass
class History:
    """What a run's log says: the batches in the model, and those that were trained twice."""

    learned: dict[int, str]
    repeated: int
    alike: bool

    @classmethod
    def of(cls, run: Path) -> History:
        """Read a log; a resumption forgets what lay past the checkpoint, as the model did."""
        learned: dict[int, str] = {}
        lost: dict[int, str] = {}
        repeated, alike = 0, True
        for line in (run / "batches.log").read_text().splitlines():
            word, _, value = line.partition(" ")
            if word == "resume":
                lost |= {n: digest for n, digest in learned.items() if n >= int(value)}
                learned = {n: digest for n, digest in learned.items() if n < int(value)}
                continue
            number = int(word)
            if number in learned:
                raise SystemExit(f"error: {run}: batch {number} went into the model twice")
            repeated += number in lost
            alike &= lost.get(number, value) == value
            learned[number] = value
        return cls(learned, repeated, alike)


def compare(first: Path, second: Path) -> bool:
    """Say in words whether two runs learned the same, and whether they learned it in order."""
    histories = [History.of(run) for run in (first, second)]
    models = [load(run / "checkpoint.npz")[0].digest() for run in (first, second)]
    for run, history, model in zip((first, second), histories, models, strict=True):
        again = f", {history.repeated} of them twice" if history.repeated else ""
        print(f"{run}: {len(history.learned):,} batches{again}, model {model[:16]}")
    sequences = [list(history.learned.items()) for history in histories]
    found = {
        "the same batches, of the same rows, in the same order, went into both models": (
            sequences[0] == sequences[1]
        ),
        "the models are equal to the last bit": models[0] == models[1],
    }
    if any(history.repeated for history in histories):
        found["batches that were trained a second time were the same as the first time"] = all(
            history.alike for history in histories
        )
    for claim, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return all(found.values())


def show_shard(mix: str, run: Path, shard: int) -> bool:
    """Jump to a shard, show its first batch, and hold it against what a run trained on."""
    batch = next(ShardReader(mix).batches(start_shard=shard))
    number, digest = batch.column("mix_batch")[0].as_py(), provenance_digest(batch)
    counts = pc.value_counts(batch.column("mix_dataset")).to_pylist()
    shares = ", ".join(f"{entry['counts']} {entry['values']}" for entry in counts)
    sample = batch.slice(0, 1).to_pylist()[0]
    print(f"batch {number:,}: {batch.num_rows} rows ({shares}), digest {digest}")
    print(f"its first row is from {sample['source']}, line {sample['line']}")
    alike = History.of(run).learned[number] == digest
    print(f"{'yes' if alike else 'NO '}  {run} trained on the very same rows as batch {number:,}")
    return alike


def main() -> None:
    """Run a subcommand; exit code 1 where runs that should be equal are not."""
    parser = argparse.ArgumentParser(description="Train a small model from a mix.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train, or go on from the checkpoint in RUN")
    command.add_argument("mix")
    command.add_argument("run", type=Path)
    command.add_argument("--checkpoint-every", type=int, default=100, metavar="BATCHES")
    command.add_argument("--pause", type=float, default=0.0, help="seconds to wait after a batch")
    command = commands.add_parser("compare", help="are two runs' models and batches equal?")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command = commands.add_parser("shard", help="hold a shard's first batch against a run's log")
    command.add_argument("mix")
    command.add_argument("run", type=Path)
    command.add_argument("shard", type=int)
    options = parser.parse_args()
    if options.command == "train":
        train(options.mix, options.run, options.checkpoint_every, options.pause)
    elif options.command == "compare":
        sys.exit(not compare(options.first, options.second))
    else:
        sys.exit(not show_shard(options.mix, options.run, options.shard))


if __name__ == "__main__":
    main()
