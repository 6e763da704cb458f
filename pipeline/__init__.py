"""Everything of mixshards that touches the world: sources, plans, shards, manifests, readers.

Nothing is imported here, so that a trainer's ``pipeline.reader`` stays light.
"""
