"""`tunegemm shapes`: the file that it writes is what `tune --from` and `pack --from` read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import here
from tunegemm.describe.workload import read

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_the_layers_and_the_file(config: Path, tmp_path: Path) -> None:
    done = here("shapes", config, "--tp", "2", "--rows", "1,64", cwd=tmp_path)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["32", "x", "qkv", "3072x4096", "fp16"], ["32", "x", "o", "4096x2048", "fp16"],
        ["32", "x", "gate_up", "14336x4096", "fp16"], ["32", "x", "down", "4096x7168", "fp16"],
        ["1", "x", "logits", "64128x4096", "fp16"],
    ]  # fmt: skip
    assert done.stderr == (
        "tunegemm: wrote 10 products to shapes.json\n"
        "tunegemm: on the serving GPU, run: tunegemm tune --from shapes.json --budget 30m\n"
    )
    demands, refused = read(tmp_path / "shapes.json")
    assert not refused and {demand.problem.in_dtype for demand in demands} == {"fp16"}
    calls = {demand.problem.shape: demand.calls for demand in demands}
    assert calls["64x3072x4096"] == 32 and calls["1x64128x4096"] == 1 and len(calls) == 10
    again = json.loads((tmp_path / "shapes.json").read_text())
    assert again["program"] == [
        "tunegemm", "shapes", str(config), "--tp", "2", "--engine", "vllm", "--rows", "1,64",
    ]  # fmt: skip


def test_an_engines_layers_and_a_dtype(config: Path, tmp_path: Path) -> None:
    how = ("--engine", "transformers", "--dtype", "bf16", "--out", tmp_path / "x y.json")
    done = here("shapes", tmp_path, *how)
    assert "64 x qkv 1024x4096 bf16" in done.stdout and "'" in done.stderr  # quoted for a shell
    assert {demand.problem.in_dtype for demand in read(tmp_path / "x y.json")[0]} == {"bf16"}


def test_a_config_is_not_written_over(config: Path, tmp_path: Path) -> None:
    for model in (config, tmp_path):
        done = here("shapes", model, "--out", "config.json", cwd=tmp_path, code=2)
        assert done.stderr == (
            "tunegemm: config.json: this command reads it, and would overwrite it; choose another --out\n"
        )
    assert json.loads(config.read_text()) == LLAMA


def test_a_bad_number_has_the_name_of_its_field(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(LLAMA | {"intermediate_size": -1}))
    done = here("shapes", config, cwd=tmp_path, code=2)
    assert ": intermediate_size -1 is not a whole number" in done.stderr


def test_what_has_no_kernels_is_said(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "gptq"}}))
    done = here("shapes", config, cwd=tmp_path)
    assert "left out: qkv 6144x4096: quantised with 'gptq', which has no kernels" in done.stderr
    assert done.stdout.split() == ["1", "x", "logits", "128256x4096", "fp16"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no/model",), "neither a config.json, a folder with one, nor a model in"),
        (
            ("config.json", "--rows", "1,x"),
            "--rows '1,x': not numbers of rows; give numbers such as 1,8,64,8192",
        ),
        (("config.json", "--rows", "0"), "not numbers of rows"),
        (("config.json", "--tp", "0"), "--tp 0: must be 1 or more"),
        (("config.json", "--tp", "3"), "has 32 heads; give a divisor of them"),
        (("config.json", "--engine", "trt"), "'trt' is not one of"),
        (("config.json", "--out", "."), "is a directory; give a file in it"),
    ],
)
def test_bad_input(config: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = here("shapes", *words, cwd=tmp_path, code=2)
    assert len(done.stderr.splitlines()) == 1 and said.lower() in done.stderr.lower(), done
    assert not (tmp_path / "shapes.json").exists()
