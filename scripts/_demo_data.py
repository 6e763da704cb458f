"""Text that every machine with Python has, as Parquet files in three datasets.

``code`` is the standard library's source, ``packages`` the source of what is installed beside it,
``prose`` their documentation: READMEs, licences, docstrings. A row is a block of lines with
``text``, ``source`` (the file), ``line`` (its first) and ``tokens`` (the text's UTF-8 bytes).
"""

from __future__ import annotations

import argparse
import ast
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[str, str, int]
Reading = Callable[[str], Iterator[tuple[int, str]]]
"""Pieces of a file's text, each with the line that it begins at."""

ROWS_PER_FILE = 8192
LARGEST_FILE = 1 << 20  # larger ones are generated tables, no text that a person wrote
LINES = {"code": (5, 16), "packages": (5, 16), "prose": (3, 12)}
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
_PROSE_NAMES = ("METADATA", "LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "AUTHORS")
_PROSE_ENDINGS = (".md", ".rst", ".txt")


def files(root: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Files below a folder whose names are wanted, sorted by path."""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED]
        found += [Path(folder, name) for name in names if wanted(name)]
    return sorted(found)


def blocks(text: str, first: int, least: int, most: int) -> Iterator[tuple[int, str]]:
    """Runs of lines: cut before a line that follows a blank one, and at ``most`` in any case."""
    lines = text.split("\n")
    begin, after_blank = 0, False
    for at, line in enumerate(lines):
        if at - begin >= (least if after_blank and line[:1].strip() else most):
            yield first + begin, "\n".join(lines[begin:at])
            begin = at
        after_blank = not line.strip()
    yield first + begin, "\n".join(lines[begin:])


def whole(text: str) -> Iterator[tuple[int, str]]:
    """The text itself."""
    yield 1, text


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes and functions that are longer than a line."""
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        # Only bodies of these are entered: walking every expression would take five times as long.
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and "\n" in found:
                yield node.body[0].lineno, found
            pending.extend(reversed(node.body))


def rows(paths: list[Path], root: Path, reading: Reading, lines: tuple[int, int]) -> Iterator[Row]:
    """Blocks of files in order; a file that cannot be read or parsed is passed over."""
    for path in paths:
        try:
            if path.stat().st_size > LARGEST_FILE:
                continue
            pieces = list(reading(path.read_text("utf-8")))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        source = path.relative_to(root).as_posix()
        for first, piece in pieces:
            for line, text in blocks(piece, first, *lines):
                if text.strip():
                    yield text.rstrip(), source, line


def as_table(part: list[Row]) -> pa.Table:
    """Rows as a table; the tokens are the text's bytes, taken from its buffer in one go."""
    texts, sources, lines = zip(*part, strict=True)
    text = pa.array(texts, pa.string())
    _, ends, data = text.buffers()
    bounds = np.frombuffer(ends, np.int32)[: len(text) + 1]
    values = np.frombuffer(data, np.uint8)[: bounds[-1]].astype(np.int32)
    return pa.table(
        {
            "text": text,
            "source": pa.array(sources, pa.string()),
            "line": pa.array(lines, pa.int32()),
            "tokens": pa.ListArray.from_arrays(pa.array(bounds), pa.array(values)),
        }
    )


def write(folder: Path, found: Iterator[Row]) -> tuple[int, int, int]:
    """Write a dataset over an earlier one; its rows, bytes of text and files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*.parquet"):
        old.unlink()
    count = size = number = 0
    while part := list(islice(found, ROWS_PER_FILE)):
        table = as_table(part)
        path = folder / f"part-{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=2048, compression="zstd")
        count += table.num_rows
        size += len(table["tokens"].combine_chunks().values)
        number += 1
    if not count:
        raise SystemExit(f"error: nothing to read for {folder.name} in this Python installation")
    return count, size, number


def main() -> None:
    """Write the three datasets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write <dataset>/part-*.parquet")
    parser.add_argument("--limit", type=int, help="read no more than this many files of each kind")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)  # others' old escapes are no concern here

    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))

    def read(
        kind: str, root: Path, wanted: Callable[[str], bool], reading: Reading
    ) -> Iterator[Row]:
        return rows(files(root, wanted)[: options.limit], root, reading, LINES[kind])

    def python(name: str) -> bool:
        return name.endswith(".py")

    def prose(name: str) -> bool:
        return name.startswith(_PROSE_NAMES) or name.endswith(_PROSE_ENDINGS)

    def all_prose() -> Iterator[Row]:
        for root in (packages, library):
            yield from read("prose", root, prose, whole)
        yield from read("prose", library, python, docstrings)

    datasets = {
        "code": read("code", library, python, whole),
        "packages": read("packages", packages, python, whole),
        "prose": all_prose(),
    }
    for name, found in datasets.items():
        begun = time.monotonic()
        count, size, number = write(options.folder / name, found)
        seconds = time.monotonic() - begun
        print(
            f"{name:8}  {count:7,} rows  {size / 1e6:5.1f} MB of text  {number:2} files  "
            f"{seconds:4.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
