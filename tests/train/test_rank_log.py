"""Every rank has a log in the run's folder: its start, its warnings, and what ended it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ottava.train import rank_log
from ottava.train.rank_log import RankLog
from ottava.train.world import Place

PLACE = Place(3, 8, 1, 2)


def test_start_warnings_error_and_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    variables = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": "/logs/id/attempt_2/1/error.json"}
    with pytest.raises(RuntimeError), RankLog(tmp_path, PLACE, variables):
        logging.getLogger("ottava").warning("too early")
        rank_log.begin()
        logging.getLogger("ottava").warning("careful")
        raise RuntimeError("over")
    lines = (tmp_path / "logs" / "rank-3.log").read_text().splitlines()
    who = json.loads(lines[0].removeprefix("--- start "))
    assert (who["rank"], who["size"], who["restart"], who["launcher"]) == (3, 8, 2, "/logs/id/attempt_2/1")
    assert lines[1].endswith("WARNING ottava: careful") and lines[2].startswith("--- error ")
    assert lines[3].startswith("Traceback") and lines[-2] == "RuntimeError: over" and lines[-1] == "--- end"
    rank_log.begin()  # no log is open: nothing happens


def test_a_start_that_is_refused_leaves_the_run_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError), RankLog(tmp_path / "run", PLACE, {}):
        raise ValueError("the run is taken")
    assert not (tmp_path / "run").exists()


def test_an_error_before_the_run_begins_is_kept(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), RankLog(tmp_path, PLACE, {}):
        raise TimeoutError("rank 3 did not find rank 0")
    assert "TimeoutError: rank 3 did not find" in (tmp_path / "logs" / "rank-3.log").read_text()


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    with RankLog(tmp_path, PLACE, {}):
        rank_log.begin()
        logging.getLogger("ottava").warning("said on the console alone")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_disk_that_fills_up_or_becomes_read_only_does_not_change_how_a_run_ends(tmp_path: Path) -> None:
    """What could not be written was tried again when the file was closed: exit code 1 in the place of 7, or of 0."""
    with RankLog(tmp_path, PLACE, {}) as log:
        rank_log.begin()
        assert log._file is not None
        log._file.close()
        log._file = open("/dev/full", "w")  # noqa: SIM115
        logging.getLogger("ottava").warning("said on the console alone")
