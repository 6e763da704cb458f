"""Settings of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from .mixes import write_sources

# In continuous integration the same commit is judged by the same examples each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the tests that need a cluster are told of it."""
    parser.addoption("--job_endpoint", help="Beam job service of a Flink or Spark to build with")
    parser.addoption(
        "--job_options",
        default="--environment_type=LOOPBACK",
        help="further Beam options for it; its workers must see the paths of this machine",
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a module's own, with the sources of three datasets in ``data``."""
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder / "data", web=[40, 0, 60], code=[50, 23], books=[11])
    return folder
