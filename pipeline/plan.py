"""From config and sources to a plan: mixture, layout, identities, and a preview for a person."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from mixcore import Allocation, Mixture, WeightedMixture
from mixcore.weighted import batches_filled, batches_until_seen, first_unfillable

from .catalog import Catalog, Dataset, DatasetSpec, SourceFile, scan_datasets, would_take
from .config import DEFAULT_SHARD_BYTES, Config, config_from_dict, load_config
from .errors import MixError
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
from .version import __version__

_ROW_GROUP_ROWS = 2048
_MOST_BATCHES = 10**8


class PlanError(MixError):
    """The mix that a config asks for cannot be made, or not there."""


@dataclass(frozen=True)
class Plan:
    """A mix that is settled and not yet written.

    ``manifest`` is what will be published, less the shards table. ``schema`` is the shards' own.
    """

    folder: Folder
    catalog: Catalog
    manifest: Manifest
    schema: pa.Schema
    options: WriterOptions

    @property
    def layout(self) -> Layout:
        """How batches fall into shards and row groups."""
        return self.manifest.layout

    @functools.cached_property
    def mixture(self) -> Mixture:
        """What decides the order."""
        return self.manifest.mixture()

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
                    states_table(self.manifest.mixture(), self.layout.boundaries()),
                ),
            },
        }
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
        return cls(folder, catalog, manifest, shard_schema(schema), WriterOptions(**writer))

    def preview(self) -> dict[str, Any]:
        """What a person decides from before anything is written; JSON-able.

        ``first_batch`` is exact within the mix; beyond it ``about_batch`` is the batch by which
        half an item is due, the place where a dataset of small weight tends to come first.
        """
        document, layout = self.manifest.document, self.layout
        mixture = self.manifest.mixture()
        assert isinstance(mixture, WeightedMixture)
        allocation = mixture.allocation
        first = allocation.first_reaching([1] * len(mixture.names), layout.num_batches)
        datasets, warnings = [], []
        for entry, batch, weight in zip(
            document["datasets"], first, allocation.weights, strict=True
        ):
            due = -(-allocation.total // (2 * allocation.batch_size * weight))
            about = None if batch is not None else max(due, layout.num_batches)
            shown = {key: entry[key] for key in _PREVIEW_KEYS}
            datasets.append({**shown, "first_batch": batch, "about_batch": about})
            if batch is None:
                warnings.append(
                    f"dataset {entry['name']!r} gets no row: at weight {weight} of "
                    f"{allocation.total} its first item is due about batch {about}, and the mix "
                    f"ends at {layout.num_batches}"
                )
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
            "batch_size": allocation.batch_size,
            "on_exhausted": document["config"]["on_exhausted"],
            "num_rows": document["num_rows"],
            "num_shards": layout.num_shards,
            "estimated_bytes": estimated,
            "free_bytes": free,
            "datasets": datasets,
            "warnings": warnings,
        }

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
            raise PlanError(
                f"{folder.root}: {unplanned[0]} (and {len(unplanned) - 1} more) have no place in "
                f"this mix of {self.layout.num_shards} shards; move them away, or build with "
                "--overwrite"
            )

    def _difference(self, other: Manifest) -> str:
        """Where another plan is not this one, for a message."""
        ours, theirs = self.manifest.document, other.document
        found = [
            f"dataset {b['name']!r}: {key} {a[key]!r} there, {b[key]!r} here"
            for a, b in zip(theirs["datasets"], ours["datasets"], strict=False)
            for key in ("name", "weight", "row_range", "columns")
            if exact(a[key]) != exact(b[key])
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
    elif not isinstance(config, Config):
        config = load_config(config)
    base = os.path.abspath(config.base)
    folder = Folder.at(config.output, base)
    specs = [
        DatasetSpec(name, dataset.path, dataset.rows, dataset.columns)
        for name, dataset in config.datasets.items()
    ]
    catalog = scan_datasets(specs, base)
    _check_output_apart(folder, catalog, specs)
    allocation = Allocation(
        dict(zip(config.datasets, config.weights, strict=True)), config.batch_size
    )
    mixture = WeightedMixture(
        allocation=allocation,
        dataset_rows=tuple(dataset.num_rows for dataset in catalog.datasets),
        num_batches=_length(config, allocation, catalog),
        repeat=config.on_exhausted == "repeat",
    )
    layout = _layout(config, allocation, catalog, mixture.num_batches)
    options = WriterOptions(config.compression, config.compression_level)
    schema = shard_schema(catalog.schema)
    return Plan(
        folder=folder,
        catalog=catalog,
        manifest=Manifest(_document(config, catalog, mixture, layout, options, schema)),
        schema=schema,
        options=options,
    )


def _document(
    config: Config,
    catalog: Catalog,
    mixture: WeightedMixture,
    layout: Layout,
    options: WriterOptions,
    schema: pa.Schema,
) -> dict[str, Any]:
    allocation = mixture.allocation
    columns = describe(as_read_back(schema))
    order_id = order_identity(
        mixture.state_kind,
        allocation.batch_size,
        allocation.weights,
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
    bytes_id = bytes_identity(order_id, columns, asdict(layout), asdict(options))
    num_rows = layout.num_batches * allocation.batch_size
    offsets = allocation.offsets(layout.num_batches)
    most = max(
        offset // dataset.num_rows
        for offset, dataset in zip(offsets, catalog.datasets, strict=True)
    )
    if most >= 2**31:
        raise PlanError(f"a dataset would be read {most} times; at most {2**31 - 1} are counted")
    return {
        "format_version": FORMAT_VERSION,
        "algorithm_version": ALGORITHM_VERSION,
        "mixshards_version": __version__,
        "order_id": order_id,
        "bytes_id": bytes_id,
        "num_rows": num_rows,
        "num_shards": layout.num_shards,
        "layout": asdict(layout),
        "mixture": {
            "kind": mixture.state_kind,
            "state_kind": mixture.state_kind,
            "rows_per_batch": mixture.rows_per_batch,
            "batch_size": allocation.batch_size,
            "repeat": mixture.repeat,
            "arithmetic": allocation.arithmetic,
        },
        "datasets": [
            {
                "name": dataset.name,
                "weight": weight,
                "rows": dataset.num_rows,
                "row_range": dataset.rows,
                "columns": dataset.columns and dict(dataset.columns),
                "share_asked": weight / allocation.total,
                "share_given": used / num_rows,
                "rows_used": used,
                "epochs": used / dataset.num_rows,
                "row_bytes": dataset.row_bytes,
            }
            for dataset, weight, used in zip(
                catalog.datasets, allocation.weights, offsets, strict=True
            )
        ],
        "schema": columns,
        "writer": asdict(options),
        "config": config.resolved(),
    }


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


def _length(config: Config, allocation: Allocation, catalog: Catalog) -> int:
    """How many batches the mix has under the config's policy for datasets that run out.

    Raises:
        PlanError: a dataset cannot give what the mix needs of it.
    """
    rows = [dataset.num_rows for dataset in catalog.datasets]
    step = config.batches_per_step or 1
    if config.num_batches is None:
        _check_ends(config, allocation, rows)
    if config.on_exhausted == "repeat":
        if config.num_batches is not None:
            return config.num_batches
        return -(-batches_until_seen(allocation, rows) // step) * step
    if config.on_exhausted == "stop":
        filled = batches_filled(allocation, rows)
        wanted = filled if config.num_batches is None else min(filled, config.num_batches)
        if wanted < step:
            needed = allocation.offsets(step)
            name, has, need = next(
                (name, has, need)
                for name, has, need in zip(allocation.names, rows, needed, strict=True)
                if need > has
            )
            raise PlanError(
                f"dataset {name!r}: has {has} row(s), but the first {step} batch(es) need {need} "
                "of them, so not one step can be filled; give it more data or less weight, or set "
                "on_exhausted: repeat"
            )
        return wanted - wanted % step
    assert config.num_batches is not None  # the config refuses `error` without a length
    first = first_unfillable(allocation, rows, config.num_batches)
    offsets = allocation.offsets(config.num_batches)
    lacking = [
        f"dataset {name!r}: has {has:,} row(s), but {config.num_batches:,} batches need {need:,}; "
        f"the first batch it cannot fill is {batch:,}"
        for name, has, need, batch in zip(allocation.names, rows, offsets, first, strict=True)
        if batch is not None
    ]
    if lacking:
        least = min(batch for batch in first if batch is not None)
        shorter = f"set num_batches to at most {least}, " if least else ""
        raise PlanError(
            "\n".join(lacking)
            + f"\nThe way out: {shorter}give more data or less weight, or choose on_exhausted: "
            "stop (end there) or repeat (begin such a dataset again)"
        )
    return config.num_batches


def _check_ends(config: Config, allocation: Allocation, rows: Sequence[int]) -> None:
    """Refuse a mix whose length was left to the data, and is beyond what anybody trains on."""
    batches = [
        count * allocation.total // (allocation.batch_size * weight)
        for count, weight in zip(rows, allocation.weights, strict=True)
    ]
    decides = max if config.on_exhausted == "repeat" else min
    length, name, weight = decides(zip(batches, allocation.names, allocation.weights, strict=True))
    if length > _MOST_BATCHES:
        raise PlanError(
            f"dataset {name!r}: at weight {weight} of {allocation.total} it is used up after about "
            f"{length:,} batches, and only then on_exhausted: {config.on_exhausted} ends the mix; "
            "set num_batches, or give it more weight"
        )


def _layout(config: Config, allocation: Allocation, catalog: Catalog, num_batches: int) -> Layout:
    """Batches per shard and row group; sizes in bytes become a constant number of batches here."""
    step = config.batches_per_step
    group = config.batches_per_row_group or (
        1 if step else max(1, _ROW_GROUP_ROWS // config.batch_size)
    )
    shard = config.batches_per_shard
    if shard is None:
        batch_bytes = config.batch_size * sum(
            weight / allocation.total * dataset.row_bytes
            for weight, dataset in zip(allocation.weights, catalog.datasets, strict=True)
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
