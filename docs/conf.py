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
autodoc_typehints = "both"
autodoc_typehints_description_target = "all"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# Two hyphens are the beginning of an option, not a dash.
smartquotes = False

html_theme = "furo"
html_title = "tunegemm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
