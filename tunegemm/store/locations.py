"""Where the layers that are databases are."""

from __future__ import annotations

import os
from pathlib import Path

from tunegemm.resources import user_path

_FILE_NAME = "tunegemm.sqlite"


def project_location() -> str | None:
    """Where the project's layer is; None when there is none."""
    configured = os.environ.get("TUNEGEMM_DB")
    if configured:
        return configured
    try:
        here = Path.cwd() / _FILE_NAME
        return str(here) if here.is_file() else None
    except OSError:  # a working directory that was deleted, or that one may not search
        return None


def user_location() -> Path:
    """Where the user's layer is, whether or not the file exists."""
    return user_path("data") / _FILE_NAME
