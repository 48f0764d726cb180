"""Candidate and SearchSpace: identity, order, files good and bad."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import SpaceError

PARAMETERS = {"compile": ("tile_m", "schedule"), "launch": ("swizzle_size",)}
GOOD = """
family = "demo"
[compile]
tile_m = [64, 128, 256]
schedule = ["cooperative", "pingpong"]
[launch]
swizzle_size = [1, 4]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "space.toml"
    path.write_text(text)
    return path


class TestCandidate:
    ONE = Candidate.make("demo", {"tile_m": 64, "schedule": "pingpong"}, {"swizzle_size": 4})

    def test_order_of_parameters_does_not_matter(self) -> None:
        other = Candidate.make("demo", {"schedule": "pingpong", "tile_m": 64}, {"swizzle_size": 4})
        assert other == self.ONE
        assert hash(other) == hash(self.ONE)
        assert other.digest == self.ONE.digest

    def test_look_up(self) -> None:
        assert self.ONE["tile_m"] == 64
        assert self.ONE["swizzle_size"] == 4
        with pytest.raises(KeyError):
            self.ONE["stages"]

    def test_launch_and_kernel(self) -> None:
        other = self.ONE.with_launch(swizzle_size=1)
        assert other != self.ONE
        assert other.kernel == self.ONE.kernel
        assert self.ONE.kernel.launch_params == ()
        assert self.ONE["swizzle_size"] == 4, "with_launch must leave the original as it is"

    def test_where_a_parameter_lives_is_part_of_the_identity(self) -> None:
        assert Candidate.make("demo", {"x": 1}).digest != Candidate.make("demo", {}, {"x": 1}).digest

    def test_json_there_and_back(self) -> None:
        flags = Candidate.make("demo", {"swap_ab": True, "tile_m": 64}, {"split_k": 1})
        for candidate in (self.ONE, flags, Candidate("demo")):
            assert Candidate.from_json(candidate.to_json()) == candidate

    def test_digest_is_the_same_in_every_process(self) -> None:
        code = (
            "from tunegemm.describe.space import Candidate;"
            "compiled = {'tile_m': 64, 'schedule': 'pingpong'};"
            "print(Candidate.make('demo', compiled, {'swizzle_size': 4}).digest)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == self.ONE.digest
        assert len(self.ONE.digest) == 16

    def test_pickles_after_its_caches_are_filled(self) -> None:
        assert self.ONE.digest and self.ONE.params
        assert pickle.loads(pickle.dumps(self.ONE)) == self.ONE

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "3", "null", '{"family": "demo"}', '{"family":"f","compile":[1],"launch":{}}']
    )
    def test_not_json_of_a_candidate(self, text: str) -> None:
        with pytest.raises(SpaceError, match="not a stored candidate"):
            Candidate.from_json(text)

    def test_printed(self) -> None:
        assert str(self.ONE) == "demo schedule=pingpong tile_m=64 swizzle_size=4"


class TestSpace:
    def test_sizes_and_order(self, tmp_path: Path) -> None:
        space = SearchSpace.load(write(tmp_path, GOOD), parameters=PARAMETERS)
        assert (space.family, space.compile_size, space.launch_size, space.size) == ("demo", 6, 2, 12)
        kernels = list(space.kernels())
        assert len(set(kernels)) == 6
        assert [kernel["tile_m"] for kernel in kernels] == [64, 64, 128, 128, 256, 256]
        everything = {launch for kernel in kernels for launch in space.launches(kernel)}
        assert len(everything) == space.size
        assert {launch.kernel for launch in everything} == set(kernels)

    def test_a_space_without_launch_parameters(self, tmp_path: Path) -> None:
        text = 'family = "demo"\n[compile]\ntile_m = [64]\n[launch]\n'
        space = SearchSpace.load(write(tmp_path, text))
        assert space.size == 1
        assert list(space.launches(next(space.kernels()))) == list(space.kernels())

    def test_the_source_is_no_part_of_its_identity(self, tmp_path: Path) -> None:
        one = SearchSpace.load(write(tmp_path, GOOD))
        assert one.source == tmp_path / "space.toml"
        (tmp_path / "more").mkdir()
        assert SearchSpace.load(write(tmp_path / "more", GOOD)) == one

    @pytest.mark.parametrize(
        ("old", "new", "named"),
        [
            ("tile_m", "tile_n", r"\[compile\] unknown key 'tile_n'; did you mean 'tile_m'\?"),
            ("swizzle_size", "swizle_size", r"\[launch\] unknown key 'swizle_size'; did you mean 'swizz"),
            ("schedule", "zzz", r"\[compile\] unknown key 'zzz'; known keys: tile_m, schedule"),
            ("[launch]", "[launches]", r"unknown key 'launches'; did you mean 'launch'\?"),
            ("family =", "famly =", r"unknown key 'famly'; did you mean 'family'\?"),
            ("tile_m = [64, 128, 256]\n", "", r"\[compile\] key 'tile_m' is missing"),
            ("[launch]\nswizzle_size = [1, 4]\n", "", "key 'launch' is missing"),
            ("[1, 4]", "[]", r"\[launch\] swizzle_size = \[\]: give a non-empty list of distinct"),
            ("[1, 4]", "[1, 1]", r"swizzle_size = \[1, 1\]"),
            ("[1, 4]", '[1, "4"]', r"swizzle_size = \[1, '4'\]: give a non-empty list of distinct integers"),
            ("[1, 4]", "[-1, 4]", r"swizzle_size = \[-1, 4\]: .* from 0 to 2147483647"),
            ("[1, 4]", "[1, 2147483648]", r"swizzle_size = \[1, 2147483648\]"),
            ("[1, 4]", "4", "swizzle_size = 4: give a non-empty list"),
            ("[1, 4]", "[1, 2.5]", r"swizzle_size = \[1, 2.5\]"),
            ("[1, 4]", "[[1], 4]", r"swizzle_size = \[\[1\], 4\]"),
            ("[1, 4]", '"14"', "swizzle_size = '14'"),
            ("[1, 4]", "[1, 4", "not TOML"),
        ],
    )  # fmt: skip
    def test_bad_files(self, tmp_path: Path, old: str, new: str, named: str) -> None:
        assert old in GOOD
        path = write(tmp_path, GOOD.replace(old, new))
        with pytest.raises(SpaceError, match=named) as caught:
            SearchSpace.load(path, parameters=PARAMETERS)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("a = " + "[" * 5000 + "]" * 5000, "not TOML"),
            ("a = " + "9" * 5000, "not TOML"),
            ("\0", "not TOML"),
            ("family = 5\n[compile]\n[launch]", "family 5 is not a name"),
            ("family = 'x'\n[compile]\na = [nan]\n[launch]", "give a non-empty list of distinct"),
            (
                "family = 'x'\n[launch]\n[compile]\n"
                + "".join(f"p{i} = {[*range(100)]}\n" for i in range(9)),
                "more than 10,000,000 kernels",
            ),
        ],
    )
    def test_hostile_files(self, tmp_path: Path, text: str, named: str) -> None:
        with pytest.raises(SpaceError, match=named) as caught:
            SearchSpace.load(write(tmp_path, text))
        assert len(str(caught.value)) < 500

    def test_a_table_that_is_none(self, tmp_path: Path) -> None:
        text = 'family = "demo"\ncompile = [1]\n[launch]\n'
        with pytest.raises(SpaceError, match="'compile' must be a table of lists"):
            SearchSpace.load(write(tmp_path, text))

    def test_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(SpaceError, match="No such file or directory; give"):
            SearchSpace.load(tmp_path / "absent.toml")
        (tmp_path / "folder.toml").mkdir()
        with pytest.raises(SpaceError, match="Is a directory"):
            SearchSpace.load(tmp_path / "folder.toml")
        (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(SpaceError, match="not UTF-8 text"):
            SearchSpace.load(tmp_path / "binary.toml")
