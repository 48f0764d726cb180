"""Puts the data folders into the package of a wheel; an editable install reads them from the checkout."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("search_spaces", "db")


class DataFolders(BuildHookInterface[Any]):
    """`search_spaces/` and `db/` become `tunegemm/search_spaces/` and `tunegemm/db/`.

    hatchling's static `force-include` would also copy them for `pip install -e`, into a folder
    `site-packages/tunegemm` without `__init__.py`: a stale second copy that shadows nothing but confuses.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"].update({folder: f"tunegemm/{folder}" for folder in FOLDERS})
