"""Finds the data folders `search_spaces/` and `db/`, in a checkout and in an installed wheel, and the user's.

The wheel carries both folders inside the package (see `[tool.hatch.build]` in pyproject.toml); a
checkout has them beside it.
"""

import os
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """The path of a shipped file or folder, for example ``data_path("search_spaces", "cute_sm90.toml")``.

    Raises FileNotFoundError, naming both places looked at, when it is in neither, as where the package was
    copied without its data.
    """
    tried = [_PACKAGE.joinpath(*parts), _PACKAGE.parent.joinpath(*parts)]
    for path in tried:
        if path.exists():
            return path
    raise FileNotFoundError(f"{'/'.join(parts)} is in neither {tried[0]} nor {tried[1]}")


def user_path(kind: Literal["data", "cache"]) -> Path:
    """The user's folder for data to keep (data) or to recreate (cache), whether or not it exists.

    If the user has no home folder, as a container's uid without an entry in passwd, a path that cannot exist.
    """
    import platformdirs  # dispatch of a library's kernels does without

    find = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
    try:
        place = find("tunegemm")
    except (RuntimeError, LookupError, OSError):
        place = "~"
    # Older versions keep the `~`, which would name a folder in the working directory.
    return Path(os.devnull, "no home folder") if place.startswith("~") else Path(place)
