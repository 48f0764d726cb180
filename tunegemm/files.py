"""The only module that opens files for reading and replaces them when writing.

An error is one line with the true cause and a remedy, of the class that the caller names. Text is UTF-8
whatever the locale is.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from tunegemm.errors import FileError, TunegemmError

#: No file of this project comes near: a million measurements are some 1.2 GB of JSON.
_LARGEST_BYTES = 4 * 1024**3
_PART_BYTES = 1024**2

#: How long to wait for a reader of a named pipe before writing to it.
_READER_WAIT_S = 5.0

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
}  # fmt: skip

#: The end of the names of files that SQLite reads together with a database.
_SIDE_FILE = re.compile(r"-(wal|shm|journal)$")

#: First remedies for some errors; the caller adds others.
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EACCES: "change the permissions of it or of its folders",
    errno.EPERM: "change the permissions of it or of its folders",
    errno.EISDIR: "give a file in it",
    errno.ENXIO: "start the program that reads the pipe first",
}


def cause(error: OSError, remedy: str) -> str:
    """The system's message, the remedy for that error, and `remedy`."""
    first = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror or error}; {first + ', or ' if first else ''}{remedy}"


def kind(mode: int) -> str | None:
    """The kind of a file that is not regular, such as ``a folder``; None for a regular one."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")


def foreign(path: Path, status: os.stat_result, owners: Collection[int]) -> str:
    """Why others may change a file or folder, by its owner and its mode; empty if they may not."""
    if status.st_uid not in owners:
        return f"{path}: owned by another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path}: writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def read_bytes(path: Path, error: type[TunegemmError] = FileError) -> bytes:
    """The content of a regular file or of an open descriptor (``/dev/stdin``, ``<(command)``).

    Devices and named pipes, which may never end, are rejected. Raises `error`.
    """
    with _explained(path, error, "give a file that can be read"):
        number = descriptor(path)
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if number is None else os.dup(number)
        with os.fdopen(opened, "rb") as stream:
            result = kind(os.fstat(opened).st_mode)
            if result is not None and (number is None or result == "a folder"):
                raise error(f"{path}: {result}, not a file; give a file that can be read")
            # By parts: to read up to N bytes Python asks for room for N, which a small host does not have.
            parts = iter(lambda: stream.read(_PART_BYTES), b"")
            content = b"".join(islice(parts, _LARGEST_BYTES // _PART_BYTES + 1))
    if len(content) > _LARGEST_BYTES:
        raise error(f"{path}: over {_LARGEST_BYTES} B; give a smaller file")
    return content


def read_text(path: Path, error: type[TunegemmError] = FileError) -> str:
    """A file's text, without a byte order mark. Raises `error` as `read_bytes`, and for other than UTF-8."""
    try:
        return read_bytes(path, error).decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        raise error(f"{path}: not UTF-8 text (byte {bad.start}); give a text file") from None


def write_text(path: Path, text: str, error: type[TunegemmError] = FileError) -> None:
    """Replaces a file by a text, as `replacing`."""
    with replacing(path, error) as part:
        part.write_bytes(text.encode("utf-8", "backslashreplace"))


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents. Raises FileError."""
    with _explained(path, FileError, "choose another --out"):
        path.mkdir(parents=True, exist_ok=True)


def check_target(
    path: Path, error: type[TunegemmError] = FileError, reads: Iterable[str | Path] = ()
) -> None:
    """Raises `error` for ``-``, for a folder, for a SQLite database, which may be the one that is read, and
    for one of the files in `reads`; others of these need not exist.
    """
    with _explained(path, error, "choose another --out"):
        if path.name == "-":
            raise error("-: not the name of a file; standard output is /dev/stdout")
        old = _status(path)
        if descriptor(path) is not None:
            return
        if old is not None and stat.S_ISDIR(old.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        place = path.resolve()
        main = place.with_name(_SIDE_FILE.sub("", place.name))  # SQLite would read a new side file with it
        if any((found := _status(each)) and _is_database(each, found) for each in (place, main)):
            raise error(f"{path}: a database, which is never overwritten; choose another --out")
        if old is not None and any(_is_same(other, old) for other in reads):
            raise error(f"{path}: this command reads it, and would overwrite it; choose another --out")


def _is_same(path: str | Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(Path(path).stat(), status)
    except (OSError, ValueError):
        return False


@contextmanager
def replacing(path: Path, error: type[TunegemmError] = FileError) -> Iterator[Path]:
    """A path to write to, with the same suffix; the written file replaces `path` at the end.

    If an exception passes, `path` stays as it was. A regular file is replaced atomically and keeps its owner
    and mode; a link stays, and its target is replaced. A pipe, a device, an open descriptor such as
    ``/dev/stdout``, and a file in a folder that accepts no new files, get the content when it is complete.
    Raises `error`, as `check_target` does before anything is computed.
    """
    with _explained(path, error, "choose another --out"):
        number, old = descriptor(path), _status(path)
        check_target(path, error)  # now, not when all is computed
        target = path if number is not None or (old and kind(old.st_mode)) else path.resolve()
        if target is path and not path.is_absolute():
            target = Path.cwd() / path  # the working directory may change before the end
        if number is None and (old is None or not kind(old.st_mode)) and os.access(target.parent, os.W_OK):
            part = target.with_name(f".{os.getpid()}-{threading.get_ident()}.{target.name[-64:]}")
            try:
                _create(part, old)
                yield part
                with part.open("rb") as stream:
                    os.fsync(stream.fileno())
                part.replace(target)
            finally:
                with suppress(OSError):
                    part.unlink(missing_ok=True)
            return
        if number is None and old is None:  # in a folder that is missing or accepts no new files
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o666))
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, target.name[-64:])
            yield part
            with part.open("rb") as source, os.fdopen(_writable(target, number), "wb") as stream:
                shutil.copyfileobj(source, stream)


def _is_database(path: Path, status: os.stat_result) -> bool:
    if kind(status.st_mode):  # opening a pipe would block, or consume its data
        return False
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except PermissionError:  # an unreadable file may still be writable
        return False


def _create(part: Path, old: os.stat_result | None) -> None:
    """An empty file with the old one's mode and owner, before it has any content."""
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        if old is not None:
            with suppress(OSError):  # only root may give a file away
                os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _writable(path: Path, number: int | None) -> int:
    if number is not None:
        return os.dup(number)
    flags, deadline = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK, time.monotonic() + _READER_WAIT_S
    while True:
        try:
            descriptor = os.open(path, flags)
            os.set_blocking(descriptor, True)
            return descriptor
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # then try again: nothing signals a pipe's new reader


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def descriptor(path: Path) -> int | None:
    """The number of this process's open descriptor that ``/dev/stdout``, ``/dev/fd/N`` or a link names.

    None for every other path.

    Opening such a path again would overwrite the beginning of a file that a shell appends to.
    """
    for _ in range(8):
        if path.name.isdecimal() and os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd":
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def impossible(path: object) -> str:
    """Why no file can have that path; empty if one can."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        return "not a path"
    try:
        return "a path has no NUL" if b"\0" in os.fsencode(path) else ""
    except UnicodeEncodeError:
        return "it has characters that file names cannot have"


@contextmanager
def _explained(path: Path, error: type[TunegemmError], remedy: str) -> Iterator[None]:
    if reason := impossible(path):
        raise error(f"{str(path)!r}: {reason}; {remedy}")
    try:
        yield
    except OSError as bad:
        raise error(f"{path}: {cause(bad, remedy)}") from None
