"""Everything of mixshards that touches the world: sources, plans, shards, manifests, readers.

Nothing is imported here, so that a trainer's ``pipeline.reader`` stays light.
"""

import os

# Arrow reads these when it is loaded. Huge pages cost it 0.3 s of zeroing and a tenth more memory;
# memory that is let go and taken again for every row group is better kept for five seconds.
os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "5000")
