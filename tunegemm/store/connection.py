"""From a location to an engine, and from a driver's error to one line that names the remedy.

What is special about SQLite or PostgreSQL is here, but for the two forms of INSERT in `store`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from tunegemm.errors import DatabaseError
from tunegemm.files import cause, impossible, kind
from tunegemm.store.locations import project_location, refused_project, user_location
from tunegemm.store.waiting import left_s
from tunegemm.untrusted import shown

_log = logging.getLogger(__name__)

#: How long a statement waits for others' transactions. One publication takes a millisecond; of eight writers
#: on two busy cores the unluckiest waited 5 s (benchmarks/database.py).
BUSY_TIMEOUT_S = 60.0

#: How long a server may take to answer a new connection.
CONNECT_TIMEOUT_S = 10

#: Beginnings of the file-system types that other hosts may write to at the same time. The shared memory
#: of a write-ahead log is one host's, so two hosts that use it there destroy the file, without an error.
_NETWORK_TYPES = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.", "gfs", "glusterfs", "gpfs", "lustre", "ncp", "nfs",
    "ocfs", "orangefs", "pvfs", "smb", "virtiofs", "wekafs",
)  # fmt: skip

#: Execution option of engines whose transactions write; read by the SQLite hook below.
_WRITES = "tunegemm_writes"


def resolve(location: str | Path | None) -> Path | URL:
    """A file's path or a server's URL; without a location, the narrowest existing layer."""
    if location is None:
        if refused := refused_project():
            _log.warning(refused)
        location = project_location() or user_location()
    if isinstance(location, str) and "://" in location:
        try:
            url = make_url(location)
        except (ArgumentError, ValueError):  # the latter for a port that is not a number
            raise DatabaseError(
                f"database {location.partition('://')[0]}://...: not a URL; give a path"
            ) from None
        kind = url.drivername.partition("+")[0]
        if kind in ("postgresql", "postgres"):
            return url.set(drivername="postgresql+psycopg")
        if kind != "sqlite":
            raise DatabaseError(
                f"database {kind}://...: not a kind that is known; give postgresql://HOST/NAME or a path"
            )
        if not url.database or url.database == ":memory:":
            raise DatabaseError(f"database {display(url)}: a database in memory is lost at exit; give a path")
        location = url.database
    if str(location) == ":memory:" or str(location).startswith("file:"):
        raise DatabaseError(
            f"database {shown(str(location))}: a name that only SQLite itself understands; give a path"
        )
    try:
        if reason := impossible(location):
            raise ValueError(reason)
        return Path(location).expanduser().absolute()
    except (ValueError, RuntimeError, OSError) as error:  # of NUL, of ~nobody, of a deleted working directory
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise DatabaseError(
            f"database {str(location)!r}: {reason}; give the full path of a file that is or can be there"
        ) from None


def is_same(one: Path | URL, other: Path | URL) -> bool:
    """Whether two locations are of one database. Files may be links to each other, or missing; a server's URL
    has a user and options, which do not change what it names.
    """
    if isinstance(one, URL) or isinstance(other, URL):
        return isinstance(one, URL) and isinstance(other, URL) and _on_server(one) == _on_server(other)
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False


def _on_server(url: URL) -> tuple[str, str, str]:
    """Host, port and name of a database."""
    host, port = (url.query.get(name) or given for name, given in (("host", url.host), ("port", url.port)))
    name = str(host or "localhost").lower().strip("[]")
    is_here = name in ("localhost", "127.0.0.1", "::1")
    return "localhost" if is_here else name, str(port or 5432), url.database or url.username or ""


def connect(location: Path | URL, *, read_only: bool) -> Engine:
    """An engine for a file or server; a writable file and its folder are created when missing.

    Raises DatabaseError when there is no such file, or when it can be neither created nor opened.
    """
    if isinstance(location, URL):
        most_s = math.ceil(left_s(CONNECT_TIMEOUT_S))
        timeout = {} if "connect_timeout" in location.query else {"connect_timeout": max(1, most_s)}
        try:
            # A connection may have been cut since its last use: tuning publishes minutes apart.
            engine = create_engine(location, pool_pre_ping=True, connect_args=timeout)
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"{display(location)}: no driver for it ({error}); pip install 'tunegemm[postgres]', or give "
                "a path"
            ) from None
        event.listen(engine, "connect", _limit_waiting)
        return engine
    with translated(location):
        if read_only:
            _check_readable(location)
            options = read_only_options(location)
        else:
            _make_writable(location)
            _choose_journal(location)
            options = "mode=rwc"
    engine = create_engine("sqlite://", creator=lambda: open_file(location, options), poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _check_readable(path: Path) -> None:
    try:
        found = kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise DatabaseError(f"{path}: no such database; `tunegemm tune` on a GPU creates it") from None
    except OSError as error:
        raise DatabaseError(f"{path}: {cause(error, 'choose another path')}") from None
    if found is not None:  # opening a pipe would wait for ever
        raise DatabaseError(f"{path}: {found}, not a database file; give the file's path")
    if not os.access(path, os.R_OK):
        raise DatabaseError(f"{path}: you may not read it; change its permissions or choose another path")


def check_writable(path: Path) -> None:
    """Raises DatabaseError if a file cannot be written: takes the write lock, and releases it.

    Permissions do not show read-only mounts, the state of WAL's side files, or what root may do.
    """
    with translated(path), closing(open_file(path, "mode=rw")) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _make_writable(path: Path) -> None:
    folder = Path(os.path.realpath(path)).parent  # the file's, where the path is a link
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"{path}: {error.strerror} while creating its folder; choose another path"
        ) from None
    places = [folder]
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DatabaseError(f"{path}: {cause(error, 'choose another path')}") from None
    else:
        _check_readable(path)
        places.append(path)
    for place in places:
        # SQLite opens a file that it may not write as read-only, and reports this only at the first write.
        if not os.access(place, os.W_OK):
            raise DatabaseError(
                f"{path}: {place} is read-only; change its permissions or choose another path"
            )


def writer(engine: Engine) -> Engine:
    """The same engine (and pool), for transactions that write."""
    return engine.execution_options(**{_WRITES: True})


@contextmanager
def migrating(engine: Engine) -> Iterator[Connection]:
    """A transaction that may rebuild tables: SQLite alters one by copying it, and others refer to it.

    Foreign keys cannot be switched off within a transaction (https://www.sqlite.org/lang_altertable.html,
    section 7); the migration checks them at its end.
    """
    with writer(engine).connect() as connection:
        driver = connection.connection.driver_connection
        if not isinstance(driver, sqlite3.Connection):
            with connection.begin():
                yield connection
            return
        driver.execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                yield connection
        finally:
            driver.execute("PRAGMA foreign_keys = ON")


#: Options of a URL that may hold passwords, besides the user's password.
_SECRETS = ("password", "sslpassword", "passwd", "pwd")


def display(location: Path | URL | str) -> str:
    """For messages: a URL's passwords are hidden."""
    url = _url(location)
    if url is None:
        text = str(location)
        return text.partition("://")[0] + "://..." if "://" in text else text
    query = {name: "..." if name.lower() in _SECRETS else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


def without_passwords(text: str, location: Path | URL | str) -> str:
    """A driver's message about a location, without the passwords of its URL."""
    if (url := _url(location)) is None:
        return text.replace(str(location), display(location))
    secrets = [url.password, *(value for name, value in url.query.items() if name.lower() in _SECRETS)]
    for secret in filter(None, map(str, secrets)):
        for spelt in (secret, quote(secret), quote_plus(secret)):
            text = text.replace(spelt, "***")
    return text


def _url(location: Path | URL | str) -> URL | None:
    """The parsed URL; None for a path or an invalid URL."""
    if isinstance(location, Path) or "://" not in str(location):
        return None
    try:
        return make_url(location)
    except (ArgumentError, ValueError):
        return None


#: Text of a damaged row may be no UTF-8. Read with a mark in its place it fails for itself, as any damage
#: does; as an error it would fail the query, and with it every other row.
_TEXT = functools.partial(str, encoding="utf-8", errors="replace")


def open_file(path: Path, options: str) -> sqlite3.Connection:
    # isolation_level=None: BEGIN is ours to send (see `_begin`), and DDL joins the transaction.
    # A pooled connection may serve another thread than the one that opened it, one at a time.
    connection = sqlite3.connect(
        f"file:{quote(os.fsencode(path))}?{options}",
        uri=True,
        timeout=left_s(BUSY_TIMEOUT_S),
        isolation_level=None,
        check_same_thread=False,
    )
    connection.text_factory = _TEXT
    return connection


def _prepare(connection: sqlite3.Connection, _: Any) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    # With WAL, NORMAL keeps every committed row when the process is killed; only a power cut may cost
    # the last ones, never the file's consistency. Without WAL that takes FULL, SQLite's default.
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")


def _limit_waiting(connection: Any, _: Any) -> None:
    """Limits how long a server's connection waits to the time that is left, if there is a deadline."""
    if (seconds := left_s(math.inf)) < math.inf:
        connection.execute(f"SET lock_timeout = {max(1, round(seconds * 1e3))}")
        connection.commit()


def _begin(connection: Connection) -> None:
    # A writer takes the lock before it reads. A transaction that reads first and writes later gets
    # SQLITE_BUSY at once, without the busy timeout, when another one wrote in between.
    immediate = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def read_only_options(path: Path) -> str:
    """`mode=ro`, and `immutable=1` where SQLite cannot make the two side files that reading WAL needs.

    That is so in a folder one may not write to, such as a system-wide layer. Without a `-wal` file
    nothing is left out by not looking at it.
    """
    with closing(open_file(path, "mode=ro")) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError as error:
            blocked = error.sqlite_errorname.startswith(
                ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR")
            )
            if blocked and not Path(f"{os.path.realpath(path)}-wal").exists():  # SQLite follows links
                return "mode=ro&immutable=1"
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            pass  # damaged: the caller's first query says so
    return "mode=ro"


def _choose_journal(path: Path) -> None:
    """WAL for a new file, so that readers and a writer do not wait for each other.

    WAL needs memory shared between processes, which network and FUSE file systems lack; there, or where
    a file made elsewhere was brought to, the file gets a rollback journal.
    """
    network = on_network(path)
    with closing(open_file(path, "mode=rwc")) as connection:
        try:
            if network:
                connection.execute("PRAGMA journal_mode = DELETE")
            elif connection.execute("PRAGMA page_count").fetchone() == (0,):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")  # a mere read may succeed where writing cannot
            connection.execute("ROLLBACK")
            return
        except sqlite3.OperationalError as error:
            name = error.sqlite_errorname
            if name.startswith("SQLITE_BUSY"):  # another process is creating the file, and chooses for all
                return
            if not name.startswith(("SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")):
                raise
    with closing(open_file(path, "mode=rwc")) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # WAL without shared memory, to get out of it
        connection.execute("PRAGMA journal_mode = DELETE")


def on_network(path: Path) -> bool:
    """Whether the file is, or would be, on a file system that other hosts may write to."""
    import psutil

    folder = path.resolve().parent
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    # If two mounts share a folder, the later mount hides the earlier.
    nearest = max(enumerate(mounts), key=lambda entry: (len(entry[1].mountpoint), entry[0]), default=None)
    return nearest is not None and nearest[1].fstype.startswith(_NETWORK_TYPES)


@contextmanager
def translated(location: Path | URL) -> Iterator[None]:
    """Turns the driver's errors into DatabaseError: the place, what is wrong, the remedy."""
    try:
        yield
    except DBAPIError as error:
        raise DatabaseError(f"{display(location)}: {reason_of(location, error.orig)}") from error
    except sqlite3.Error as error:
        raise DatabaseError(f"{display(location)}: {reason_of(location, error)}") from error
    except UnicodeDecodeError as error:  # SQLite's own message quotes a damaged schema
        damaged = sqlite3.DatabaseError(str(error))
        damaged.sqlite_errorname = "SQLITE_CORRUPT"
        raise DatabaseError(f"{display(location)}: {reason_of(location, damaged)}") from error


#: Problem and remedy, by the start of SQLite's error name.
_EXPLANATIONS = (
    ("SQLITE_NOTADB", "not a SQLite database; choose another path"),
    (
        "SQLITE_CORRUPT",
        "the database is damaged; move it away, or save its rows with `sqlite3 FILE .recover`",
    ),
    ("SQLITE_FULL", "the disk is full; free some space and go on, everything published is kept"),
    ("SQLITE_READONLY", "the file or its folder is read-only; change its permissions or choose another path"),
    ("SQLITE_CANTOPEN", "cannot be opened; check that you may read and write the file and its folder"),
    ("SQLITE_PERM", "cannot be opened; check that you may read and write the file and its folder"),
    (
        "SQLITE_BUSY",
        "locked by another process for too long; end that process, then try again",
    ),
    ("SQLITE_IOERR", "the file system fails to read or write it; check the disk or choose another path"),
)


#: By the start of PostgreSQL's SQLSTATE.
_SERVER_EXPLANATIONS = (
    ("28", "the server refuses this user or password; check the URL"),
    ("3D", "the server has no such database; create it with `createdb`"),
    ("42501", "the server lets this user not do that; grant it the rights"),
    ("25006", "the server is read-only; give the URL of the primary"),
    ("53100", "the server's disk is full; free some space and go on, everything published is kept"),
    ("53300", "the server has too many connections; raise its max_connections"),
    ("55P03", "another session locks its tables for too long; end that, then try again"),
    ("57P", "the server is shutting down; try again"),
)

#: Messages of refused connections, which have no SQLSTATE, and the SQLSTATE that each stands for.
_REFUSALS = (("authentication failed", "28"), ("no pg_hba.conf entry", "28"), ("role ", "28"),
             ("database ", "3D"), ("too many clients", "53300"), ("shutting down", "57P"))  # fmt: skip


def reason_of(location: Path | URL, error: BaseException | None) -> str:
    first_line = without_passwords(str(error).strip().partition("\n")[0], location)
    if isinstance(location, URL):
        code = getattr(error, "sqlstate", "") or ""
        _, fatal, reason = str(error).partition("FATAL:")
        if not code and fatal:
            code = next((state for words, state in _REFUSALS if words in reason), "")
        for start, explanation in _SERVER_EXPLANATIONS:
            if code.startswith(start):
                return f"{explanation} ({(reason or first_line).strip().partition(chr(10))[0]})"
        return f"{first_line}; check the address, and that the server runs"
    name = getattr(error, "sqlite_errorname", "") or ""
    for start, explanation in _EXPLANATIONS:
        if name.startswith(start):
            return explanation.replace("FILE", str(location)) + f" ({first_line})"
    return f"{first_line}; check the file and its folder"
