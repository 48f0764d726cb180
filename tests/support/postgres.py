"""A PostgreSQL cluster of the tests' own: on a free port, in a temporary folder, as an ordinary user."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

_START_S = 60.0


def binary(name: str) -> str | None:
    """Path of a program of the server: the newest of Debian's, which are not on PATH, or PATH's."""
    versions = [path for path in Path("/usr/lib/postgresql").glob("*") if path.name.isdigit()]
    for version in sorted(versions, key=lambda path: -int(path.name)):
        path = version / "bin" / name
        if os.access(path, os.X_OK):
            return str(path)
    return shutil.which(name)


class Cluster:
    """A running server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._names = (f"t{number}" for number in count())

    def url(self, database: str) -> str:
        return f"postgresql://tunegemm@127.0.0.1:{self.port}/{database}"

    def create(self, template: str = "template1") -> str:
        """The URL of a new database, a copy of the template, to which nobody may be connected."""
        name = next(self._names)
        self.execute(f'CREATE DATABASE {name} TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def execute(self, statement: str, url: str | None = None) -> int:
        """Runs one statement as it is; the number of rows it changed."""
        with psycopg.connect(url or self.url("postgres"), autocommit=True) as connection:
            return connection.execute(statement.encode()).rowcount


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Starts a cluster and ends it. The server refuses to run as root, so root runs it as another user."""
    initdb, postgres = binary("initdb"), binary("postgres")
    assert initdb is not None and postgres is not None
    # Not in pytest's folder: its parents may be entered by their owner only.
    with tempfile.TemporaryDirectory(prefix="tunegemm-pg-") as name:
        folder = Path(name)
        as_user: dict[str, object] = {"cwd": folder}
        if os.geteuid() == 0:
            user = _ordinary_user()
            os.chown(folder, user.pw_uid, user.pw_gid)
            as_user |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data = folder / "data"
        command = [initdb, "-D", data, "-U", "tunegemm", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **as_user)  # type: ignore[call-overload]
        port = _free_port()
        settings = {
            "port": port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": folder,
            "fsync": "off",  # the machine's crash is not what is tested
            "max_connections": 60,
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(  # type: ignore[call-overload]
                [postgres, "-D", data, *options], stdout=log, stderr=log, **as_user
            )
        try:
            running = Cluster(port)
            _wait(running, server, folder / "log")
            yield running
        finally:
            server.send_signal(signal.SIGINT)  # end now, but orderly
            server.wait(timeout=30)


def _wait(running: Cluster, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            running.execute("SELECT 1")
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text()[-2000:]
                raise RuntimeError(f"PostgreSQL does not start ({error}): {said}") from None
        time.sleep(0.05)  # then asked again: a server says nowhere else that it is ready


def _ordinary_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise RuntimeError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
