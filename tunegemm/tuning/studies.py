"""Where studies are kept for optuna-dashboard and `optuna.visualization`: a journal file or a database.

A search works on a study in memory and copies its finished trials, so that neither a slow disk nor a
dashboard holds up a GPU. The tuning database is refused: Optuna and this project's migrations both claim its
table `alembic_version`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.errors import StudyError, TunegemmError, one_line
from tunegemm.files import impossible, kind
from tunegemm.search.search import quiet_optuna
from tunegemm.store.locations import project_location, user_location
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    import optuna
    from sqlalchemy import URL

#: Seconds for which another process may hold an SQLite file before it counts as locked.
LOCKED_S = 3.0
#: Tables that together identify a tuning database.
_OURS = {"fingerprints", "problems", "candidates", "measurements"}
#: The study attributes that must match, and their names in messages.
_SAME = {"problem": "", "device": "", "space": "search space "}

_log = logging.getLogger(__name__)


class Studies:
    """An Optuna storage with a study per problem. Raises StudyError if the storage cannot be used."""

    def __init__(self, location: str | Path, *, database: Path | URL | None = None) -> None:
        """location: a file, created if missing, or a URL.
        database: the tuning database, which is refused as a location; default the one that a tuning uses
        here.
        """
        from tunegemm.store.connection import resolve

        if reason := impossible(location):
            raise StudyError(
                f"study {shown(location)}: {reason}; give a file, or a URL as sqlite:///study.db"
            )
        self.location = str(location)
        with translated(self.location):
            own = database or resolve(project_location() or user_location())
            self._storage = _opened(self.location, own)
        self._studies: dict[str, optuna.Study] = {}
        self._copied: dict[str, set[int]] = {}
        self._known: dict[str, set[str]] = {}

    def __enter__(self) -> Studies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the storage; the copied trials are stored already."""
        if (engine := getattr(self._storage, "engine", None)) is not None:
            engine.dispose()

    def begin(self, study: optuna.Study) -> None:
        """Open the stored study of a search. Raises StudyError if it is of another problem or space."""
        import optuna

        name = study.study_name
        with translated(self.location):
            kept = optuna.create_study(
                study_name=name, storage=self._storage, direction="maximize", load_if_exists=True
            )
            trials, attributes = kept.get_trials(deepcopy=False), kept.user_attrs
            for key, value in study.user_attrs.items():
                if key in _SAME and attributes.get(key, None if trials else value) != value:
                    raise StudyError(
                        f"study {_hidden(self.location)}: {shown(name)} is of {_SAME[key]}"
                        f"{shown(attributes.get(key, 'another program'))}, not of {value}; give another file"
                    )
                if attributes.get(key) != value:
                    kept.set_user_attr(key, value)
        self._studies[name], self._copied[name] = kept, set()
        self._known[name] = {trial.user_attrs.get("candidate", "") for trial in trials}

    def keep(self, study: optuna.Study) -> None:
        """Copy newly finished trials. If the storage fails now, the search goes on without it."""
        name = study.study_name
        if (kept := self._studies.get(name)) is None:
            return
        copied = self._copied[name]
        try:
            with translated(self.location):
                for trial in study.get_trials(deepcopy=False):
                    if trial.number in copied or not trial.state.is_finished():
                        continue
                    attributes = trial.user_attrs
                    # Trials that the reopened study already has are not added again.
                    if attributes.get("stage") != "known" or attributes["candidate"] not in self._known[name]:
                        kept.add_trial(trial)
                    copied.add(trial.number)
        except StudyError as error:
            del self._studies[name]
            _log.warning("%s: further trials are not kept there", error)


@contextlib.contextmanager
def translated(location: str) -> Iterator[None]:
    """Convert errors of Optuna's storages, their drivers and file contents into one line that names the
    storage. It does not cover the errors that Optuna raises for a journal of another version."""
    try:
        with quiet_optuna():
            yield
    except TunegemmError:
        raise
    except Exception as error:
        from tunegemm.store.connection import without_passwords

        cause = error.__cause__ or error
        text = without_passwords(one_line(cause, 160), location)
        if isinstance(cause, AssertionError | LookupError | TypeError | AttributeError):
            text = f"{type(cause).__name__}: {text}; it may be damaged, or written by a later Optuna"
        if "locked" in str(cause):
            raise StudyError(
                f"study {_hidden(location)} is locked by another process; wait for it to end"
            ) from None
        raise StudyError(
            f"study {_hidden(location)} cannot be used ({text}); give a file, or a URL as sqlite:///study.db"
        ) from None


def _opened(location: str, database: Path | URL) -> Any:
    """Optuna's storage for a location. Raises StudyError for a tuning database and for what is no storage."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    from tunegemm.store.connection import is_same, parsed

    named = f"study {_hidden(location)}"
    ours = StudyError(f"{named}: it is a tuning database, which Optuna must not share; give another file")
    url = parsed(location, StudyError) if "://" in location else None
    if url is not None and url.get_backend_name() != "sqlite":
        if is_same(url, database) or _is_ours(url):
            raise ours
        return optuna.storages.RDBStorage(location)
    if url is not None and url.database in (None, "", ":memory:"):
        raise StudyError(f"{named}: in memory it is lost at exit; give sqlite:///FILE")
    path = Path(location if url is None else str(url.database))
    if isinstance(database, Path) and path.resolve() == database.resolve():
        raise ours
    try:
        if path.exists() and (result := kind(path.stat().st_mode)) is not None:  # a pipe could block
            raise StudyError(f"{named}: {result}; give a file{' in it' if result == 'a folder' else ''}")
        if url is None:
            _check_journal(path, ours)
            return optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise StudyError(f"{named} cannot be written ({error.strerror}); give another file") from None
    arguments = {"connect_args": {"timeout": LOCKED_S}}
    if path.exists() and _is_ours(url, **arguments):
        raise ours
    return optuna.storages.RDBStorage(location, engine_kwargs=arguments)


def _check_journal(path: Path, ours: StudyError) -> None:
    """Raises `ours` for a tuning database, StudyError for another file that is no journal, and OSError if it
    cannot be written."""
    import sqlalchemy

    path.parent.mkdir(parents=True, exist_ok=True)
    head = b""
    if path.exists():
        with path.open("rb") as file:
            head = file.read(64)
    if head.startswith(b"SQLite format 3"):
        with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):  # a damaged one
            if _is_ours(sqlalchemy.URL.create("sqlite", database=str(path))):
                raise ours
        raise StudyError(f"study {path}: an SQLite file; give it as sqlite:///{path}")
    if head and not (head.startswith(b"{") and b'"op_code"' in head):  # Optuna appends to any file
        raise StudyError(f"study {path}: not an Optuna journal; give another file")
    with path.open("ab"):
        pass  # it can be written; Optuna waits for its lock, and ends one that nobody holds


def _is_ours(url: URL, **arguments: Any) -> bool:
    """Whether a database has the tables of a tuning database."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **arguments)
    try:
        return set(sqlalchemy.inspect(engine).get_table_names()) >= _OURS
    finally:
        engine.dispose()


def _hidden(location: str) -> str:
    """Return a location without its password."""
    from tunegemm.store.connection import display

    return display(location) if "://" in location else location
