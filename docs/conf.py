"""Sphinx: `make docs` builds the site from these pages and from the docstrings of the public names."""

from importlib.metadata import version as installed

project = "tunegemm"
author = "the tunegemm authors"
version = release = installed("tunegemm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Links to files that are not pages, such as sources and the changelog, work in the repository only.
suppress_warnings = ["myst.xref_missing", "myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = "tunegemm"
html_static_path: list[str] = []
