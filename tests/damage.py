"""Damage to finished mixes, and what must come of each: named, mended, and never a wrong row."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.commit import commit
from pipeline.config import ConfigError, parse_config
from pipeline.errors import MixError
from pipeline.gather import RunWriter
from pipeline.manifest import Manifest
from pipeline.plan import Plan, plan
from pipeline.reader import ShardReader
from pipeline.transforms import build
from pipeline.verify import verify

from .mixes import WEIGHTS, config, digests, write_sources

MIXTURES: dict[str, dict[str, Any]] = {
    "weighted": {
        "batch_size": 8,
        "num_batches": 26,
        "on_exhausted": "repeat",
        "batches_per_shard": 6,
        "batches_per_row_group": 3,
        "batches_per_step": 2,
    },
    "frame_budget": {
        "mixture": "frame_budget",
        "frame_budget": 300,
        "pool_size": 60,
        "length_of": "text",
        "num_batches": 16,
        "batches_per_shard": 5,
        "batches_per_row_group": 2,
    },
    "reservoir": {
        "mixture": "reservoir",
        "batch_size": 8,
        "max_simultaneous": 2,
        "passes": 1,
        "batches_per_shard": 6,
        "batches_per_row_group": 4,
    },
}
"""What the config of a small mix of each kind says beside output and datasets."""


def mixture_config(folder: Path, kind: str, **keys: Any) -> dict[str, Any]:
    """A config of one kind over the datasets of ``folder / "data"``."""
    whole = config(folder, WEIGHTS)
    if kind != "weighted":
        whole = {"output": whole["output"], "datasets": whole["datasets"]}
        whole["datasets"] = {n: {"path": d["path"]} for n, d in whole["datasets"].items()}
    return {**whole, **MIXTURES[kind], **keys}


@dataclass(frozen=True)
class Damage:
    """What is done to a mix, and the files of it that differ then."""

    kind: str
    what: str
    files: tuple[str, ...]
    do: Callable[[Path], None]


@dataclass(frozen=True)
class Subject:
    """A finished mix that is damaged again and again, and all that is true of it."""

    name: str
    plan: Plan
    out: Path
    whole: dict[str, str]
    batches: list[pa.Table]

    @classmethod
    def build(cls, folder: Path, kind: str) -> Subject:
        """Build the mix of a kind in ``folder``, and its sources."""
        write_sources(folder / "data", web=[40, 0, 60], code=[50, 23], books=[11])
        planned = plan(mixture_config(folder, kind))
        build(planned)
        out = folder / "out"
        shutil.copytree(out, folder / "whole")
        batches = list(ShardReader(out).batches(split="rows", uneven=True))
        return cls(kind, planned, out, digests(out), batches)

    def restore(self) -> None:
        """Put the whole mix back, whatever stands there."""
        shutil.rmtree(self.out)
        shutil.copytree(self.out.parent / "whole", self.out)

    @property
    def document(self) -> dict[str, Any]:
        """A manifest of the mix to be changed."""
        found: dict[str, Any] = json.loads((self.out.parent / "whole/manifest.json").read_text())
        return found


# What is done.


def _truncated(path: Path, dice: random.Random, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(1, len(data))])


def _flipped(path: Path, dice: random.Random, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _byte_changed(path: Path, dice: random.Random, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= dice.randrange(1, 256)
    path.write_bytes(data)


def _zeroed(path: Path, dice: random.Random, other: Path) -> None:
    data = path.read_bytes()
    at = dice.randrange(len(data) - 64)
    changed = data[:at] + bytes(64) + data[at + 64 :]
    path.write_bytes(changed if changed != data else data[:-1])


def _swapped(path: Path, dice: random.Random, other: Path) -> None:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _neighbours(path: Path, dice: random.Random, other: Path) -> None:
    shutil.copy(other, path)


def _linked(path: Path, dice: random.Random, other: Path) -> None:
    path.unlink()
    os.symlink(other, path)


def _removed(path: Path, dice: random.Random, other: Path) -> None:
    path.unlink()


def _emptied(path: Path, dice: random.Random, other: Path) -> None:
    path.write_bytes(b"")


def _doubled(path: Path, dice: random.Random, other: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _extended(path: Path, dice: random.Random, other: Path) -> None:
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 100)))


def _foreign(path: Path, dice: random.Random, other: Path) -> None:
    pq.write_table(pa.table({"text": ["foreign"] * dice.randrange(1, 9)}), path)


FILE_DAMAGES: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    _truncated,
    _flipped,
    _byte_changed,
    _zeroed,
    _swapped,
    _neighbours,
    _linked,
    _removed,
    _emptied,
    _doubled,
    _extended,
    _foreign,
)


def _damages_of_files(subject: Subject, dice: random.Random, tables: bool) -> Iterator[Damage]:
    """Every kind of damage to every shard, or to every table."""
    names = [name for name in subject.whole if name.startswith("shards/")]
    if tables:
        names = [str(entry["path"]) for entry in subject.document["tables"].values()]
    what = "table" if tables else "shard"
    for damage, name in itertools.product(FILE_DAMAGES, names):
        other = names[(names.index(name) + 1) % len(names)]
        seed = dice.randrange(2**32)

        def do(
            out: Path, damage: Any = damage, name: str = name, other: str = other, seed: int = seed
        ) -> None:
            damage(out / name, random.Random(seed), out / other)

        files = (name, other) if damage is _swapped else (name,)
        label = damage.__name__.strip("_").replace("_", " ")
        yield Damage(f"{what} {label}", f"{name} {label}", files, do)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Key paths of everything in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from _places(inner, (*path, key))


def _changed(value: Any, dice: random.Random) -> Any:
    """Another value in place of one of a JSON document."""
    others: list[Any] = [None, {}, [], "", -1, True, 10**30, "2"]
    if isinstance(value, str):
        others += [value + "x", value[:-1], value.upper() + "?"]
    elif isinstance(value, list) and value:
        others += [value[:-1], value[1:], [*value, value[0]], [*value[::-1], 7]]
    elif isinstance(value, dict) and value:
        others += [{**value, "more": 1}, list(value)]
    elif isinstance(value, int | float):
        others += [value + 1, value - 1, -value - 1, value * 2 + 1, value + 0.5, str(value) + "0"]
    return dice.choice([other for other in others if other != value or other is not value])


def _set(document: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = change(document[path[-1]])


def _edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of a JSON file of the mix."""

    def do(out: Path) -> None:
        document = json.loads((out / name).read_text())
        change(document)
        (out / name).write_text(json.dumps(document, indent=2))

    return do


def _damages_of_json(subject: Subject, dice: random.Random, name: str) -> Iterator[Damage]:
    """Every value of the manifest or the plan changed, every key removed."""
    document = json.loads((subject.out.parent / "whole" / name).read_text())
    # A table that is not what the manifest says is told with "the manifest says".
    told_as = (name.removesuffix(".json") if name == "manifest.json" else name,)
    places = list(_places(document))
    dice.shuffle(places)
    for path in places:
        seed, told = dice.randrange(2**32), ".".join(map(str, path))
        # Where a config lay that is long gone nobody knows; a build writes it anew.
        files = () if name == "_mix/plan.json" and path == ("base",) else told_as
        value: Any = document
        for key in path:
            value = value[key]
        new = _changed(copy.deepcopy(value), random.Random(seed))
        if new == value:
            new = "changed"

        def change(found: Any, path: tuple[Any, ...] = path, new: Any = new) -> None:
            _set(found, path, lambda _: copy.deepcopy(new))

        what = f"{name}: {told} {value!r:.40} now {new!r:.40}"
        yield Damage(f"{name} value", what, files, _edit(name, change))
        if isinstance(path[-1], str):

            def remove(found: Any, path: tuple[Any, ...] = path) -> None:
                for key in path[:-1]:
                    found = found[key]
                del found[path[-1]]

            yield Damage(f"{name} key", f"{name}: {told} removed", files, _edit(name, remove))


def _damages_of_text(subject: Subject, dice: random.Random, name: str) -> Iterator[Damage]:
    """The text of the manifest or the plan cut, emptied, or made into something else."""
    good = (subject.out.parent / "whole" / name).read_bytes()
    cut = dice.randrange(1, len(good) - 2)
    texts = {
        "truncated": good[:cut],
        "emptied": b"",
        "doubled": good * 2,
        "extended": good + b"}",
        "null": b"null",
        "a list": b"[" * 5 + b"]" * 5,
        "deep": b"[" * 100_000,
        "not UTF-8": good.replace(b'"', b"\xff", 1),
        "binary": dice.randbytes(500),
    }
    for label, data in texts.items():

        def do(out: Path, data: bytes = data) -> None:
            (out / name).write_bytes(data)

        yield Damage(f"{name} text", f"{name} {label}", (name,), do)


def _escapes(subject: Subject, dice: random.Random) -> Iterator[Damage]:
    """Tables that the manifest looks for outside of the mix, where a whole one lies."""
    kinds = list(subject.document["tables"])
    outside = subject.out.parent / "outside"
    for kind, how in itertools.product(kinds, ("above", "absolute", "backslash", "inside", "null")):
        file = subject.document["tables"][kind]["path"]
        paths = {
            "above": f"_mix/../../outside/{kind}",
            "absolute": str(outside / kind),
            "backslash": f"..\\outside\\{kind}",
            "inside": f"shards/../{file}",
            "null": f"{file}\0",
        }

        def do(out: Path, kind: str = kind, file: str = file, path: str = paths[how]) -> None:
            outside.mkdir(exist_ok=True)
            shutil.copy(out / file, outside / kind)
            _edit("manifest.json", lambda d: d["tables"][kind].update(path=path))(out)

        what = f"manifest.json: tables.{kind}.path {paths[how]!r}"
        yield Damage("manifest.json escape", what, (paths[how],), do)


def damages(subject: Subject, dice: random.Random) -> dict[str, list[Damage]]:
    """All that can be done to a mix, by kind and in random order."""
    found: dict[str, list[Damage]] = {}
    for damage in itertools.chain(
        _damages_of_files(subject, dice, tables=False),
        _damages_of_files(subject, dice, tables=True),
        _damages_of_json(subject, dice, "manifest.json"),
        _damages_of_text(subject, dice, "manifest.json"),
        _damages_of_json(subject, dice, "_mix/plan.json"),
        _damages_of_text(subject, dice, "_mix/plan.json"),
        _escapes(subject, dice),
    ):
        found.setdefault(damage.kind, []).append(damage)
    for some in found.values():
        dice.shuffle(some)
    return found


def sample(subject: Subject, dice: random.Random, count: int) -> list[Damage]:
    """So many damages, as evenly of all kinds as there are such."""
    kinds = list(damages(subject, dice).values())
    dice.shuffle(kinds)
    turns = itertools.zip_longest(*kinds)
    return list(itertools.islice((d for turn in turns for d in turn if d is not None), count))


# What must come of it.


def read_wrong(subject: Subject) -> str | None:
    """What a reader gives that is not the mix's; None where each batch is right or refused."""
    try:
        reader = ShardReader(subject.out)
    except MixError:
        return None
    true = subject.batches
    for n, batch in enumerate(true):
        try:
            found = reader[n]
        except (MixError, IndexError):
            continue
        if not found.equals(batch) or found.schema != batch.schema:
            return f"batch {n} is wrong"
    step = subject.plan.layout.batches_per_step or 2
    views: list[tuple[dict[str, Any], list[int]]] = [
        ({"columns": ["tokens"], "split": "rows", "uneven": True}, list(range(len(true)))),
        (
            {"columns": ["mix_row", "text"], "rank": 1, "world_size": 2, "split": "batches"},
            list(range(1, len(true) - len(true) % step, 2)),
        ),
    ]
    for asked, numbers in views:
        given: list[pa.Table] = []
        complete = True
        try:
            given.extend(reader.batches(read_ahead=0, **asked))
        except MixError:
            complete = False
        for n, found in zip(numbers, given, strict=False):
            if not found.equals(true[n].select(asked["columns"])):
                return f"batch {n} is wrong in {asked}"
        if complete and len(given) != len(numbers) and len(reader) == len(true):
            return f"{len(given)} instead of {len(numbers)} batches in {asked}"
    return None


def named(subject: Subject, damage: Damage) -> str | None:
    """What of the damage ``verify`` does not name."""
    try:
        told = [str(fault) for fault in verify(subject.out)]
    except MixError as error:
        told = [str(error)]
    lacking = [name for name in damage.files if not any(name in text for text in told)]
    return f"verify names not {lacking}, but {told}"[:500] if lacking else None


def write_again(planned: Plan, overwrite: bool = False) -> None:
    """What a build does, without a pipeline around it."""
    saved = planned.save(overwrite)
    commit(saved, RunWriter(saved).write(0, saved.layout.num_shards))


Rebuild = Callable[..., Any]
"""``build``, or ``write_again``, which takes less time."""


def mended(subject: Subject, rebuild: Rebuild = build) -> str | None:
    """What a rebuild does not mend, where need be with ``overwrite``, as its error has to say."""
    try:
        rebuild(subject.plan)
    except MixError as error:
        if "--overwrite" not in str(error):
            return f"the error of a rebuild names no way out: {error}"[:500]
        rebuild(subject.plan, overwrite=True)
    left = digests(subject.out)
    if left != subject.whole:
        return f"not mended: {sorted(set(left.items()) ^ set(subject.whole.items()))}"[:500]
    Manifest.load(subject.plan.folder)
    return None


def suffer(subject: Subject, damage: Damage, rebuild: Rebuild = build) -> list[str]:
    """Damage a mix, and see; all that is not as it must be. The mix is whole again after it."""
    problems: list[str] = []
    damage.do(subject.out)
    try:
        problems += [found for found in (read_wrong(subject), named(subject, damage)) if found]
        problems += [found for found in (mended(subject, rebuild),) if found]
    except Exception as error:  # of no kind that a person could expect
        problems.append(f"unexpected {error!r:.400}")
    if problems:
        subject.restore()
    return [f"{subject.name}, {damage.what}: {problem}" for problem in problems]


# Configs that would run something, or never end.


def hostile_configs(marker: Path) -> dict[str, str]:
    """Texts that no config may be read from; some would make the marker file where they run."""
    touch = f"touch {marker}"
    bomb = "\n".join(
        [
            "a0: &a0 [x, x, x, x, x, x, x, x, x]",
            *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)),
        ]
    )
    return {
        "system": f'output: !!python/object/apply:os.system ["{touch}"]\n',
        "popen": f'!!python/object/apply:subprocess.check_output [["touch", "{marker}"]]\n',
        "new": f'output: !!python/object/new:os.system ["{touch}"]\n',
        "name": "output: !!python/name:os.system\n",
        "module": "output: !!python/module:os\n",
        "tuple": "output: !!python/tuple [out]\n",
        "binary": "output: !!binary b3V0\n",
        "own tag": "output: !env HOME\n",
        "verbatim tag": f'output: !<tag:yaml.org,2002:python/object/apply:os.system> ["{touch}"]\n',
        "bomb": bomb + "\n",
        "bomb in datasets": "datasets:\n" + "\n".join("  " + line for line in bomb.splitlines()),
        "circle": "datasets: &d {web: *d}\n",
        "merge": "base: &b {path: x}\ndatasets: {web: {<<: *b, weight: 1}}\n",
        "deep": "output: " + "[" * 5000,
        "huge number": "batch_size: " + "9" * 100_000 + "\n",
    }


def config_refused(text: str, marker: Path) -> str | None:
    """What is wrong where a config is read that must not be."""
    try:
        parse_config(text, ".")
    except ConfigError as error:
        ran = "it ran a command" if marker.exists() else None
        return ran if error.problems else "no problem is listed"
    return "it was accepted"
