"""Which shards of a build stand already, so that it goes on instead of beginning again."""

from __future__ import annotations

import json
from dataclasses import asdict

from .manifest import MANIFEST, SCRATCH, Manifest, ManifestError
from .shard import SHARDS, Footer, ShardRecord, file_sha256, shard_name
from .storage import Folder, in_threads


def _journal(shard: int) -> str:
    return f"{SCRATCH}/shard-{shard:08d}.json"


class Standing:
    """Which shards already stand whole, by the digests that were taken when they were written.

    The digests are the finished mix's, or else the journal's: a small file a shard, written just
    after the shard was put in its place.
    """

    def __init__(self, folder: Folder, bytes_id: str) -> None:
        self._folder = folder
        self._bytes_id = bytes_id
        self._finished: list[ShardRecord] = []
        if folder.size(MANIFEST) is not None:
            try:
                manifest = Manifest.load(folder)
                if manifest.bytes_id == bytes_id:
                    self._finished = manifest.shards(folder)
            except ManifestError:
                pass  # nothing is known then, and every shard is written again

    def seem_all(self, num_shards: int) -> bool:
        """Whether this is a finished mix of which no shard is gone."""
        gone = {shard_name(shard) for shard in range(num_shards)} - {
            f"{SHARDS}/{name}" for name in self._folder.names(SHARDS)
        }
        return len(self._finished) == num_shards and not gone

    def keep(self) -> None:
        """Put what the finished mix knows into the journal, so that its manifest can go."""
        in_threads(self.note, self._finished)

    def note(self, record: ShardRecord) -> None:
        """Remember a shard that has just been put in its place."""
        entry = {"bytes_id": self._bytes_id, **asdict(record)}
        # One that a crash of the machine tears is not believed, and its shard written again.
        self._folder.put(_journal(record.shard), json.dumps(entry).encode(), flush=False)

    def find(self, expected: Footer) -> ShardRecord | None:
        """The record of a shard that stands whole and is this plan's, else None."""
        record = self._recorded(expected.shard)
        name = shard_name(expected.shard)
        if record is None or record.num_batches != expected.num_batches:
            return None
        if self._folder.size(name) != record.bytes:
            return None
        with self._folder.open(name) as file:
            return record if file_sha256(file)[0] == record.sha256 else None

    def _recorded(self, shard: int) -> ShardRecord | None:
        if shard < len(self._finished):
            return self._finished[shard]
        try:
            entry = json.loads(self._folder.read(_journal(shard)))
            if entry.pop("bytes_id") != self._bytes_id:
                return None
            return ShardRecord(**entry)
        except (OSError, ValueError, KeyError, TypeError):
            return None
