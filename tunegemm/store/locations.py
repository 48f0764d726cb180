"""Locations of the layers that are databases."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tunegemm.files import foreign
from tunegemm.resources import user_path

_FILE_NAME = "tunegemm.sqlite"
#: Suffixes of a database and of the files that SQLite reads together with it.
_SUFFIXES = ("", "-wal", "-shm", "-journal")


def project_location() -> str | None:
    """The project layer's location; None if there is no such layer, or others may have written it."""
    if configured := os.environ.get("TUNEGEMM_DB"):
        return configured
    here = _in_working_directory()
    return str(here) if here is not None and not _who_may_write(here) else None


def refused_project() -> str:
    """Why the database in the working directory is not read, and the remedy, in one line. Empty if it is read
    or does not exist.

    Users start programs in folders that others can fill: a checkout, a share, /tmp. Dispatch launches the
    kernels that a database names, so it reads one only if nobody but this user, or root, can have written it,
    as git does with repositories (its option safe.directory).
    """
    here = None if os.environ.get("TUNEGEMM_DB") else _in_working_directory()
    if here is None or not (why := _who_may_write(here)):
        return ""
    return (
        f"{here}: not read, since others may have written it ({why}); if you trust it, set "
        f"TUNEGEMM_DB={shlex.quote(str(here))}"
    )


def user_location() -> Path:
    """The user layer's location, whether or not the file exists."""
    return user_path("data") / _FILE_NAME


def _in_working_directory() -> Path | None:
    """The database in the working directory, or None. Another user may own it."""
    try:
        here = Path.cwd() / _FILE_NAME
        return here if here.is_file() else None
    except OSError:  # the working directory was deleted or may not be searched
        return None


def _who_may_write(here: Path) -> str:
    """Who else may write a file, its side files, or their folders, following links."""
    user = os.geteuid()
    try:
        if here.is_symlink() and (link := here.lstat()).st_uid != user:
            return f"{here}: a link of another user (uid {link.st_uid})"
        places = dict.fromkeys((here, here.resolve()))
        files = [place.with_name(place.name + suffix) for place in places for suffix in _SUFFIXES]
        for folder in dict.fromkeys(file.parent for file in files):
            # Root may change any file anyway, and its folders hold the files of others.
            if why := foreign(folder, folder.stat(), (user, 0)):
                return why
        for file in files:
            if file.exists() and (why := foreign(file, file.stat(), (user,))):
                return why
    except OSError as error:
        return f"{here}: {error.strerror}"
    return ""
