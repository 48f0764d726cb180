"""Self-contained HTML pages from the templates in `assets/`, with a policy that forbids the network."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunegemm.report.text import clean

if TYPE_CHECKING:
    from jinja2 import Environment

_ASSETS = Path(__file__).parent / "assets"


def render(template: str, **values: Any) -> str:
    """A page from a template. All text in `values` is escaped unless it is `Markup`.

    The page asks nothing of the network: its content security policy allows its own script, by hash, and
    styles within it, and nothing else.
    """
    script = "\n" + (_ASSETS / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(values, script=script, digest=digest, style=style)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _shown(value: Any) -> Any:
    """What a template prints: text from elsewhere as `clean` has it, and then escaped."""
    return clean(value, 2000) if type(value) is str and not value.isprintable() else value
