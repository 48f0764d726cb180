"""Kinds of blocks, clusters of a device, and steps of an epilogue on arrays, by their values."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunegemm.describe import device, epilogue
from tunegemm.describe.architectures import ARCHITECTURES, of_target
from tunegemm.describe.device import find_device
from tunegemm.describe.space import Candidate
from tunegemm.describe.workload.blocks import block_types
from tunegemm.describe.workload.matrices import Config
from tunegemm.errors import WorkloadError

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [
        ({"num_hidden_layers": 2}, [FULL, FULL]),
        ({"hybrid_override_pattern": "M*-E"}, ["mamba", FULL, "mlp", "moe"]),
        ({"num_hidden_layers": 3, "layer_types": [SLIDING, FULL]}, [SLIDING, FULL, SLIDING]),
        ({"layers_block_type": ["attention", "mamba2"]}, [FULL, "mamba"]),
        ({"num_hidden_layers": 2, "attn_type_list": [0, 1]}, [LINEAR, FULL]),
        ({"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0]}, [SLIDING, FULL]),
        ({"num_hidden_layers": 3, "linear_attn_config": {"kda_layers": [1, 3]}}, [LINEAR, FULL, LINEAR]),
        ({"num_hidden_layers": 3, "linear_attn_config": {"other": 1}}, [FULL] * 3),
        (
            {"num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1},
            ["mamba", FULL, "mamba", "mamba", FULL],
        ),
        ({"num_hidden_layers": 3, "attn_layer_indices": [2]}, ["mamba", "mamba", FULL]),
        ({"num_hidden_layers": 5, "linear_num_value_heads": 8}, [LINEAR, LINEAR, LINEAR, FULL, LINEAR]),
        ({"num_hidden_layers": 2, "linear_num_value_heads": 8, "full_attention_interval": 2}, [LINEAR, FULL]),
        ({"num_hidden_layers": 2, "linear_num_value_heads": 8, "layer_types": [FULL]}, [FULL, FULL]),
        ({"num_hidden_layers": 2, "layer_types": [LINEAR], "mamba_num_heads": 4}, ["mamba", "mamba"]),
        ({"num_hidden_layers": 2, "layer_types": [SLIDING], "model_type": "gemma4_text"}, [SLIDING, FULL]),
        ({"num_hidden_layers": 10_000}, [FULL] * 10_000),
    ],
)  # fmt: skip
def test_the_kind_of_each_block(facts: dict[str, Any], kinds: list[str]) -> None:
    assert block_types(Config(facts, "config.json")) == kinds


@pytest.mark.parametrize(
    ("facts", "says"),
    [({"num_hidden_layers": 10_001}, "is 10001; give"), ({"layer_types": ["strange"]}, "of type 'strange'")],
)
def test_blocks_that_are_not_known(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        block_types(Config(facts, "config.json"))


@pytest.mark.parametrize(
    ("size", "budget", "counted", "resident"),
    [(1, 132, 7, 132), (2, 132, 65, 65), (2, 131, 65, 65), (2, 100, 65, 50), (3, 4, 65, 1), (8, 4, 65, 1),
     (2, 132, None, 66)],
)  # fmt: skip
def test_clusters_that_run_at_once(
    monkeypatch: pytest.MonkeyPatch, size: int, budget: int, counted: int | None, resident: int
) -> None:
    monkeypatch.setattr(device, "active_clusters", lambda *_: counted)
    real = replace(find_device("model:h200"), spec="cuda:0")
    if budget != 132:
        real = real.with_sm_budget(budget)
    expected = budget // 2 if (size, budget) == (2, 131) else resident
    assert real.resident_clusters(size) == expected
    assert real.with_sm_budget(66).peak_tflops == pytest.approx(real.peak_tflops * 66 / real.sm_count)


def test_an_architecture_is_found_by_its_compilers_name() -> None:
    for architecture in ARCHITECTURES.values():
        assert of_target(architecture.compile_target) is architecture


def test_a_candidate_is_printed_as_an_expression() -> None:
    for launch in ({}, {"split_k": 2}):
        candidate = Candidate.make("a", {"tile_m": 64, "swap_ab": True}, launch)
        assert eval(repr(candidate), {"Candidate": Candidate}) == candidate
        assert repr(candidate).count("{") == 1 + bool(launch)


def test_steps_on_arrays_choose_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the DSL, whose values here are numpy's: numbers may stand on either side, and NaN stays."""
    monkeypatch.setattr(epilogue, "where", np.where)
    values = [-2.0, -0.5, 0.0, 1.0, 3.0, math.nan]
    x, y = (np.array(each) for each in zip(*itertools.product(values, repeat=2), strict=True))
    for ours, theirs in ((epilogue.maximum, np.maximum), (epilogue.minimum, np.minimum)):
        np.testing.assert_array_equal(ours(x, y), theirs(x, y))
        for number in values[:-1]:
            np.testing.assert_array_equal(ours(x, number), theirs(x, number))
            np.testing.assert_array_equal(ours(number, x), theirs(number, x))
    np.testing.assert_array_equal(epilogue.absolute(x), np.abs(x))
