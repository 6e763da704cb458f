"""From config and sources to a plan: mixture, layout, identities, and a preview for a person."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mixcore import FrameBudgetMixture, Mixture, WeightedMixture
from mixcore.weighted import batches_filled, first_unfillable

from .catalog import Catalog, Dataset, DatasetSpec, SourceFile, scan_datasets, would_take
from .config import DEFAULT_SHARD_BYTES, Config, config_from_dict, load_config
from .manifest import (
    ALGORITHM_VERSION,
    FORMAT_VERSION,
    MANIFEST,
    PLAN,
    SOURCES_SCHEMA,
    Manifest,
    ManifestError,
    bytes_identity,
    exact,
    order_identity,
    put_table,
    states_table,
    to_json,
)
from .mixtures import LENGTHS, lengths_table, mixture_of, order_settings, rows_used
from .settle import PlanError, Settled, settle
from .shard import (
    MAX_SHARDS,
    SHARDS,
    Layout,
    WriterOptions,
    as_read_back,
    describe,
    shard_name,
    shard_schema,
)
from .standing import Standing
from .storage import Folder
from .streams import Streams
from .version import __version__

_ROW_GROUP_ROWS = 2048
# Decoding is a third of a gather's work, and a scatter's detour costs about as much.
_MOST_DECODES = 2.0


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
        except (OSError, ValueError, KeyError, TypeError) as error:
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
                )
                for entry in manifest.document["datasets"]
            ),
            schema=schema,
            base=saved["base"],
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
            if entry.get("rows_dropped"):
                warnings.append(
                    f"dataset {entry['name']!r}: {entry['rows_dropped']:,} of {entry['rows']:,} "
                    "items are longer than frame_budget and left out"
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
                if "/" not in name:
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
            f"dataset {b['name']!r}: {key} {a.get(key)!r} there, {b[key]!r} here"
            for a, b in zip(theirs["datasets"], ours["datasets"], strict=False)
            for key in ("name", "weight", "row_range", "columns")
            if key in b and exact(a.get(key)) != exact(b[key])
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
        },
        schema=SOURCES_SCHEMA,
    )


def plan(config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Plan:
    """Settle a mix: scan the sources, fix length and layout, take the identities. Writes nothing.

    ``config`` is a path to a YAML file, a mapping of the same keys, or a Config.

    Raises:
        ConfigError: the config is wrong; every problem is listed.
        CatalogError, SourceError, SchemaError: the sources are.
        PlanError: the sources cannot give the mix that the config asks for.
    """
    if isinstance(config, Mapping):
        config = config_from_dict(config, os.getcwd())
    elif isinstance(config, str | os.PathLike):
        config = load_config(config)
    base = os.path.abspath(config.base)
    folder = Folder.at(config.output, base)
    specs = [
        DatasetSpec(name, dataset.path, dataset.rows, dataset.columns)
        for name, dataset in config.datasets.items()
    ]
    catalog = scan_datasets(specs, base)
    _check_output_apart(folder, catalog, specs)
    settled = settle(config, catalog)
    layout = _layout(config, settled, catalog)
    options = WriterOptions(config.compression, config.compression_level)
    schema = shard_schema(catalog.schema)
    return Plan(
        folder=folder,
        catalog=catalog,
        manifest=Manifest(_document(config, catalog, settled, layout, options, schema)),
        schema=schema,
        options=options,
        mixture=settled.mixture,
        lengths=settled.lengths,
    )


def _document(
    config: Config,
    catalog: Catalog,
    settled: Settled,
    layout: Layout,
    options: WriterOptions,
    schema: pa.Schema,
) -> dict[str, Any]:
    columns = describe(as_read_back(schema))
    num_rows, used = rows_used(settled.mixture, list(layout.boundaries()))
    most = max(u // dataset.num_rows for u, dataset in zip(used, catalog.datasets, strict=True))
    if most >= 2**31:
        raise PlanError(f"a dataset would be read {most} times; at most {2**31 - 1} are counted")
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "algorithm_version": ALGORITHM_VERSION,
        "mixshards_version": __version__,
        "order_id": "",
        "bytes_id": "",
        "num_rows": num_rows,
        "num_shards": layout.num_shards,
        "layout": asdict(layout),
        "mixture": settled.settings,
        "datasets": [
            {
                "name": dataset.name,
                "rows": dataset.num_rows,
                "row_range": dataset.rows,
                "columns": dataset.columns and dict(dataset.columns),
                **said,
                "share_given": given / num_rows if num_rows else 0.0,
                "rows_used": given,
                "epochs": given / dataset.num_rows,
                "row_bytes": dataset.row_bytes,
            }
            for dataset, said, given in zip(catalog.datasets, settled.datasets, used, strict=True)
        ],
        "schema": columns,
        "writer": asdict(options),
        "config": config.resolved(),
    }
    order_id = order_identity(
        order_settings(document),
        [
            (
                dataset.name,
                dataset.columns,
                dataset.rows,
                [(file.digest, file.num_rows) for file in dataset.files],
            )
            for dataset in catalog.datasets
        ],
    )
    document["order_id"] = order_id
    document["bytes_id"] = bytes_identity(order_id, columns, asdict(layout), asdict(options))
    return document


def _check_output_apart(folder: Folder, catalog: Catalog, specs: Sequence[DatasetSpec]) -> None:
    """Refuse an output folder whose shards would become sources themselves, or that holds some."""
    for spec in specs:
        for written in spec.paths:
            if would_take(written, catalog.base, folder, shard_name(0)):
                raise PlanError(
                    f"dataset {spec.name!r}: {written} would take the shards in {folder.root} for "
                    "data; choose an `output` apart from the sources, or a glob that leaves it out"
                )
    for dataset in catalog.datasets:
        for file in dataset.files:
            source = Folder.at(file.path, catalog.base)
            if source.filesystem == folder.filesystem and source.root.startswith(folder.root + "/"):
                raise PlanError(
                    f"dataset {dataset.name!r}: {file.path} lies inside the output folder "
                    f"{folder.root}; choose an `output` apart from the sources"
                )


def _layout(config: Config, settled: Settled, catalog: Catalog) -> Layout:
    """Batches per shard and row group; sizes in bytes become a constant number of batches here."""
    step = config.batches_per_step
    num_batches = settled.mixture.num_batches
    group = config.batches_per_row_group or (
        1 if step else max(1, int(_ROW_GROUP_ROWS // settled.batch_rows))
    )
    shard = config.batches_per_shard
    if shard is None:
        batch_bytes = settled.batch_rows * sum(
            share * dataset.row_bytes
            for share, dataset in zip(settled.shares, catalog.datasets, strict=True)
        )
        shard = int((config.shard_bytes or DEFAULT_SHARD_BYTES) / max(1.0, batch_bytes))
        unit = math.lcm(group, step or 1)
        shard = max(step or 1, shard - shard % (unit if shard >= unit else step or 1))
    layout = Layout(num_batches, shard, min(group, shard), step)
    if layout.num_shards > MAX_SHARDS:
        raise PlanError(
            f"{num_batches:,} batches of {shard} a shard make {layout.num_shards:,} shards; at "
            f"most {MAX_SHARDS:,} can be named: set a larger batches_per_shard"
        )
    return layout
