"""Hashes of kernel sources: the same for the same code, whatever is said about it."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import pytest

from tunegemm.generate import families
from tunegemm.generate.sources import code_of, hash_of_code, kernel_sources

SOURCE = '''"""A module."""

import math  # for pi


class Config:
    r"""More. # Not a comment."""

    stages: int
    """Depth."""

    def ptx(self):
        """What it is."""
        # Why it is so.
        return (
            "mov # not a comment"
            """
            a string of its own, in brackets
            """
        )
'''
REWORDED = '''"""Another docstring,
of two lines."""
import math
class Config:
    stages: int

    """Another."""

    def ptx(self):   
        return (  # another comment
            "mov # not a comment"
            """
            a string of its own, in brackets
            """
        )
'''  # noqa: W291


def test_words_about_the_code_are_left_out() -> None:
    assert code_of(SOURCE) == code_of(REWORDED)
    assert "Not a comment" not in code_of(SOURCE) and "mov # not a comment" in code_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mov # not", "add # not"),
        ("of its own, in", "of their own, in"),
        ("stages: int", "stages: float"),
        ("import math", "import cmath"),
        ("            a string", "              a string"),
    ],
)
def test_the_code_is_not(old: str, new: str) -> None:
    assert old in SOURCE
    assert code_of(SOURCE.replace(old, new)) != code_of(SOURCE)


@pytest.mark.parametrize(
    "line",
    [
        's = f"{x["#"]}" + y',
        "a = 'it\\'s' + b  ",
        'f("""x""")',
        't = "a" \\\n"b"',
        "#\n#",
        "'''\"\"\"'''",
        '""',
    ],
)
def test_any_code_ends(line: str) -> None:
    assert code_of(f"before()\n{line}\nafter()\n").count("after()") == 1


def test_what_may_be_part_of_an_fstring_stays() -> None:
    """Quotes within its expressions, since Python 3.12: what looks like a comment may be code."""
    assert code_of('s = f"{x["#"]}" + y\n') != code_of('s = f"{x["#"]}" + z\n')


def test_it_agrees_with_pythons_own_tokens() -> None:
    """On all of this package: no string is lost but docstrings."""
    root = Path(__file__).parents[2] / "tunegemm"
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in (tokenize.COMMENT, tokenize.NL)
        ]
        breaks = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        plain = {
            token.string
            for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
            if token.type == tokenize.STRING and not (before.type in breaks and after.type in breaks)
            if token.string[0] in "\"'"
        }
        code = code_of(source)
        assert all(string in code for string in plain), path


def test_the_hash_is_of_names_and_code(tmp_path: Path) -> None:
    for name, text in {
        "kernel.py": "x = 1\n",
        "kernel/deep/ring.py": "y = 2\n",
        "rules.py": "z = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = kernel_sources(tmp_path)
    assert [path.name for path in paths] == ["ring.py", "kernel.py"]
    assert len(hash_of_code(paths)) == 16 and hash_of_code(()) == ""
    assert hash_of_code(paths[:1]) != hash_of_code(paths[1:]) != hash_of_code(paths)


#: The code that tests/gpu ran and that was measured, by the family or the module. Before a line changes here,
#: tests/gpu runs the new kernel, and what ships is measured again.
MEASURED = {
    "cute_sm90": "bdc32b3c517007db",
    "gluon_wgmma": "5638d9e7df1a05a0",
    "triton_tma": "d4a024ddd22e62a2",
    "triton": "f8fe923c7f817c74",
    "cute_sm80": "02dd1cf7a0086911",
    "skinny": "c54f8e63f0edac42",
    "grouped": "89b050345842e358",
    "along_k": "09f210362224bac4",
    "routing": "5c2d737d78b9ad7f",
    "joined": "adb6a9a92245167c",
    "blocks": "811bd528ab083714",
    "block_groups": "4c0531c8aef3f5b9",
    "drawn": "f72bdd79b6421a24",
    "parted": "bebb2035dd967435",
    "quantize": "54ef155c82e65149",
}


@pytest.mark.parametrize("name", MEASURED)
def test_kernels_are_those_that_were_measured(name: str) -> None:
    own = kernel_sources(Path(families.__file__).parent / name)
    found = families.kernel_source_hash(name) if name in families.SHIPPED else hash_of_code(own)
    assert found == MEASURED[name], f"kernels of {name} are no longer those of the shipped records"
