"""The last step of a build: hold what was written against the plan, then publish the manifest."""

from __future__ import annotations

from collections.abc import Iterable

from .manifest import MANIFEST, SCRATCH, put_table, shards_table, to_json
from .planned import Plan
from .shard import SHARDS, ShardRecord, shard_name
from .writing import BuildError


def commit(plan: Plan, records: Iterable[ShardRecord]) -> None:
    """Publish the manifest of a mix whose shards all stand; the last and only step that does.

    Records may come in any order and more than once, as runners deliver them.

    Raises:
        BuildError: shards are lacking, differ between deliveries, have other rows than planned, or
            strays lie among them. Nothing is published then.
    """
    layout = plan.layout
    by_shard: dict[int, ShardRecord] = {}
    for record in records:
        if by_shard.setdefault(record.shard, record) != record:
            raise BuildError(
                f"{shard_name(record.shard)}: was written twice and not alike: "
                f"{by_shard[record.shard]} and {record}"
            )
    lacking = [shard for shard in range(layout.num_shards) if shard not in by_shard]
    if lacking:
        raise BuildError(
            f"the runner lost {len(lacking)} of {layout.num_shards} shards, first "
            f"{_some(lacking)}; nothing was published: build again, and only those are written"
        )
    names = {shard_name(shard) for shard in range(layout.num_shards)}
    surplus = [shard for shard in by_shard if not 0 <= shard < layout.num_shards]
    if surplus:
        raise BuildError(f"the runner delivered shards that are not planned: {_some(surplus)}")
    for shard in range(layout.num_shards):
        record = by_shard[shard]
        first, batches = layout.shard(shard)
        expected = plan.manifest.group_rows(shard)
        if (record.first_batch, record.num_batches) != (first, batches) or (
            expected is not None and record.num_rows != sum(expected)
        ):
            raise BuildError(
                f"{shard_name(shard)}: expected batches {first} to {first + batches} with "
                f"{sum(expected or [])} rows, found {record}"
            )
    found = {f"{SHARDS}/{name}" for name in plan.folder.names(SHARDS)}
    if found != names:
        stray, gone = sorted(found - names), sorted(names - found)
        raise BuildError(
            f"{plan.folder.root}/{SHARDS}: "
            + "; ".join(
                f"{len(wrong)} file(s) {what}, first {wrong[0]}"
                for wrong, what in ((stray, "that no plan names"), (gone, "gone since written"))
                if wrong
            )
        )
    ordered = [by_shard[shard] for shard in range(layout.num_shards)]
    table = put_table(plan.folder, "shards", shards_table(ordered))
    document = dict(plan.manifest.document)
    document["num_rows"] = sum(record.num_rows for record in ordered)
    document["num_bytes"] = sum(record.bytes for record in ordered)
    document["tables"] = {**document["tables"], "shards": table}
    text = to_json(document)
    if plan.folder.size(MANIFEST) is None or plan.folder.read(MANIFEST) != text:
        for entry in document["tables"].values():
            plan.folder.flush(entry["path"])
        plan.folder.put(MANIFEST, text)
    plan.folder.delete_tree(SCRATCH)


def _some(shards: list[int]) -> str:
    return ", ".join(map(str, shards[:5])) + (", .." if len(shards) > 5 else "")
