"""Tests that every kernel family must pass, for pytest; the author of a plug-in subclasses them.

    from tunegemm.testing import CompileTests, Examples, GeneratorTests

    EXAMPLES = Examples("my_family", good={"tile_m": 64, ...}, ...)

    class TestFamily(GeneratorTests):
        examples = EXAMPLES

    class TestKernels(CompileTests):
        examples = EXAMPLES

Install the package with the family first, so that its entry point is found. `FamilyTests` are for a library's
family, which compiles nothing. The families that ship pass the same tests. They need pytest but no GPU.
"""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError("tunegemm.testing needs pytest: pip install pytest") from error

pytest.register_assert_rewrite("tunegemm.testing.suite")

from tunegemm.testing.suite import (  # noqa: E402
    OTHERWISE,
    TOO_LARGE,
    CompileTests,
    Examples,
    FamilyTests,
    GeneratorTests,
    Rejection,
    compile_all,
)

__all__ = [
    "OTHERWISE", "TOO_LARGE", "CompileTests", "Examples", "FamilyTests", "GeneratorTests", "Rejection",
    "compile_all",
]  # fmt: skip
