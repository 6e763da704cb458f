"""From config and sources to a plan: mixture, layout and identities."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from mixcore import WeightedMixture

from .arrow_types import large
from .catalog import Catalog, DatasetSpec, scan_datasets, would_take
from .config import (
    DEFAULT_SHARD_BYTES,
    Config,
    UnweightedDatasetConfig,
    config_from_dict,
    load_config,
)
from .manifest import (
    ALGORITHM_VERSION,
    FORMAT_VERSION,
    Manifest,
    bytes_identity,
    order_identity,
)
from .mixtures import order_settings, rows_used
from .planned import DECODED, Plan, PlanError
from .settle import Settled, settle
from .shard import (
    MAX_SHARDS,
    Layout,
    WriterOptions,
    as_read_back,
    describe,
    shard_name,
    shard_schema,
)
from .storage import Folder, resolve
from .version import __version__

__all__ = ["Plan", "PlanError", "plan"]

_ROW_GROUP_ROWS = 2048
_ROW_GROUP_BYTES = 256 << 20
# What an array of text, bytes or lists holds with 32-bit offsets; and how many times more than
# estimated a column may take, for all that is known when a plan is made.
_ARRAY_BYTES = 2**31
_MARGIN = 8


def plan(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    scanned: Callable[[int, int], None] | None = None,
) -> Plan:
    """Settle a mix: scan the sources, fix length and layout, take the identities. Writes nothing.

    ``config`` is a path to a YAML file, a mapping of the same keys, or a Config. ``scanned`` is
    told how many source files are scanned, of how many.

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
        DatasetSpec(
            name,
            dataset.path,
            dataset.rows,
            dataset.columns,
            dataset.types,
            dataset.max_line_bytes,
            dataset.on_bad_line,
        )
        for name, dataset in config.datasets.items()
    ]
    catalog = scan_datasets(specs, base, missing_columns=config.missing_columns, scanned=scanned)
    _check_output_apart(folder, catalog, specs)
    settled = settle(config, catalog)
    layout = _layout(config, settled, catalog)
    catalog = replace(catalog, schema=_roomy(catalog, settled, layout))
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


def _reading(dataset: UnweightedDatasetConfig) -> dict[str, Any]:
    """Those of READING that a dataset's config sets."""
    found: dict[str, Any] = {}
    if dataset.types:
        found["schema"] = {name: str(kind) for name, kind in dataset.types.items()}
    if dataset.on_bad_line != "error":
        found["on_bad_line"] = dataset.on_bad_line
    return found


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
    reading = [_reading(dataset) for dataset in config.datasets.values()]
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
                **read,
                **({"bad_lines": dataset.bad_lines} if "on_bad_line" in read else {}),
                **said,
                "share_given": given / num_rows if num_rows else 0.0,
                "rows_used": given,
                "epochs": given / dataset.num_rows,
                "row_bytes": dataset.row_bytes,
            }
            for dataset, read, said, given in zip(
                catalog.datasets, reading, settled.datasets, used, strict=True
            )
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
                read,
            )
            for dataset, read in zip(catalog.datasets, reading, strict=True)
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
            filesystem, path = resolve(file.path, catalog.base)
            if path.startswith(folder.root + "/") and filesystem == folder.filesystem:
                raise PlanError(
                    f"dataset {dataset.name!r}: {file.path} lies inside the output folder "
                    f"{folder.root}; choose an `output` apart from the sources"
                )


def _roomy(catalog: Catalog, settled: Settled, layout: Layout) -> pa.Schema:
    """The schema, with 64-bit offsets for each column that may need them in some row group."""
    rows = settled.batch_rows * min(layout.batches_per_row_group, layout.num_batches)
    fields = []
    for column in catalog.schema:
        sizes = [dataset.column_bytes.get(column.name, 0.0) for dataset in catalog.datasets]
        if isinstance(settled.mixture, WeightedMixture):
            size = sum(share * size for share, size in zip(settled.shares, sizes, strict=True))
        else:
            size = max(sizes)  # a row group may be of one dataset alone
        over = rows * DECODED * size * _MARGIN > _ARRAY_BYTES
        fields.append(column.with_type(large(column.type)) if over else column)
    return pa.schema(fields)


def _layout(config: Config, settled: Settled, catalog: Catalog) -> Layout:
    """Batches per shard and row group; sizes in bytes become a constant number of batches here."""
    step = config.batches_per_step
    num_batches = settled.mixture.num_batches
    batch_bytes = settled.batch_rows * sum(
        share * dataset.row_bytes
        for share, dataset in zip(settled.shares, catalog.datasets, strict=True)
    )
    most_rows = _ROW_GROUP_ROWS // settled.batch_rows
    most_bytes = _ROW_GROUP_BYTES // max(1.0, DECODED * batch_bytes)
    group = config.batches_per_row_group or (1 if step else max(1, int(min(most_rows, most_bytes))))
    shard = config.batches_per_shard
    if shard is None:
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
