"""Packaging. `pip install .` is all a trainer needs; `.[build]` builds mixes."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "pipeline/version.py").read_text())[1]

BUILD = [
    "apache-beam>=2.60",
    "click>=8.1",
    "pydantic>=2.7",
    "rich>=13",
    "ruamel.yaml>=0.18",
]
# What else reads a finished mix, and is tested to.
INTEROP = [
    "datasets>=3.6",
    "duckdb>=2; python_version >= '3.11'",  # older ones cannot read token lists, as we encode them
    "grain>=0.2.8",
    "polars>=1",
    "torch>=2.3",
    "torchdata>=0.10",
]
# What reading is measured beside. MosaicML's takes an older huggingface-hub than newer datasets do:
# without the bound, pip tries their releases one by one, for longer than ten minutes.
PEERS = [
    "datasets>=3.6,<5",
    "grain>=0.2.8",
    "mosaicml-streaming>=0.13",
    "torch>=2.3",
    "torchdata>=0.10",
]
TEST = [
    "fsspec[http]>=2024.2",
    "hypothesis>=6.100",
    "moto[server]>=5",
    "mypy>=1.11",
    "pytest>=8",
    "pytest-xdist>=3.5",
    "ruff>=0.6",
]

setup(
    name="mixshards",
    version=VERSION,
    description="Settle a data mixture before training: exact, resumable Parquet shards",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["mixcore", "mixcore.*", "pipeline", "pipeline.*"]),
    package_data={"mixcore": ["py.typed"], "pipeline": ["py.typed"]},
    install_requires=["numpy>=1.26", "pyarrow>=18"],
    extras_require={
        "build": BUILD,
        "torch": ["torch>=2.3"],
        "gcp": [*BUILD, "apache-beam[gcp]>=2.60"],
        "dask": [*BUILD, "apache-beam[dask]>=2.60"],
        "s3": ["pyarrow>=18"],
        "fsspec": ["fsspec>=2024.2"],
        "interop": INTEROP,
        "test": [*BUILD, *TEST],
        "bench": [*BUILD, *PEERS],
    },
    entry_points={"console_scripts": ["mixshards=pipeline.cli:main"]},
)
