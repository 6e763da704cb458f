"""Everything of mixshards that touches the world: sources, plans, shards, manifests, readers.

Nothing is imported here, so that a trainer's ``pipeline.reader`` stays light.
"""

import os

# Arrow reads this when it is loaded. Huge pages cost it 0.3 s of zeroing and a tenth more memory.
os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")
