"""One self-contained HTML page: styles and script inside, and a policy that forbids everything else."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def page(title: str, body: str) -> str:
    """A document around a body. It asks nothing of the network: its content security policy allows its own
    script, by hash, and its own styles only."""
    script = "\n" + _asset("page.js") + "\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}
</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""


def select(name: str, label: str, options: list[tuple[str, str]]) -> str:
    """A filter; empty where there is no choice."""
    if len(options) < 2:
        return ""
    listed = "".join(f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in options)
    return f'<label>{escape(label)}<select name="{escape(name)}"><option value="">all</option>{listed}</select></label>'
