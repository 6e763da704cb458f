"""The command ``mixshards``: plan, build, inspect, verify."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, NoReturn

import click
from pyarrow import fs
from rich.console import Console
from rich.table import Table

from .config import byte_size
from .errors import MixError
from .manifest import Manifest, ManifestError, exact
from .plan import Plan
from .plan import plan as make_plan
from .progress import Watch, scans
from .shard import SHARDS, shard_name
from .storage import Folder
from .verify import Origin, origins
from .verify import verify as find_faults
from .version import __version__

_FAULTS = 50


class _Commands(click.Group):
    """A group whose commands end in one line for what a person can mend, and a code that tells."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (MixError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # whoever read our output has seen enough
            click.echo(f"error: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            _end_interrupted("")


def _end_interrupted(hint: str) -> NoReturn:
    click.echo(f"\ninterrupted{hint}", err=True)
    # At once: threads that are at work would hold the process until they are done.
    os._exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mixshards")
def main() -> None:
    """Settle a mixture of datasets before training, as Parquet shards that resume exactly."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")


def _console() -> Console:
    # A table that is piped keeps its columns whole, and a name in brackets is no style of ours.
    width = None if sys.stdout is not None and sys.stdout.isatty() else 10_000
    return Console(width=width, highlight=False, markup=False, emoji=False)


@main.command()
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the preview as JSON.")
def plan(config: str, as_json: bool) -> None:
    """Show what CONFIG (a YAML file) would build. Writes nothing."""
    preview = make_plan(config, scans()).preview()
    if as_json:
        click.echo(json.dumps(exact(preview), indent=2))
        return
    _show_plan(preview)


def _show_plan(preview: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("dataset")
    shown = [heading for heading in _COLUMNS if heading[1] in preview["datasets"][0]]
    for heading, _, _ in shown:
        table.add_column(heading, justify="right")
    for entry in preview["datasets"]:
        table.add_row(entry["name"], *(text(entry) for _, _, text in shown))
    console = _console()
    console.print(table)
    free = preview["free_bytes"]
    console.print(
        f"\n{preview['num_batches']:,} batches of {_batch(preview)} = "
        f"{preview['num_rows']:,} rows in {preview['num_shards']:,} shard(s) of at most "
        f"{min(preview['batches_per_shard'], preview['num_batches']):,} batches, "
        f"{preview['batches_per_row_group']:,} a row group ({_policy(preview)})\n"
        f"about {_bytes(preview['estimated_bytes'])} into {preview['output']}"
        + (f", {_bytes(free)} free" if free is not None else "")
        + f"\norder {preview['order_id'][:16]}  bytes {preview['bytes_id'][:16]}",
        soft_wrap=True,
    )
    _warn(preview)


def _first_batch(entry: dict[str, Any]) -> str:
    first = entry["first_batch"]
    return f"{first:,}" if first is not None else f"about {entry['about_batch']:,} (not in the mix)"


# Heading, key, and how an entry is told; a mixture without the key has no such column.
_COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("rows", "rows", lambda entry: f"{entry['rows']:,}"),
    ("files", "files", lambda entry: f"{entry['files']:,}"),
    ("dropped", "rows_dropped", lambda entry: f"{entry['rows_dropped']:,}"),
    ("weight", "weight", lambda entry: str(entry["weight"])),
    ("asked", "share_asked", lambda entry: _percent(entry["share_asked"])),
    ("given", "share_given", lambda entry: _percent(entry["share_given"])),
    ("rows used", "rows_used", lambda entry: f"{entry['rows_used']:,}"),
    ("epochs", "epochs", lambda entry: f"{entry['epochs']:.3f}"),
    ("first batch", "first_batch", _first_batch),
)


def _batch(preview: dict[str, Any]) -> str:
    """How many rows a batch has."""
    if "batch_size" in preview:
        return f"{preview['batch_size']:,}"
    return f"{preview['mean_batch_size']:,.1f} on average"


def _policy(preview: dict[str, Any]) -> str:
    """What else decides the batches, in a few words."""
    mixture = preview["mixture"]
    if mixture["kind"] == "weighted":
        return f"on_exhausted: {preview['on_exhausted']}"
    if mixture["kind"] == "frame_budget":
        times = f"each row {preview['decodes']:,.1f} times"
        gathered = preview["write_path"] == "gather"
        path = (
            f"by gather, decoding {times}"
            if gathered
            else f"by scatter instead of decoding {times}"
        )
        return (
            f"frame_budget: {mixture['frame_budget']:,}, {preview['padding']:.2%} padding; {path}"
        )
    ends = "endless" if mixture["passes"] is None else f"passes: {mixture['passes']:,}"
    return f"at most {mixture['max_simultaneous']:,} files at once, {ends}"


def _warn(preview: dict[str, Any]) -> None:
    for warning in preview["warnings"]:
        click.echo(f"warning: {warning}", err=True)


def _percent(share: float) -> str:
    return f"{share:.4%}" if share == 0 or share >= 1e-6 else f"{100 * share:.1e}%"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def _as_size(_: Any, __: Any, text: str | None) -> int | None:
    """A number of bytes, written as in a config."""
    try:
        return None if text is None else byte_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@main.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace another mix that stands in the output.")
@click.option("--threads", type=click.IntRange(1), help="Threads a worker; default: all cores.")
@click.option("--run-shards", type=click.IntRange(1), help="Shards that a thread writes in one go.")
@click.option(
    "--write-path",
    type=click.Choice(["gather", "scatter"]),
    help="How rows come together: slices of sources one after another, or rows from anywhere. "
    "Default: what is cheaper. The bytes are the same.",
)
@click.option(
    "--memory-limit",
    callback=_as_size,
    metavar="SIZE",
    help="Memory that a scatter on this machine may take to tell where rows belong, such as 4GiB; "
    "default: half of what is free. The rows themselves wait on the disk.",
)
@click.option(
    "--shared-filesystem",
    is_flag=True,
    help="Local paths mean the same folder on every worker of a remote runner.",
)
@click.option(
    "--keep-stage", is_flag=True, help="Leave what compressed sources were staged as: see README."
)
@click.option("--quiet", is_flag=True, help="Show nothing but warnings and errors.")
@click.argument("beam_options", nargs=-1, type=click.UNPROCESSED)
def build(
    config: str,
    overwrite: bool,
    threads: int | None,
    run_shards: int | None,
    write_path: Literal["gather", "scatter"] | None,
    memory_limit: int | None,
    shared_filesystem: bool,
    keep_stage: bool,
    quiet: bool,
    beam_options: tuple[str, ...],
) -> None:
    """Build the mix that CONFIG describes; BEAM_OPTIONS go to Apache Beam.

    Without a --runner the work is done on this machine, on all cores. A build that was stopped
    goes on where it was: the shards that stand whole are kept.
    """
    if config.startswith("-"):
        raise click.UsageError(f"CONFIG comes first, and Beam's options after it; found {config}")
    mix = make_plan(config, None if quiet else scans())
    (_warn if quiet else _show_plan)(mix.preview())
    begun = time.monotonic()
    stood = {} if quiet else _stamps(mix.folder)
    manifest = _run_build(
        mix,
        quiet,
        overwrite,
        lambda transforms: transforms.build(
            mix,
            beam_options,
            overwrite=overwrite,
            threads=threads,
            run_shards=run_shards,
            shared_filesystem=shared_filesystem,
            write_path=write_path,
            memory_limit=memory_limit,
            keep_stage=keep_stage,
        ),
    )
    if not quiet:
        kept = len(stood.items() & _stamps(mix.folder).items())
        stood_whole = f" ({kept:,} stood whole and were kept)" if kept else ""
        click.echo(
            f"built {mix.folder.root}: {manifest.layout.num_shards:,} shards{stood_whole}, "
            f"{int(manifest.document['num_rows']):,} rows, "
            f"{_bytes(int(manifest.document['num_bytes']))} in {time.monotonic() - begun:.1f} s"
        )


def _stamps(folder: Folder) -> dict[str, tuple[int, Any]]:
    """Size and time of writing of every shard that stands."""
    selector = fs.FileSelector(folder.path(SHARDS), allow_not_found=True)
    found = folder.filesystem.get_file_info(selector)
    return {info.path: (info.size, info.mtime_ns) for info in found if info.is_file}


def _run_build(mix: Plan, quiet: bool, overwrite: bool, run: Callable[[Any], Manifest]) -> Manifest:
    """Import Beam, which takes seconds and sets up logging of its own, and build under a watch."""
    logging.disable(logging.WARNING)
    from . import transforms

    logging.disable(logging.NOTSET)
    logging.getLogger().handlers.clear()
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(_not_ours)
    watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not quiet:
        watch = Watch(mix, overwrite)
    with watch, _interrupts_end(watch):
        return run(transforms)


def _not_ours(record: logging.LogRecord) -> bool:
    """Whether a log record is of no error of ours: those end the command in one line anyway."""
    return not re.search(r"\bpipeline\.[\w.]+Error: ", logging.Formatter().format(record))


@contextlib.contextmanager
def _interrupts_end(watch: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Let Ctrl-C end the process in here: Beam would take it for an error of one of its steps."""

    def end(*_: Any) -> NoReturn:
        watch.__exit__(None, None, None)  # which gives a terminal its cursor back
        _end_interrupted("; the same command goes on where it stopped")

    # An interrupt that whoever started us ignores or handles is left to them.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@main.command()
@click.argument("out")
@click.option("--shard", type=int, help="Show what makes up this shard.")
@click.option("--batch", type=int, help="Show what makes up this batch.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(out: str, shard: int | None, batch: int | None, as_json: bool) -> None:
    """Show what a finished mix OUT is; which source rows make up a shard or a batch."""
    if shard is not None and batch is not None:
        raise click.UsageError("give --shard or --batch, not both")
    folder = Folder.at(out)
    manifest = Manifest.load(folder)
    if shard is None and batch is None:
        click.echo(json.dumps(manifest.document, indent=2) if as_json else _summary(manifest))
        return
    if shard is not None:
        _within("shard", shard, manifest.layout.num_shards)
        first, count = manifest.layout.shard(shard)
        record = manifest.shards(folder)[shard]
        title = (
            f"{shard_name(shard)}: batches {first:,} to {first + count - 1:,}, "
            f"{record.num_rows:,} rows, {record.bytes:,} bytes, sha256 {record.sha256}"
        )
        state: Any = manifest.states(folder)[shard]
    else:
        assert batch is not None
        _within("batch", batch, manifest.layout.num_batches)
        first, count, state = batch, 1, None
        title = f"batch {batch:,}, in {shard_name(batch // manifest.layout.batches_per_shard)}"
    pieces = origins(folder, manifest, first, count)
    if as_json:
        found = {"title": title, "state": state, "rows": [asdict(piece) for piece in pieces]}
        click.echo(json.dumps(exact(found), indent=2))
        return
    console = _console()
    console.print(title, soft_wrap=True)
    if state is not None:
        console.print(f"state before it: {json.dumps(exact(state))}", soft_wrap=True)
    console.print(_origins_table(pieces))


def _within(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise MixError(f"{what} {number} is outside 0..{count - 1}")


def _origins_table(pieces: list[Origin]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("batch", "dataset", "epoch", "rows of the file", "count", "file"):
        table.add_column(heading, justify="left" if heading in ("dataset", "file") else "right")
    for piece in pieces:
        table.add_row(
            str(piece.batch),
            piece.dataset,
            str(piece.epoch),
            f"{piece.first_row}..{piece.first_row + piece.count - 1}",
            str(piece.count),
            piece.path,
        )
    return table


def _summary(manifest: Manifest) -> str:
    try:
        return _summary_of(manifest)
    except (LookupError, TypeError, ValueError) as error:
        raise ManifestError(f"the manifest cannot be shown: it is damaged: {error!r}") from error


def _weight(entry: Mapping[str, Any]) -> str:
    return f"weight {entry['weight']}, " if "weight" in entry else ""


def _summary_of(manifest: Manifest) -> str:
    document, layout = manifest.document, manifest.layout
    lines = [
        f"{document['mixture']['kind']} mix: {layout.num_batches:,} batches, "
        f"{int(document['num_rows']):,} rows, {layout.num_shards:,} shards of "
        f"{layout.batches_per_shard:,} batches, {_bytes(int(document['num_bytes']))}",
        f"format {document['format_version']}, algorithm {document['algorithm_version']}, "
        f"mixshards {document['mixshards_version']}, pyarrow {document['writer']['pyarrow']}",
        f"order {manifest.order_id}",
        f"bytes {manifest.bytes_id}",
    ]
    width = max(len(entry["name"]) for entry in document["datasets"])
    lines += [
        f"  {entry['name']:{width}}  {_weight(entry)}{_percent(entry['share_given'])} of "
        f"the mix, {int(entry['rows_used']):,} rows ({entry['epochs']:.3f} epochs of "
        f"{int(entry['rows']):,})"
        for entry in document["datasets"]
    ]
    columns = ", ".join(f"{column['name']}: {column['type']}" for column in document["schema"])
    return "\n".join([*lines, f"columns {columns}"])


@main.command()
@click.argument("out")
@click.option("--sources", is_flag=True, help="Also write every shard anew from the sources.")
@click.option("--json", "as_json", is_flag=True, help="Print the faults as JSON.")
def verify(out: str, sources: bool, as_json: bool) -> None:
    """Hold a finished mix OUT against its manifest and mixture; exit code 1 where it has faults."""
    faults = find_faults(out, sources)
    if as_json:
        click.echo(json.dumps([asdict(fault) for fault in faults], indent=2))
    elif faults:
        click.echo(f"{len(faults)} fault(s) in {out}:")
        for fault in faults[:_FAULTS]:
            click.echo(f"  {fault}")
        if len(faults) > _FAULTS:
            click.echo(f"  .. and {len(faults) - _FAULTS} more; --json lists all")
    else:
        manifest = Manifest.load(Folder.at(out))
        click.echo(
            f"{out} is whole: {manifest.layout.num_shards:,} shards, "
            f"{int(manifest.document['num_rows']):,} rows, every row where the mixture puts it"
            + (", and as the sources give it" if sources else "")
        )
    sys.exit(1 if faults else 0)
