"""The version of mixshards, as recorded in plans and manifests."""

__version__ = "0.1.0"
