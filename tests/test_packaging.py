"""The source distribution that Beam sends to workers is whole, and works in a clean environment."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from apache_beam.internal import pickler

from pipeline.commit import commit
from pipeline.manifest import Manifest
from pipeline.plan import plan
from pipeline.transforms import _AssembleShards, _RequestRows, _ServeRows, _WriteSpan

from .mixes import WEIGHTS, config

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("mixcore", "pipeline")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Beam makes of `--setup_file ./setup.py`, from a copy of what it is made of."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("repository")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, folder)
    for name in PACKAGES:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=hidden)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", "made"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (made,) = (folder / "made").iterdir()
    return made


def test_the_sdist_holds_every_module_and_what_it_is_installed_from(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"setup.py", "pyproject.toml", "README.md"}
    for package in PACKAGES:
        files = (REPOSITORY / package).rglob("*")
        expected |= {
            str(path.relative_to(REPOSITORY))
            for path in files
            if path.suffix == ".py" or path.name == "py.typed"
        }
    assert {"mixcore/py.typed", "pipeline/py.typed", "pipeline/formats/parquet.py"} <= expected
    assert expected - held == set()


_TRAINER = """
import sys
import mixcore, pipeline.reader
print(pipeline.__file__)
print(sorted({"apache_beam", "pydantic", "click", "torch"} & set(sys.modules)))
"""

# What a worker does, up to where it writes shards, without the modules that it has no promise of.
_WORKER = """
import json, pickle, sys
lacking = frozenset(json.loads(sys.argv[3]))
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in lacking:
            raise ModuleNotFoundError(f"no module {name!r} here", name=name)
sys.meta_path.insert(0, Lacking())
from apache_beam.internal import pickler
import pipeline
functions = [pickler.loads(text) for text in pickle.load(open(sys.argv[1], "rb"))]
for function in functions:
    function.setup()
runs = list(functions[0].process((0, 13, 4)))
pickle.dump([record for _, records in runs for record in records], open(sys.argv[2], "wb"))
print(json.dumps([pipeline.__file__, sorted(name for name in sys.modules if sys.modules[name])]))
"""


@pytest.mark.slow
def test_the_sdist_installs_in_a_clean_environment_and_works_as_a_worker_there(
    sdist: Path, sources: Path, tmp_path: Path
) -> None:
    venv = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"]
    subprocess.run(venv, check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", sdist], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # What a container has beside it is this environment's; its own mixshards is not seen that way.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))

    def run(code: str, *arguments: Path | str) -> str:
        command = [python, "-c", code, *arguments]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout

    place, taken = run(_TRAINER).splitlines()
    assert place.startswith(str(packages))
    assert taken == "[]"

    settings = {"num_batches": 50, "on_exhausted": "repeat", "output": str(tmp_path / "out")}
    saved = plan(config(sources, WEIGHTS, **settings)).save()
    path = saved.folder.uri
    functions = [
        _WriteSpan(path, 1),
        _RequestRows(path, 8, 1),
        _ServeRows(path, 1, None),
        _AssembleShards(path, 1),
    ]
    (tmp_path / "functions").write_bytes(pickle.dumps([pickler.dumps(f) for f in functions]))
    page = (REPOSITORY / "docs" / "dataflow.md").read_text()
    (block,) = re.findall(r"^```text\n(pyarrow==.*?)^```", page, re.MULTILINE | re.DOTALL)
    listed = {_name(line) for line in block.split()}
    promised = _with_needs({"apache-beam", "numpy", "mixshards"} | listed)
    modules = metadata.packages_distributions()
    lacking = [name for name, owners in modules.items() if not promised & set(map(_name, owners))]
    assert {"pytest", "click", "rich"} <= set(lacking)

    places = (tmp_path / "functions", tmp_path / "records")
    place, used = json.loads(run(_WORKER, *places, json.dumps(lacking)).splitlines()[-1])
    assert place.startswith(str(packages))
    commit(saved, pickle.loads((tmp_path / "records").read_bytes()))
    assert Manifest.load(saved.folder).layout.num_shards == 13
    assert listed <= {_name(owner) for name in used for owner in modules.get(name, ())}


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-").replace(".", "-")  # type: ignore[index]


def _with_needs(names: set[str]) -> set[str]:
    """The distributions, and all that they need without extras."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another system or Python
            continue
        waiting |= {_name(need) for need in needs if "extra ==" not in need} - found
    return found
