"""A mix that is settled: what it will be, told to a person, kept for workers, and found again."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mixcore import FrameBudgetMixture, Mixture, WeightedMixture
from mixcore.weighted import batches_filled, first_unfillable

from .catalog import Catalog, Dataset, SourceFile
from .errors import MixError
from .formats import Block
from .manifest import (
    LOCK,
    MANIFEST,
    PLAN,
    READING,
    SOURCES_SCHEMA,
    Manifest,
    ManifestError,
    exact,
    put_table,
    states_table,
    to_json,
)
from .mixtures import LENGTHS, lengths_table, mixture_of
from .shard import SHARDS, Layout, WriterOptions, shard_name, shard_schema
from .standing import Standing
from .storage import Folder
from .streams import Streams
from .type_text import parse_type

DECODED = 4
"""How many times larger rows are decoded than stored: text under zstd 2 to 4 times."""
# Decoding is a third of a gather's work, and a scatter's detour costs about as much.
_MOST_DECODES = 2.0


class PlanError(MixError):
    """The mix that a config asks for cannot be made, or not there."""


WritePath = Literal["gather", "scatter"]
"""How rows come together: slices of sources one after another, or rows from anywhere."""


@dataclass(frozen=True)
class Plan:
    """A mix that is settled and not yet written.

    ``manifest`` is what will be published, less the shards table. ``schema`` is the shards' own.
    ``lengths`` of all items are there where the mixture goes by them and they are not yet saved.
    """

    folder: Folder
    catalog: Catalog
    manifest: Manifest
    schema: pa.Schema
    options: WriterOptions
    mixture: Mixture
    lengths: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    @property
    def layout(self) -> Layout:
        """How batches fall into shards and row groups."""
        return self.manifest.layout

    @functools.cached_property
    def decodes(self) -> float:
        """How often a gather decodes each source row, as expected; 1 where slices follow on."""
        if self.streams.in_order:
            return 1.0
        groups = [rows for d in self.catalog.datasets for f in d.files for rows in f.group_rows]
        rows = np.array(groups, np.float64)
        part = rows / rows.sum()
        num_rows, shards = int(self.manifest.document["num_rows"]), self.layout.num_shards
        # A shard is a random sample of an epoch: it misses a row group of part p so often.
        missed = np.exp(num_rows / shards * np.log1p(-np.minimum(part, 1 - 1e-12)))
        return float(shards * (rows * (1 - missed)).sum() / max(1, num_rows))

    @functools.cached_property
    def streams(self) -> Streams:
        """What a gather reads forward."""
        return Streams.of(self.catalog, self.mixture)

    @property
    def write_path(self) -> WritePath:
        """How rows are brought together, unless a build says otherwise: the bytes are the same."""
        return "scatter" if self.decodes > _MOST_DECODES else "gather"

    def save(self, overwrite: bool = False) -> Plan:
        """Write the plan and its tables into the output folder; the plan as written.

        With ``overwrite`` a manifest that stands there is removed first, and so are shards that
        this plan has no place for.

        Raises:
            PlanError: another plan, or files that are no shards, are there already.
        """
        self._check_folder(overwrite)
        document = {
            **self.manifest.document,
            "tables": {
                "sources": put_table(self.folder, "sources", [sources_table(self.catalog)]),
                "states": put_table(
                    self.folder,
                    "states",
                    states_table(self.mixture, self.layout.boundaries()),
                ),
            },
        }
        if self.lengths is not None:
            lengths = put_table(self.folder, LENGTHS, lengths_table(self.lengths))
            document["tables"][LENGTHS] = lengths
        text = to_json(
            {
                "base": self.catalog.base,
                "schema": base64.b64encode(self.catalog.schema.serialize().to_pybytes()).decode(),
                "manifest": document,
            }
        )
        if self.folder.size(PLAN) is None or self.folder.read(PLAN) != text:
            self.folder.put(PLAN, text, flush=False)
        return replace(self, manifest=Manifest(document))

    @classmethod
    def load(cls, folder: Folder) -> Plan:
        """The plan that is being built in a folder, as each worker reads it.

        Raises:
            ManifestError: there is none, or its tables are damaged.
        """
        try:
            text = folder.read(PLAN)
            saved = json.loads(text)
            manifest = Manifest.decode(to_json(saved["manifest"]), f"{folder.root}/{PLAN}")
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(saved["schema"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ManifestError(f"{folder.root}/{PLAN}: no plan can be read: {error!r}") from error
        sources = manifest.table(folder, "sources").to_pylist()
        files: dict[str, list[SourceFile]] = {}
        for row in sources:
            files.setdefault(row["dataset"], []).append(
                SourceFile(
                    row["path"],
                    row["bytes"],
                    row["rows"],
                    row["first_row"],
                    row["digest"],
                    tuple(row["group_rows"]),
                    tuple(Block(**block) for block in row["blocks"]),
                )
            )
        catalog = Catalog(
            datasets=tuple(
                Dataset(
                    name=entry["name"],
                    files=tuple(files[entry["name"]]),
                    num_rows=int(entry["rows"]),
                    rows=(int(entry["row_range"][0]), int(entry["row_range"][1])),
                    columns=entry["columns"],
                    row_bytes=entry["row_bytes"],
                    schema=_types(entry),
                )
                for entry in manifest.document["datasets"]
            ),
            schema=schema,
            base=saved["base"],
            stage=folder,
        )
        writer = manifest.document["writer"]
        return cls(
            folder,
            catalog,
            manifest,
            shard_schema(schema),
            WriterOptions(**writer),
            mixture_of(manifest, folder),
        )

    def preview(self) -> dict[str, Any]:
        """What a person decides from before anything is written; JSON-able.

        ``first_batch`` is exact within the mix; beyond it ``about_batch`` is the batch by which
        half an item is due, the place where a dataset of small weight tends to come first.
        """
        document, layout = self.manifest.document, self.layout
        datasets, warnings = [], []
        total = sum(entry.get("weight", 0) for entry in document["datasets"])
        for entry, first in zip(document["datasets"], self._first_batches(), strict=True):
            datasets.append({**{key: entry[key] for key in entry if key in _PREVIEW_KEYS}, **first})
            if first and first["first_batch"] is None:
                warnings.append(
                    f"dataset {entry['name']!r} gets no row: at weight {entry['weight']} of "
                    f"{total} its first item is due about batch {first['about_batch']}, and the "
                    f"mix ends at {layout.num_batches}"
                )
            elif not entry["rows_used"]:
                warnings.append(f"dataset {entry['name']!r} gets no row in this mix")
            if entry.get("bad_lines"):
                warnings.append(
                    f"dataset {entry['name']!r}: {entry['bad_lines']:,} line(s) that cannot be "
                    "read are left out"
                )
            if entry.get("rows_dropped"):
                warnings.append(
                    f"dataset {entry['name']!r}: {entry['rows_dropped']:,} of {entry['rows']:,} "
                    "items are longer than frame_budget and left out"
                )
        if self.catalog.dropped:
            warnings.append(
                f"missing_columns: drop leaves out {', '.join(map(repr, self.catalog.dropped))}: "
                "not every source file has them"
            )
        warnings += self._cut_short()
        estimated = self.estimated_bytes
        free = self.folder.free_bytes()
        if free is not None and estimated > free:
            warnings.append(
                f"about {estimated:,} bytes will be written, but only {free:,} are free at "
                f"{self.folder.root}"
            )
        return {
            "output": self.folder.root,
            "order_id": self.manifest.order_id,
            "bytes_id": self.manifest.bytes_id,
            **asdict(layout),
            "mixture": document["mixture"],
            **self._batches(),
            "num_rows": document["num_rows"],
            "num_shards": layout.num_shards,
            "write_path": self.write_path,
            "decodes": round(self.decodes, 2),
            "estimated_bytes": estimated,
            "free_bytes": free,
            "datasets": datasets,
            "warnings": warnings,
        }

    def _cut_short(self) -> list[str]:
        """Where `stop` ends the mix before what was asked for, or before what could be filled."""
        config, mixture, layout = self.manifest.document["config"], self.mixture, self.layout
        if not isinstance(mixture, WeightedMixture) or config["on_exhausted"] != "stop":
            return []
        asked, step = config.get("num_batches"), layout.batches_per_step
        filled = batches_filled(mixture.allocation, mixture.dataset_rows)
        if asked is not None and filled < int(asked):
            lacking = first_unfillable(mixture.allocation, mixture.dataset_rows, filled + 1)
            name = next(n for n, b in zip(mixture.names, lacking, strict=True) if b is not None)
            return [
                f"on_exhausted: stop ends the mix after {layout.num_batches:,} of {int(asked):,} "
                f"batches: dataset {name!r} cannot fill batch {filled:,}"
            ]
        if asked is None and step and filled > layout.num_batches:
            return [
                f"{filled - layout.num_batches:,} more batch(es) could be filled, but make no "
                f"whole step of {step}"
            ]
        return []

    def _first_batches(self) -> list[dict[str, Any]]:
        """Of each dataset, where weights decide: the batch in which it first appears."""
        mixture = self.mixture
        if not isinstance(mixture, WeightedMixture):
            return [{} for _ in mixture.names]
        allocation, length = mixture.allocation, mixture.num_batches
        first = allocation.first_reaching([1] * len(mixture.names), length)
        due = [
            -(-allocation.total // (2 * allocation.batch_size * weight))
            for weight in allocation.weights
        ]
        return [
            {"first_batch": batch, "about_batch": None if batch is not None else max(late, length)}
            for batch, late in zip(first, due, strict=True)
        ]

    def _batches(self) -> dict[str, Any]:
        """What a person wants to know of the batches."""
        mixture = self.mixture
        if isinstance(mixture, WeightedMixture):
            policy = self.manifest.document["config"]["on_exhausted"]
            return {"batch_size": mixture.rows_per_batch, "on_exhausted": policy}
        if isinstance(mixture, FrameBudgetMixture):
            mean = int(self.manifest.document["num_rows"]) / max(1, mixture.num_batches)
            return {"mean_batch_size": round(mean, 3), "padding": round(mixture.padding(), 6)}
        return {"batch_size": self.manifest.document["mixture"]["batch_size"]}

    @property
    def estimated_bytes(self) -> int:
        """About how many bytes the shards will take, from what the rows take in the sources."""
        return int(
            sum(
                int(entry["rows_used"]) * entry["row_bytes"]
                for entry in self.manifest.document["datasets"]
            )
        )

    def _check_folder(self, overwrite: bool) -> None:
        folder = self.folder
        names = {shard_name(index) for index in range(self.layout.num_shards)}
        found = [f"{SHARDS}/{name}" for name in folder.names(SHARDS)]
        unplanned = [name for name in found if name not in names]
        if overwrite:
            # Without its manifest the folder cannot pass for a finished mix while it changes.
            Standing(folder, self.manifest.bytes_id).keep()
            folder.delete(MANIFEST)
            foreign = [name for name in unplanned if not _is_shard_name(name)]
            if foreign:
                raise PlanError(
                    f"{folder.root}: {foreign[0]} is no shard; nothing else may lie in {SHARDS}/: "
                    "move it away"
                )
            for name in unplanned:
                folder.delete(name)
            for name in folder.names("_mix"):
                if "/" not in name and f"_mix/{name}" != LOCK:
                    folder.delete(f"_mix/{name}")
            return
        standing = self._standing()
        if standing is not None and _what(standing) != _what(self.manifest):
            raise PlanError(
                f"{folder.root}: another mix stands or is being built there; it differs in "
                f"{self._difference(standing)}; choose another `output`, or build with --overwrite"
            )
        if unplanned:
            foreign = [name for name in unplanned if not _is_shard_name(name)]
            more = f" and {len(unplanned) - 1} more" if len(unplanned) > 1 else ""
            raise PlanError(
                f"{folder.root}: {(foreign or unplanned)[0]}{more}: no place in this mix of "
                f"{self.layout.num_shards} shards; move such files away"
                + ("" if foreign else ", or build with --overwrite, which removes them")
            )

    def _difference(self, other: Manifest) -> str:
        """Where another plan is not this one, for a message."""
        ours, theirs = self.manifest.document, other.document
        found = [
            f"dataset {b['name']!r}: {key} {a.get(key)!r} there, {b.get(key)!r} here"
            for a, b in zip(theirs["datasets"], ours["datasets"], strict=False)
            for key in ("name", "weight", "row_range", "columns", *READING)
            if exact(a.get(key)) != exact(b.get(key))
        ]
        for part in ("layout", "mixture", "writer"):
            found += [
                f"{key}: {theirs[part].get(key)!r} there, {value!r} here"
                for key, value in exact(ours[part]).items()
                if theirs[part].get(key) != value
            ]
        if len(theirs["datasets"]) != len(ours["datasets"]):
            found.append(f"{len(theirs['datasets'])} datasets there, {len(ours['datasets'])} here")
        if not found:
            there = other.table(self.folder, "sources").to_pylist()
            here = sources_table(self.catalog).to_pylist()
            keys = ("digest", "rows")
            found = [
                f"source file {new['path']}, which has changed"
                for old, new in zip(there, here, strict=False)
                if any(old[key] != new[key] for key in keys)
            ]
            if len(there) != len(here):
                found.append(f"{len(there)} source files there, {len(here)} here")
        if not found and exact(theirs["schema"]) != exact(ours["schema"]):
            found = ["the columns of its sources"]
        return "; ".join(found[:3]) or (
            "its bytes_id alone, so what stands there is damaged or of another format"
        )

    def _standing(self) -> Manifest | None:
        """What the folder says is there: the finished mix, or else the plan being built."""
        if self.folder.size(MANIFEST) is not None:
            return Manifest.load(self.folder)
        if self.folder.size(PLAN) is not None:
            try:
                return Plan.load(self.folder).manifest
            except ManifestError:
                # A plan without its tables was cut off before any shard: nothing depends on it.
                return None
        return None


_PREVIEW_KEYS = (
    "name",
    "rows",
    "weight",
    "share_asked",
    "share_given",
    "rows_used",
    "epochs",
    "rows_dropped",
    "files",
)


def _what(manifest: Manifest) -> tuple[str, int]:
    return manifest.bytes_id, manifest.layout.num_batches


def _types(entry: Mapping[str, Any]) -> dict[str, pa.DataType] | None:
    """The types that a dataset's entry gives to columns of its source."""
    given = entry.get("schema")
    return given and {name: parse_type(text) for name, text in given.items()}


def _is_shard_name(name: str) -> bool:
    digits = name.removeprefix(f"{SHARDS}/shard-").removesuffix(".parquet")
    return digits.isdecimal() and name == shard_name(int(digits))


def sources_table(catalog: Catalog) -> pa.RecordBatch:
    """The sources table: a row a source file, in dataset and file order."""
    rows = [(dataset.name, file) for dataset in catalog.datasets for file in dataset.files]
    return pa.RecordBatch.from_pydict(
        {
            "dataset": [name for name, _ in rows],
            "path": [file.path for _, file in rows],
            "bytes": [file.num_bytes for _, file in rows],
            "rows": [file.num_rows for _, file in rows],
            "first_row": [file.first_row for _, file in rows],
            "digest": [file.digest for _, file in rows],
            "group_rows": [file.group_rows for _, file in rows],
            "blocks": [file.blocks for _, file in rows],
        },
        schema=SOURCES_SCHEMA,
    )
