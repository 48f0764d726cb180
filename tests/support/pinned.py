"""Values that tests pin: what is computed now, beside what lies in tests/data/pinned.

They see a changed operator or constant anywhere on the way. Where the change is meant, look at the difference
and write the values anew, each by the module of its test:

    python -m tests.support.pinned tests.model.test_values
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "pinned"


def assert_pinned(module: str, values: dict[str, Any], *, of: str = "") -> None:
    """values: JSON's; floats may differ by rounding. of: what the keys begin with that are compared."""
    stored = json.loads(_path(module).read_text())
    stored = {name: value for name, value in stored.items() if name.startswith(of)}
    assert values.keys() == stored.keys()
    for name, value in values.items():
        assert _is_same(json.loads(json.dumps(value)), stored[name]), (
            f"{name}: if this change is meant: python -m tests.support.pinned {module}"
            f"\n{json.dumps(stored[name])}\n{json.dumps(value)}"
        )


def _path(module: str) -> Path:
    return FOLDER / f"{module.removeprefix('tests.')}.json"


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and one == other


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    for name in sys.argv[1:]:
        FOLDER.mkdir(exist_ok=True)
        found = {key: _short(value) for key, value in importlib.import_module(name).values().items()}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
        _path(name).write_text("{\n" + lines + "\n}\n")
