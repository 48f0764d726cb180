"""Commands that are printed for users to run."""

from __future__ import annotations

import shlex

from tunegemm.describe.command import command_line, tune_command
from tunegemm.describe.problem import Problem


def test_a_command_line_is_quoted() -> None:
    line = command_line(
        "tune",
        {
            "from": "my shapes;rm.json",
            "budget": None,
            "quiet": False,
            "db": "",
            "energy": True,
            "shape": ["a", "b"],
        },
    )
    assert shlex.split(line) == [
        "tunegemm", "tune", "--from", "my shapes;rm.json", "--energy", "--shape", "a", "--shape", "b",
    ]  # fmt: skip


def test_what_is_usual_is_left_out_and_all_else_is_said() -> None:
    assert tune_command(Problem.parse("64x64x64"), top=3) == (
        "tunegemm tune --shape 64x64x64 --dtype bf16 --layout tn --top 3"
    )
    problem = Problem.parse(
        "64x64x64", dtype="fp8_e4m3", out_dtype="fp32", alignment=8, epilogue="bias_n+relu",
        accumulation="two_level",
    )  # fmt: skip
    assert tune_command(problem) == (
        "tunegemm tune --shape 64x64x64 --dtype fp8_e4m3 --out-dtype fp32 --layout tn --alignment 8 "
        "--epilogue bias_n+relu --accumulation two_level"
    )
    assert "--groups 4 " in tune_command(Problem.parse("64x64x64", groups=4)) + " "
    column_major = Problem(32, 48, 64, out_major="m")
    assert tune_command(column_major) == f"tunegemm.tune(tunegemm.{column_major!r})"
