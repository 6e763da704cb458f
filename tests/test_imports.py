"""Arrows between modules run one way, and a trainer's install stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"apache_beam", "torch", "ruamel", "pydantic", "click", "rich", "yaml"}


def loaded_by(module: str) -> set[str]:
    """Modules that a fresh interpreter holds after importing one."""
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["pipeline.reader", "pipeline.manifest", "pipeline.shard"])
def test_reading_a_mix_loads_neither_config_nor_plan_nor_beam_nor_torch(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not {name.split(".")[0] for name in loaded} & HEAVY
    assert not loaded & {"pipeline.config", "pipeline.plan", "pipeline.catalog", "pipeline.gather"}


def test_verify_loads_nothing_that_only_building_needs() -> None:
    assert not {name.split(".")[0] for name in loaded_by("pipeline.verify")} & HEAVY


def test_a_worker_loads_nothing_that_only_planning_needs() -> None:
    loaded = loaded_by("pipeline.transforms")
    assert "apache_beam" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"pydantic", "ruamel", "click", "rich"}
    assert not loaded & {"pipeline.config", "pipeline.plan", "pipeline.cli"}


def test_core_loads_numpy_and_the_standard_library_only() -> None:
    loaded = {name.split(".")[0] for name in loaded_by("mixcore")}
    assert "numpy" in loaded
    assert not loaded & {*HEAVY, "pyarrow", "pipeline"}


def test_only_transforms_imports_beam() -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for package in ("mixcore", "pipeline")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if "apache_beam"
        in {
            name.split(".")[0]
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and node.level == 0
                else []
            )
        }
    }
    assert importing == {"pipeline/transforms.py"}
