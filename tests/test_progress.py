"""How far a build has come, as told from its folder while shards are really being written."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.gather import RunWriter
from pipeline.manifest import MANIFEST
from pipeline.plan import Plan, plan
from pipeline.progress import Watch, scans
from pipeline.transforms import build

from .mixes import config, write_sources

WEIGHTS = {"web": 3, "code": 2, "books": 1}
OFTEN = 0.02


@pytest.fixture
def saved(tmp_path: Path) -> Plan:
    """A plan of 8 shards of 32 rows (the last of 16), saved and not begun."""
    write_sources(tmp_path / "data", web=[100], code=[73], books=[11])
    return settled(tmp_path).save()


def settled(folder: Path, **keys: object) -> Plan:
    return plan(config(folder, WEIGHTS, **{"num_batches": 30, "on_exhausted": "repeat", **keys}))


class Shown:
    """What has been written to standard error so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    def lines(self) -> list[str]:
        self.text += self._capfd.readouterr().err
        return self.text.splitlines()

    def wait_for(self, what: str) -> str:
        return wait_for(lambda: next((x for x in self.lines() if re.match(what, x)), ""))


def wait_for(what: Callable[[], str]) -> str:
    for _ in range(1000):
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError("it was not shown within ten seconds")


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capfd)


def test_lines_tell_shards_speed_and_time_left_as_shards_are_written(
    saved: Plan, shown: Shown
) -> None:
    writer = RunWriter(saved)
    with Watch(saved, seconds=OFTEN):
        assert shown.wait_for("0/8 shards") == "0/8 shards, 0 rows/s, 0.0 MB/s"
        for count in range(1, 8):
            writer.write(count - 1, count)
            line = shown.wait_for(f"{count}/8 shards")
            told = re.fullmatch(
                rf"{count}/8 shards, ([\d,]+) rows/s, \d+\.\d MB/s, about \d+ s left", line
            )
            assert told, line
            assert 0 < int(told[1].replace(",", "")) < 32 * count / OFTEN
    assert not re.search(r"[\x1b\r]", shown.text)


def test_shards_of_an_unfinished_build_count_but_not_towards_the_speed(
    saved: Plan, shown: Shown
) -> None:
    RunWriter(saved).write(0, 5)
    with Watch(saved, seconds=OFTEN):
        assert shown.wait_for(".*") == "5/8 shards, 0 rows/s, 0.0 MB/s"


def test_shards_of_a_finished_mix_count(saved: Plan, shown: Shown) -> None:
    build(saved)
    with Watch(saved, seconds=OFTEN):
        assert shown.wait_for(".*") == "8/8 shards, 0 rows/s, 0.0 MB/s"


def test_of_a_mix_that_is_replaced_only_shards_that_are_kept_count_and_none_as_speed(
    saved: Plan, tmp_path: Path, shown: Shown
) -> None:
    build(saved)
    longer = settled(tmp_path, num_batches=60)  # 15 shards, of which the first 7 stand
    with Watch(longer, overwrite=True, seconds=OFTEN):
        assert shown.wait_for(".*") == "0/15 shards, 0 rows/s, 0.0 MB/s"
        longer = longer.save(overwrite=True)
        assert shown.wait_for(r"[1-9]\d*/15") == "8/15 shards, 0 rows/s, 0.0 MB/s"
        RunWriter(longer).write(7, 9)
        assert re.search(r"[1-9][\d,]* rows/s.* about \d+ s left", shown.wait_for("9/15"))


def test_what_was_counted_stays_counted_when_the_mix_is_published(
    saved: Plan, shown: Shown
) -> None:
    with Watch(saved, seconds=OFTEN):
        shown.wait_for("0/8 shards")
        build(saved)
        shown.wait_for("8/8 shards")
        lines = len(shown.lines())
        wait_for(lambda: "more" if len(shown.lines()) > lines + 3 else "")
    counts = [int(line.partition("/")[0]) for line in shown.lines()]
    assert counts == sorted(counts)
    assert saved.folder.size(MANIFEST) is not None


def test_notes_that_another_plan_left_do_not_count(
    saved: Plan, tmp_path: Path, shown: Shown
) -> None:
    RunWriter(saved).write(0, 8)
    other = settled(tmp_path, batch_size=6).save(overwrite=True)
    with Watch(other, overwrite=True, seconds=OFTEN):
        assert shown.wait_for(".*").startswith("0/8 shards, ")
        RunWriter(other).write(0, 3)
        assert shown.wait_for("3/8 shards")


def test_a_watch_ends_at_once_and_with_an_error(saved: Plan, shown: Shown) -> None:
    before = threading.active_count()
    begun = time.monotonic()
    with pytest.raises(KeyError), Watch(saved, seconds=60):
        raise KeyError("of the build")
    assert time.monotonic() - begun < 5
    assert threading.active_count() == before
    assert shown.lines() == []


def test_a_terminal_shows_a_bar_that_grows_and_is_wiped_at_the_end(
    saved: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    text = ""

    def seen(what: str) -> str:
        nonlocal text
        with contextlib.suppress(BlockingIOError):
            text += os.read(master, 65536).decode(errors="replace")
        return "yes" if re.search(what, text) else ""

    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Watch(saved):
            wait_for(lambda: seen("0/8 shards"))
            RunWriter(saved).write(0, 6)
            wait_for(lambda: seen(r"6/8 shards .*rows/s, [\d.]+ MB/s"))
        wait_for(lambda: seen(r"\x1b\[\?25h"))  # the cursor is back
    assert "building" in text
    assert "━" in text
    assert text.rstrip().endswith("\x1b[2K")  # and the line is empty
    os.close(master)


def test_scans_are_told_once_they_take_long(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(sources, WEIGHTS, num_batches=3)
    plan(settings, scans())
    assert capsys.readouterr().err == ""
    plan(settings, scans(seconds=0))
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"scanned {n}/6 source files" for n in range(1, 7)]
