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
        "torch": ["torch>=2.2"],
        "gcp": [*BUILD, "apache-beam[gcp]>=2.60"],
        "dask": [*BUILD, "apache-beam[dask]>=2.60"],
        "s3": ["pyarrow>=18"],
        "fsspec": ["fsspec>=2024.2"],
        "test": [*BUILD, *TEST],
        "bench": [*BUILD],
    },
    entry_points={"console_scripts": ["mixshards=pipeline.cli:main"]},
)
