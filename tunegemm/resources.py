"""Finds the data folders `search_spaces/` and `db/`, in a checkout and in an installed wheel.

The wheel carries both folders inside the package (see `[tool.hatch.build]` in pyproject.toml); a
checkout has them beside it.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """The path of a shipped file or folder, for example ``data_path("search_spaces", "cute_sm90.toml")``.

    Raises FileNotFoundError, naming both places looked at, when it is in neither.
    """
    tried = [_PACKAGE.joinpath(*parts), _PACKAGE.parent.joinpath(*parts)]
    for path in tried:
        if path.exists():
            return path
    raise FileNotFoundError(f"{'/'.join(parts)} is in neither {tried[0]} nor {tried[1]}")
