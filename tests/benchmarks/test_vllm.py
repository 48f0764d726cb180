"""What times vLLM, as far as neither vLLM nor a GPU is needed."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points

import pytest

from benchmarks import vllm, vllm_engine
from benchmarks.results import command_line
from benchmarks.tables import programs


def test_an_unknown_kind_is_named(capsys):
    assert vllm.main(["--only", "bf16,int4"]) == 2
    assert "--only 'int4' is not known; use some of bf16,fp8" in capsys.readouterr().err


def test_entry_points_lead_to_the_plug_in_and_to_what_settles(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    vllm.doors(tmp_path)
    found = {each.name: each for each in entry_points(group="vllm.general_plugins")}
    assert found["tunegemm"].value == "tunegemm.engines.vllm:register"
    assert found["tunegemm_benchmarks"].load() is vllm_engine.settle
    vllm_engine.settle()  # without vLLM nothing


def test_an_engines_folders_are_its_own(tmp_path):
    settings = [each for kind in vllm.KINDS for each in vllm.settings_of(kind, 8)]
    made = [vllm_engine.variables(setting, tmp_path) for setting in settings]
    assert len({each["VLLM_CACHE_ROOT"] for each in made}) == len({each.name for each in settings}) == 12
    assert [each["TUNEGEMM_VLLM"] for each in made] == ["0", "0", "1"] * 4
    assert [each["VLLM_BATCH_INVARIANT"] for each in made] == ["0"] * 9 + ["1"] * 3
    assert len({each["DG_JIT_CACHE_DIR"] for each in made}) == 1, "compiled once for all"


def test_each_kind_has_its_quantisation():
    configs = [vllm_engine.model_config(vllm.settings_of(kind, 8)[0]) for kind in vllm.KINDS]
    given = [each.get("quantization_config", {}) for each in configs]
    assert [each.get("quant_method") for each in given] == [None, "compressed-tensors", "fp8", None]
    assert given[2]["weight_block_size"] == [128, 128]


class Told:
    """In an engine's place: a rate of each round, and what it was asked for."""

    def __init__(self, *rates, setting=None):
        self.rates, self.asked, self.setting = iter(rates), [], setting

    def ask(self, what, phase, sequences, *seconds):
        self.asked.append((what, phase, sequences))
        return 0.0 if seconds else next(self.rates)


def test_a_ratio_is_that_of_a_round_and_noise_that_of_equal_engines():
    """The host is half as fast in the second round: of all three engines."""
    ours = vllm_engine.Setting("fp8", served=True)
    engines = Told(100, 50, 101), Told(102, 51, 103), Told(111.1, 55.55, 112.2, setting=ours)
    row = vllm.measure(*engines, "decode", 16, 0.0)
    assert row["ratio"] == pytest.approx(1.1) and row["noise"] == pytest.approx(0.02, abs=1e-3)
    assert row["tokens_per_s"] == 111.1 and row["engine_tokens_per_s"] == 100.5
    assert [row[name] for name in ("dtype", "phase", "sequences", "rounds")] == ["fp8", "decode", 16, 3]
    assert all(engine.asked == [("sample", "decode", 16)] * 4 for engine in engines)


def test_the_table_says_what_noise_cannot_explain(tmp_path):
    row = {"dtype": "bf16", "mode": "fastest", "phase": "prefill", "tokens_per_s": 900.0}
    row |= {"engine_tokens_per_s": 1000.0, "noise": 0.05}
    rows = [row | {"sequences": n, "ratio": ratio} for n, ratio in ((1, 0.96), (16, 0.9), (64, 1.06))]
    rows = [each | {"date": "2026-11-30T02:08"} for each in rows]
    rows[0] |= {"gates": True, "date": "2026-11-27T12:30"}
    logits = {"largest_difference": 0.0, "bits_same_vllm": True, "bits_same_tunegemm": False}
    meta = {"date": "2026-11-30T02:08:19+00:00"}
    (tmp_path / "vllm.json").write_text(json.dumps({"meta": meta, "logits_bf16": logits, "rows": rows}))
    text = programs.vllm(tmp_path)
    assert "| bf16 prefill | 16 | 1,000 | 900 | 0.900 | 5.0% |" in text
    assert "| bf16 prefill, gate in the product | 1 | 1,000 | 900 | 0.960 | 5.0% |" in text
    assert "Rows of another day: bf16 prefill (2026-11-27)." in text
    assert "Geometric means: bf16 prefill 0.971, least 0.900. Slower" in text
    assert "Slower than vLLM by more than the noise: bf16 prefill of 16 (0.900); faster: 1 of 3." in text
    assert "The logits of bf16 are equal." in text and "change no bit of vllm's." in text
    assert "change bits of tunegemm's." in text


def test_a_scratch_folder_is_no_part_of_the_command():
    words = ["/x/benchmarks/vllm.py", "--rounds", "4", "--scratch", "/y"]
    assert command_line(words) == "python -m benchmarks.vllm --rounds 4"
