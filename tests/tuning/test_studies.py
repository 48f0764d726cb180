"""Where studies are kept: a journal or a database of Optuna's, and never the tuning database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from tests.search.test_study import landscape, study_of_landscape
from tunegemm.errors import StudyError
from tunegemm.search.study import ProblemStudy
from tunegemm.store import Database
from tunegemm.tuning import studies as kept_studies
from tunegemm.tuning.studies import Studies


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_studies, "LOCKED_S", 0.2)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "tuning.sqlite", create=True) as database:
        yield database


def searched(trials: int = 10) -> ProblemStudy:
    study = study_of_landscape(trials=trials)
    while batch := study.ask():
        for candidate in batch:
            study.tell(candidate, 1.0 if candidate.family == "cublaslt" else landscape(candidate.params))
    study.finish()
    return study


def kept(location: str, study: ProblemStudy) -> None:
    with Studies(location) as studies:
        studies.begin(study.study)
        studies.keep(study.study)
        studies.keep(study.study)


def loaded(location: str, name: str = "a problem") -> optuna.Study:
    """As a dashboard or a notebook reads it."""
    storage: optuna.storages.BaseStorage | str = location
    if "://" not in location:
        backend = optuna.storages.journal.JournalFileBackend(location)
        storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name=name, storage=storage)


@pytest.mark.parametrize("form", ["{}/study.log", "{}/new/folder/study", "sqlite:///{}/study.db"])
def test_optuna_reads_there_what_was_searched(tmp_path: Path, form: str) -> None:
    location, study = form.format(tmp_path), searched()
    kept(location, study)
    there = loaded(location)
    before = len(there.trials)
    assert [(t.params, t.value, t.user_attrs) for t in there.trials] == [
        (t.params, t.value, t.user_attrs) for t in study.study.trials
    ]
    assert there.best_value == study.study.best_value
    kept(location, searched(5))
    assert len(loaded(location).trials) > before, "a later search goes on in the same study"


@pytest.mark.parametrize("form", ["{}/study.log", "sqlite:///{}/study.db"])
def test_one_place_keeps_the_studies_of_many_problems(tmp_path: Path, form: str) -> None:
    location = form.format(tmp_path)
    for name in ("a problem", "another"):
        study = searched(5)
        vars(study.study)["study_name"] = name
        kept(location, study)
    assert all(loaded(location, name).trials for name in ("a problem", "another"))


def test_a_study_of_another_space_or_of_nobody_is_refused(tmp_path: Path) -> None:
    location = f"sqlite:///{tmp_path}/study.db"
    study = searched()
    kept(location, study)
    loaded(location).set_user_attr("space", "older")
    with Studies(location) as studies, pytest.raises(StudyError, match="search space 'older', not of"):
        studies.begin(study.study)
    foreign = f"sqlite:///{tmp_path}/foreign.db"
    theirs = optuna.create_study(study_name="a problem", storage=foreign, direction="maximize")
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with Studies(foreign) as studies, pytest.raises(StudyError, match="another program"):
        studies.begin(study.study)


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_the_tuning_database_is_refused(database: Database, form: str) -> None:
    """Also one that is not this tuning's."""
    location = form.format(database.location)
    for own in (database.location, None):
        with pytest.raises(StudyError, match="is a tuning database, which Optuna must not share"):
            Studies(location, database=own)


def test_one_that_will_be_the_tuning_database_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a tuning that stores nothing, as one that replays."""
    later = tmp_path / "later.sqlite"
    (tmp_path / "link").symlink_to(later)
    for location in (f"sqlite:///{later}", str(later), str(tmp_path / "link")):
        with pytest.raises(StudyError, match="is a tuning database"):
            Studies(location, database=later)
    monkeypatch.setenv("TUNEGEMM_DB", str(later))
    with pytest.raises(StudyError, match="is a tuning database"):
        Studies(str(later))
    assert not later.exists()
    server = sqlalchemy.make_url("postgresql+psycopg://theirs@localhost/tuning")
    with pytest.raises(StudyError, match="is a tuning database"):
        Studies("postgresql+psycopg://ours:secret@127.0.0.1:5432/tuning", database=server)


def test_a_locked_database_is_named(tmp_path: Path) -> None:
    import sqlite3

    location = f"sqlite:///{tmp_path}/study.db"
    kept(location, searched())
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudyError, match=r"study\.db is locked by another process"):
        kept(location, searched())
    other.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "a folder; give a file in it"),
        (lambda path: path.write_text("hello\n"), "not an Optuna journal"),
        (lambda path: path.write_text('{"format": "tunegemm-shapes"}\n'), "not an Optuna journal"),
        (lambda path: path.write_bytes(b"SQLite format 3\0"), "give it as sqlite:///"),
        (os.mkfifo, "a named pipe; give a file"),
        (lambda path: path.symlink_to("/dev/zero"), "a device; give a file"),
        (lambda path: path.write_text('{"op_code": 99, "worker_id": "x"}\n'), "written by a later Optuna"),
        (lambda path: path.write_text('{"op_code": 0}\n'), "cannot be used .* damaged"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, make, says: str) -> None:
    path = tmp_path / "study"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StudyError, match=says):
        Studies(str(path))
    assert "journal" not in says or path.read_bytes() == before, "Optuna appends"


@pytest.mark.parametrize(
    "location",
    ["nonsense://x", "sqlite://", "sqlite:///:memory:", "mysql+none://u:secret@h/d", "mysql://u:@secret@h/d"],
)
def test_a_url_that_is_none_is_one_line_without_its_password(location: str) -> None:
    with pytest.raises(StudyError) as raised:
        Studies(location)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)
    assert location in str(raised.value) or "secret" in location


@pytest.mark.parametrize("location", [3, b"study.log", "a\0b"])
def test_what_is_no_path_is_refused(location: Any) -> None:
    with pytest.raises(StudyError, match=r"^study .*(not a path|no NUL); give a file, or a URL"):
        Studies(location)


def test_a_pipe_is_refused_as_a_database_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "study")
    with pytest.raises(StudyError, match="a named pipe; give a file"):
        Studies(f"sqlite:///{tmp_path}/study")


def test_no_message_has_the_password_of_a_study(tmp_path: Path) -> None:
    study = searched()
    location = f"sqlite:///{tmp_path}/study.db"
    kept(location, study)
    loaded(location).set_user_attr("space", "older")
    with Studies(location) as studies:
        for url in ("postgresql://me:se%40cret@host/db", "postgresql://host/db?password=se%40cret"):
            studies.location = url
            with pytest.raises(
                StudyError, match=r"study postgresql://.*host/db.*: 'a problem' is of"
            ) as raised:
                studies.begin(study.study)
            assert "cret" not in str(raised.value)
            with pytest.raises(StudyError, match=r"\(no \*\*\* here\)"), kept_studies.translated(url):
                raise OSError("no se@cret here")


def test_a_storage_that_fails_meanwhile_does_not_end_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = searched()
    with Studies(str(tmp_path / "study.log")) as studies:
        studies.begin(study.study)
        (tmp_path / "study.log").unlink()
        (tmp_path / "study.log").mkdir()
        studies.keep(study.study)
        studies.keep(study.study)
    assert caplog.text.count("further trials are not kept there") == 1
