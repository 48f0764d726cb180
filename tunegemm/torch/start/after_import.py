"""Waits for a module's import. Imports nothing but the standard library, since `sitecustomize` uses it."""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class AfterImport:
    """Finds a module as Python would, and calls a function when its import is done: a finder of
    `sys.meta_path`, which it leaves then.
    """

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self.name, self._begin, self._asked = name, begin, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name or self._asked:
            return None
        self._asked = True  # now ask the other finders
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        # A program may look for the spec without importing it, as libraries do to check for a package.
        def load_and_begin(module: ModuleType) -> None:
            load(module)
            sys.meta_path.remove(self)
            self._begin()

        loader.exec_module = load_and_begin
        return spec
