"""What times vLLM, as far as neither vLLM nor a GPU is needed."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points

import pytest

from benchmarks import vllm, vllm_engine, vllm_layers
from benchmarks.results import command_line
from benchmarks.tables import programs


@pytest.mark.parametrize("program", [vllm, vllm_layers])
def test_an_unknown_kind_is_named(program, capsys):
    assert program.main(["--only", "bf16,int4"]) == 2
    assert "--only 'int4' is not known; use some of bf16,fp8" in capsys.readouterr().err


def test_entry_points_lead_to_the_plug_in_and_to_what_settles(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    vllm.doors(tmp_path)
    found = {each.name: each for each in entry_points(group="vllm.general_plugins")}
    assert found["tunegemm"].value == "tunegemm.serve.integrations.vllm:register"
    assert found["tunegemm_benchmarks"].load() is vllm_engine.settle
    vllm_engine.settle()  # without vLLM nothing


def test_an_engines_caches_are_its_own(tmp_path):
    settings = [vllm_engine.Setting(dtype, served) for dtype in ("bf16", "fp8") for served in (False, True)]
    settings.append(vllm_engine.Setting("bf16", served=True, is_invariant=True))
    made = [vllm_engine.variables(setting, tmp_path) for setting in settings]
    assert len({each["VLLM_CACHE_ROOT"] for each in made}) == len(settings)
    assert [each["TUNEGEMM_VLLM"] for each in made] == ["0", "1", "0", "1", "1"]
    assert [each["VLLM_BATCH_INVARIANT"] for each in made] == ["0"] * 4 + ["1"]


def test_the_table_says_what_noise_cannot_explain(tmp_path):
    row = {"dtype": "bf16", "mode": "fastest", "phase": "prefill", "tokens_per_s": 900.0}
    row |= {"engine_tokens_per_s": 1000.0, "noise": 0.05}
    rows = [row | {"sequences": n, "ratio": ratio} for n, ratio in ((1, 0.96), (16, 0.9), (64, 1.06))]
    logits = {"largest_difference": 0.0, "bits_same_vllm": True, "bits_same_tunegemm": False}
    (tmp_path / "vllm.json").write_text(json.dumps({"meta": {}, "logits_bf16": logits, "rows": rows}))
    text = programs.vllm(tmp_path)
    assert "| bf16 prefill | 16 | 1,000 | 900 | 0.900 | 5.0 % |" in text
    assert "Slower than vLLM by more than the noise: bf16 prefill of 16 (0.900)." in text
    assert "Faster by more than it: bf16 prefill of 64 (1.060)." in text
    assert "bf16 are the same." in text and "no bit of vllm's differs" in text
    assert "bits of tunegemm's differ" in text


def test_a_scratch_folder_is_no_part_of_the_command():
    words = ["/x/benchmarks/vllm.py", "--rounds", "4", "--scratch", "/y"]
    assert command_line(words) == "python -m benchmarks.vllm --rounds 4"
