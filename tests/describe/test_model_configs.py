"""Configs of public models, by their published fields: the matrices that are read of each add up to its size.

tests/data/model_configs.json has the fields that matter of each, with the published number of parameters in
billions (of the language model; null where a part is left out), or what a refusal names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.configs import rows
from tunegemm.describe.workload.engines import shapes
from tunegemm.describe.workload.models import read_model
from tunegemm.errors import WorkloadError

MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "model_configs.json").read_text()
)


@pytest.mark.parametrize("name", MODELS)
def test_of_a_public_model(name: str, tmp_path: Path) -> None:
    config = MODELS[name]["config"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    if refused := MODELS[name].get("refused"):
        with pytest.raises(WorkloadError, match=rf"{refused}.* not known.*`tunegemm record`"):
            read_model(str(path))
        return
    model = read_model(str(path))
    assert shapes(model, "transformers", rows=[16]).layers
    sizes = [(one.columns * one.depth, layer) for layer in model.layers for one in layer.parts]
    whole = sum(size * (layer.experts or 1) for size, layer in sizes)
    if not {**config, **config.get("text_config", {})}.get("tie_word_embeddings"):
        whole += sizes[-1][0]  # the embedding is as large as the logits' matrix
    published = MODELS[name]["billions"]
    assert published is None or whole / 1e9 == pytest.approx(published, rel=0.01, abs=0.006)
    left = {layer.name for layer in model.layers if layer.left_out}
    assert left == ({"mamba"} if published is None else set())


def listed(name: str, tmp_path: Path) -> dict[str, int]:
    """Layers as vLLM computes them, and how many of each; 0 of those that are left out."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    found = shapes(read_model(str(tmp_path)), "vllm", rows=[16])
    return {**found.layers, **dict.fromkeys(found.refused, 0)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3.5-27B", {
            "linear_qkvz 16384x5120 bf16": 48, "linear_ba 96x5120 bf16": 48, "linear_o 5120x6144 bf16": 48,
            "qkv 14336x5120 bf16": 16, "o 5120x6144 bf16": 16, "gate_up 34816x5120 bf16": 64,
            "down 5120x17408 bf16": 64, "logits 248320x5120 bf16": 1,
        }),
        ("Kimi-Linear-48B-A3B", {"q 6144x2304 bf16": 7, "linear_q 4096x2304 bf16": 20}),
        ("MiniMax-Text-01", {"linear_qkv 24576x6144 bf16": 70, "qkv 10240x6144 bf16": 10}),
        ("Nemotron-3-Nano-30B-A3B", {"mamba": 0, "up 3712x2688 bf16": 23, "qkv 4608x2688 bf16": 6}),
        ("MiMo-V2-Flash", {"qkv 14848x4096 bf16": 39, "qkv 13568x4096 bf16": 9, "o 4096x8192 bf16": 48}),
        ("Step-3.5-Flash", {"attention_gate 64x4096 bf16": 12, "attention_gate 96x4096 bf16": 33}),
        ("Gemma-4-31B", {"qkv 16384x5376 bf16": 50, "qkv 18432x5376 bf16": 10}),
        ("DeepSeek-V3.2", {"index_q 8192x1536": 0, "logits 129280x7168 bf16": 1}),
    ],
)  # fmt: skip
def test_layers_by_name(name: str, expected: dict[str, int], tmp_path: Path) -> None:
    found = listed(name, tmp_path)
    assert expected.items() <= found.items(), found
    if len(expected) > 5:
        assert found == expected


def test_the_table_of_all() -> None:
    """`python -m benchmarks.configs` has a row for each, with the reason of what it refuses or leaves out."""
    found = {row["model"]: row for row in rows()}
    assert list(found) == list(MODELS)
    for name, row in found.items():
        if refused := MODELS[name].get("refused"):
            assert row["read"] == "refused" and refused in row["left_out"] and "record" in row["left_out"]
            continue
        assert row["matrices"], name
        assert row["read"] == ("in part" if row["left_out"] else "whole"), name
    assert "mamba: " in found["Nemotron-3-Nano-30B-A3B"]["left_out"]
