"""Layers of `transformers`' families, fused: what is recognised of each, and that its results are torch's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.fusing import close
from tunegemm.errors import TunegemmWarning

transformers = pytest.importorskip("transformers")

QKV, GATES = "self_attn.{q_proj,k_proj,v_proj}", "mlp.{gate_proj,up_proj}"
#: What the decoder layer adds to the stream.
SUMS = ["self_attn.o_proj", "mlp.down_proj"]
#: What is fused of a layer of each family.
FAMILIES = {
    "Llama": [*SUMS, QKV, GATES], "Mistral": [*SUMS, QKV, GATES], "Qwen2": [*SUMS, QKV, GATES],
    "Qwen3": [*SUMS, QKV, GATES], "Gemma": [*SUMS, QKV, GATES], "Gemma2": [QKV, GATES],
    "Phi": ["mlp.fc2", QKV, "mlp.fc1"], "Phi3": [*SUMS, "mlp.gate_up_proj"], "Mixtral": [SUMS[0], QKV],
    "GPTNeoX": ["mlp.dense_4h_to_h", "mlp.dense_h_to_4h"],
}  # fmt: skip
SIZE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(24).view(2, 12) + 3


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(serve, kernel, family):
    model = model_of(family)
    with torch.no_grad():
        expected = model(IDS).logits
    report = tunegemm.patch(model, fuse=True, report=True)
    assert [line.name.split("layers.0.")[1] for line in report.of("fused")] == FAMILIES[family]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # nothing is planted yet
        assert torch.equal(model(IDS).logits, expected)
    serve()
    with torch.no_grad():
        close(model(IDS).logits, expected, 4e-2)
    assert kernel.calls


def test_a_fused_model_generates_and_is_saved(tmp_path: Path):
    model = model_of("Llama")
    plain = copy.deepcopy(model)
    tunegemm.patch(model, fuse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        words = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(IDS, **words), plain.generate(IDS, **words))
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(saved[name], each) for name, each in plain.state_dict().items())
