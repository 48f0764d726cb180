"""Turns a location into an engine, and a driver's error into one line that names the remedy.

All code specific to SQLite or PostgreSQL is here, except the two forms of INSERT in `store`.
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

from tunegemm.errors import DatabaseError, TunegemmError
from tunegemm.files import cause, impossible, kind
from tunegemm.store.locations import project_location, refused_project, user_location
from tunegemm.store.waiting import left_s
from tunegemm.untrusted import shown

_log = logging.getLogger(__name__)

#: How long a statement waits for other transactions. One publication takes a millisecond; when eight writers
#: shared two busy cores, the slowest waited 5 s (benchmarks/database.py).
BUSY_TIMEOUT_S = 60.0

#: How long a server may take to answer a new connection.
CONNECT_TIMEOUT_S = 10

#: Prefixes of file-system types that several hosts may write to at once. The shared memory of a write-ahead
#: log belongs to one host, so two hosts that use it there destroy the file without an error.
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
        url = parsed(location)
        kind = url.drivername.partition("+")[0]
        if kind in ("postgresql", "postgres"):
            return url.set(drivername="postgresql+psycopg")
        if kind != "sqlite":
            raise DatabaseError(
                f"database {kind}://...: unknown kind of database; give postgresql://HOST/NAME or a path"
            )
        if not url.database or url.database == ":memory:":
            raise DatabaseError(
                f"database {display(location)}: a database in memory is lost at exit; give a path"
            )
        location = url.database
    if str(location) == ":memory:" or str(location).startswith("file:"):
        raise DatabaseError(
            f"database {shown(str(location))}: only SQLite itself understands this name; give a path"
        )
    try:
        if reason := impossible(location):
            raise ValueError(reason)
        path = Path(location)  # of ./~x it keeps ~x, which is no user
        return (path.expanduser() if str(location).startswith("~") else path).absolute()
    except (ValueError, RuntimeError, OSError) as error:  # NUL, ~nobody, a deleted working directory
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise DatabaseError(
            f"database {str(location)!r}: {reason}; give the full path of a database file, old or new"
        ) from None


def is_same(location: Path | URL, other: Path | URL) -> bool:
    """Whether two locations name one database. Files may be missing or links to each other; the user and the
    options of a server's URL do not count.
    """
    if isinstance(location, URL) or isinstance(other, URL):
        return (
            isinstance(location, URL) and isinstance(other, URL) and _on_server(location) == _on_server(other)
        )
    try:
        return location == other or location.samefile(other)
    except OSError:
        return False


def _on_server(url: URL) -> tuple[str, str, str]:
    """Host, port and name of a database."""
    host, port = (url.query.get(name) or part for name, part in (("host", url.host), ("port", url.port)))
    name = str(host or "localhost").lower().strip("[]")
    is_here = name in ("localhost", "127.0.0.1", "::1")
    return "localhost" if is_here else name, str(port or 5432), url.database or url.username or ""


def connect(location: Path | URL, *, read_only: bool) -> Engine:
    """An engine for a file or server; a writable file and its folder are created when missing.

    Raises DatabaseError when the file is missing, or cannot be created or opened.
    """
    if isinstance(location, URL):
        most_s = math.ceil(left_s(CONNECT_TIMEOUT_S))
        timeout = {} if "connect_timeout" in location.query else {"connect_timeout": max(1, most_s)}
        try:
            # Tuning publishes minutes apart, and the server may have closed the connection meanwhile.
            engine = create_engine(location, pool_pre_ping=True, connect_args=timeout)
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"{display(location)}: driver not installed ({error}); pip install 'tunegemm[postgres]', or "
                "give a path"
            ) from None
        event.listen(engine, "connect", _limit_waiting)
        return engine
    with translated(location):
        if read_only:
            if not _is_there(location):
                raise DatabaseError(f"{location}: no such database; `tunegemm tune` on a GPU creates it")
            options = read_only_options(location)
        else:
            _make_writable(location)
            _choose_journal(location)
            options = "mode=rwc"
    engine = create_engine("sqlite://", creator=lambda: open_file(location, options), poolclass=QueuePool)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _is_there(path: Path) -> bool:
    """Whether a file is there. Raises DatabaseError if it cannot be read, or is of another kind."""
    try:
        wrong_kind = kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DatabaseError(f"{path}: {cause(error, 'choose another path')}") from None
    if wrong_kind is not None:  # opening a pipe would block for ever
        raise DatabaseError(f"{path}: {wrong_kind}, not a database file; give the file's path")
    if not os.access(path, os.R_OK):
        raise DatabaseError(
            f"{path}: no permission to read it; change its permissions or choose another path"
        )
    return True


def check_writable(path: Path) -> None:
    """Raises DatabaseError if a file cannot be written: takes the write lock, and releases it.

    Permissions do not reveal read-only mounts, the state of WAL's side files, or root's rights.
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
    for place in (folder, path) if _is_there(path) else (folder,):
        # SQLite opens an unwritable file read-only, and reports that only at the first write.
        if not os.access(place, os.W_OK):
            raise DatabaseError(
                f"{path}: {place} is read-only; change its permissions or choose another path"
            )


def writer(engine: Engine) -> Engine:
    """The same engine (and pool), for transactions that write."""
    return engine.execution_options(**{_WRITES: True})


@contextmanager
def migrating(engine: Engine) -> Iterator[Connection]:
    """A transaction that may rebuild tables: SQLite alters a table by copying it, while others refer to it.

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
    """The location for messages, with a URL's passwords hidden."""
    url = _url(location)
    if url is None:
        text = str(location)
        return text.partition("://")[0] + "://..." if "://" in text else text
    query = {name: "..." if name.lower() in _SECRETS else value for name, value in url.query.items()}
    if isinstance(location, str) and query == url.query and url.password is None:
        return location  # as the user wrote it: rendered, it has escapes
    return url.set(query=query).render_as_string(hide_password=True)


def without_passwords(text: str, location: Path | URL | str) -> str:
    """A driver's message about a location, without its URL's passwords."""
    if (url := _url(location)) is None:
        return text.replace(str(location), display(location))
    secrets = [url.password, *(value for name, value in url.query.items() if name.lower() in _SECRETS)]
    for secret in filter(None, map(str, secrets)):
        for spelt in (secret, quote(secret), quote_plus(secret)):
            text = text.replace(spelt, "***")
    return text


def parsed(location: str, error: type[TunegemmError] = DatabaseError) -> URL:
    """The URL. Raises `error`, which quotes no part that may be a password's."""
    if (url := _url(location)) is None:
        raise error(
            f"{display(location)}: not a URL; give a path, or postgresql://USER:PASSWORD@HOST:PORT/NAME,"
            " where an @ of the password is %40"
        )
    return url


def _url(location: Path | URL | str) -> URL | None:
    """The parsed URL; None for a path or an invalid URL, such as one whose host has the end of a password."""
    if isinstance(location, Path) or "://" not in str(location):
        return None
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):  # the latter for a port that is not a number
        return None
    return None if "@" in (url.host or "") else url


#: Replaces bytes that are not UTF-8 when text is read. So only the damaged row fails to decode; an error here
#: would fail the whole query.
_TEXT = functools.partial(str, encoding="utf-8", errors="replace")


def open_file(path: Path, options: str) -> sqlite3.Connection:
    # isolation_level=None: `_begin` sends BEGIN itself, and DDL joins the transaction.
    # A pooled connection may serve a thread other than its opener, one at a time.
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
    # With WAL, NORMAL keeps every committed row if the process is killed; only a power cut may lose the last
    # rows, and the file stays consistent. Without WAL that needs FULL, SQLite's default.
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")


def _limit_waiting(connection: Any, _: Any) -> None:
    """Limits the waiting of a server's connection to the time left before the deadline, if there is one."""
    if (seconds := left_s(math.inf)) < math.inf:
        connection.execute(f"SET lock_timeout = {max(1, round(seconds * 1e3))}")
        connection.commit()


def _begin(connection: Connection) -> None:
    # A writer takes the lock before it reads. If a transaction reads first and writes later, and another one
    # writes in between, it gets SQLITE_BUSY at once, without the busy timeout.
    immediate = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def read_only_options(path: Path) -> str:
    """`mode=ro`, plus `immutable=1` where SQLite cannot create the two side files that reading WAL needs.

    That happens in folders without write permission, such as a system-wide layer. Without a `-wal` file,
    immutable mode misses nothing.
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
            pass  # damaged: the caller's first query reports it
    return "mode=ro"


def _choose_journal(path: Path) -> None:
    """Sets WAL for a new file, so that readers and a writer do not wait for each other.

    WAL needs memory shared between processes, which network and FUSE file systems lack. A file on such a
    file system gets a rollback journal, also if it was created elsewhere.
    """
    network = on_network(path)
    with closing(open_file(path, "mode=rwc")) as connection:
        try:
            if network:
                connection.execute("PRAGMA journal_mode = DELETE")
            elif connection.execute("PRAGMA page_count").fetchone() == (0,):
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")  # reading may succeed where writing fails
            connection.execute("ROLLBACK")
            return
        except sqlite3.OperationalError as error:
            name = error.sqlite_errorname
            if name.startswith("SQLITE_BUSY"):  # another process creates the file and sets its journal
                return
            if not name.startswith(("SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_PROTOCOL")):
                raise
    with closing(open_file(path, "mode=rwc")) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # WAL without shared memory, to leave WAL mode
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
    """Turns a driver's errors into DatabaseError: location, problem, remedy."""
    try:
        yield
    except (DBAPIError, sqlite3.Error, UnicodeDecodeError) as error:
        reason = reason_of(location, getattr(error, "orig", error))
        raise DatabaseError(f"{display(location)}: {reason}") from error


#: Problem and remedy, by the start of SQLite's error name.
_EXPLANATIONS = (
    ("SQLITE_NOTADB", "not a SQLite database; choose another path"),
    (
        "SQLITE_CORRUPT",
        "the database is damaged; move it away, or save its rows with `sqlite3 FILE .recover`",
    ),
    ("SQLITE_FULL", "the disk is full; free some space and continue: all published rows are kept"),
    ("SQLITE_READONLY", "the file or its folder is read-only; change its permissions or choose another path"),
    ("SQLITE_CANTOPEN", "cannot be opened; check that you may read and write the file and its folder"),
    ("SQLITE_PERM", "cannot be opened; check that you may read and write the file and its folder"),
    ("SQLITE_BUSY", "locked by another process for too long; end that process, then try again"),
    ("SQLITE_IOERR", "the file system cannot read or write it; check the disk or choose another path"),
)


#: By the start of PostgreSQL's SQLSTATE.
_SERVER_EXPLANATIONS = (
    ("28", "the server rejects this user or password; check the URL"),
    ("3D", "the server has no such database; create it with `createdb`"),
    ("42501", "this user lacks the right to do that on the server; grant it"),
    ("25006", "the server is read-only; give the URL of the primary"),
    ("53100", "the server's disk is full; free some space and continue: all published rows are kept"),
    ("53300", "the server has too many connections; raise its max_connections"),
    ("55P03", "another session holds its tables' lock for too long; end that session, then try again"),
    ("57P", "the server is shutting down; try again"),
)

#: Messages of refused connections, which lack a SQLSTATE, with the SQLSTATE for each.
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
        return f"{first_line}; check the address and that the server is running"
    # SQLite's own message about a damaged schema quotes it, which then is not UTF-8.
    usual = "SQLITE_CORRUPT" if isinstance(error, UnicodeDecodeError) else ""
    name = getattr(error, "sqlite_errorname", "") or usual
    for start, explanation in _EXPLANATIONS:
        if name.startswith(start):
            return explanation.replace("FILE", str(location)) + f" ({first_line})"
    return f"{first_line}; check the file and its folder"
