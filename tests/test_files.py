"""Files that are replaced as a whole; on a disk that is full, tests/test_durability.py."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from tunegemm import files
from tunegemm.errors import TunegemmError
from tunegemm.files import replacing
from tunegemm.store import Database


def test_the_new_text_takes_the_place_of_the_old(tmp_path: Path) -> None:
    target, link = tmp_path / "a.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    for path, text in ((target, "new"), (link, "newer"), (tmp_path / "b.svg", "first")):
        with replacing(path) as part:
            assert part.suffix == path.suffix, "writers go by it"
            part.write_text(text)
            assert not path.exists() or path.read_text() != text
        assert path.read_text() == text
    assert link.is_symlink() and target.read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.svg", "link.json"]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as part:
        part.write_text("half of the n")
        raise KeyboardInterrupt
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_database_is_not_written_over(tmp_path: Path) -> None:
    """`--db x --out x` would end the database that is read."""
    target, link = tmp_path / "tuning.sqlite", tmp_path / "link"
    Database.open(target, create=True).close()
    link.symlink_to(target)
    before = target.read_bytes()
    log = tmp_path / "tuning.sqlite-wal"  # the latest records of an open database
    log.touch()
    journal = tmp_path / "tuning.sqlite-journal"  # with this one SQLite would not read the database
    for path in (target, link, log, journal):
        with pytest.raises(TunegemmError, match="a database, which is never overwritten; choose another"):
            files.write_text(path, "new")
    assert target.read_bytes() == before


def test_a_dash_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("-"), Path("-").absolute()):
        with pytest.raises(
            TunegemmError, match=r"^-: not the name of a file; standard output is /dev/stdout$"
        ):
            files.write_text(path, "new")
    assert not [*tmp_path.iterdir()]


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    with replacing(pipe) as part:
        part.write_text("text")
    reader.join()
    assert got == ["text"] and pipe.is_fifo()


def test_a_file_in_a_folder_that_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    monkeypatch.setattr(files.os, "access", lambda *_: False)  # root may write everywhere
    with replacing(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"


def test_a_small_file_is_read_into_a_small_buffer(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("x")
    tracemalloc.start()
    try:
        assert files.read_text(tmp_path / "small") == "x"
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()


def test_a_file_of_several_parts_is_read_whole(tmp_path: Path) -> None:
    content = bytes(range(251)) * 10_000
    (tmp_path / "large").write_bytes(content)
    assert files.read_bytes(tmp_path / "large") == content
