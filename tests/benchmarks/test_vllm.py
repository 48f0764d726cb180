"""What times vLLM, as far as neither vLLM nor a GPU is needed."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from benchmarks import vllm, vllm_engine, vllm_layers


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
