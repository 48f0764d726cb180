"""The benchmarks without a GPU: their shapes, files and tables, and an interleave timed on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import time
import types
import warnings

import pytest
import torch

from benchmarks import dispatch, first_call, peers, results, shapes, tuning_time
from benchmarks.interleave import interleave
from benchmarks.providers import PROVIDERS, Contender, Options, OutOfTime, Skip, deadline
from fit import sweep
from tests.support.planted.cpu_backend import CpuBackend, ThrottledBackend, work
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError
from tunegemm.tuning.tuner import open_device

SMALL = Problem(64, 48, 32)


@pytest.fixture(scope="module")
def device():
    return find_device("model:h200")


@pytest.fixture
def backend(device):
    """The measuring worker's CPU backend."""
    return CpuBackend(device)


# Shapes


def test_the_shapes_file_has_both_groups_and_each_problem_once():
    found = shapes.load()
    groups = {name: [s.problem for s in found if name in s.groups] for name in ("anchors", "llama-3-8b")}
    assert len(groups["anchors"]) == 18 and len(groups["llama-3-8b"]) == 16
    assert {(p.n, p.k) for p in groups["llama-3-8b"]} == {
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
    }  # fmt: skip
    assert {p.m for p in groups["llama-3-8b"]} == {16, 128, 512, 4096}
    shared = set(groups["anchors"]) & set(groups["llama-3-8b"])
    assert {p.shape for p in shared} == {"4096x4096x4096", "512x6144x4096", "4096x4096x14336"}
    assert len(found) == len({s.problem for s in found}) == 39
    assert all(p.in_dtype == "bf16" and p.layout == "tn" for p in groups["anchors"])


def test_select_by_group_pattern_and_shape():
    assert len(shapes.select([])) == 39
    assert len(shapes.select(["llama-3-8b"])) == 16
    assert [p.shape for p in shapes.select(["512x.*x4096"])] == [
        "512x6144x4096", "512x4096x4096", "512x28672x4096"
    ]  # fmt: skip
    assert shapes.select(["17x24x32", "17x24x32"]) == [Problem(17, 24, 32)]


@pytest.mark.parametrize("pattern", ["squares", "(", "0x4x4", "4x4", "9999x.*"])
def test_select_names_what_it_does_not_know(pattern):
    with pytest.raises(ProblemError):
        shapes.select([pattern])


def test_a_misspelt_key_of_the_shapes_file_is_named(tmp_path):
    path = tmp_path / "shapes.toml"
    path.write_text('[squares]\nshape = ["64x64x64"]\n')
    with pytest.raises(ProblemError, match="'squares'"):
        shapes.load(path)
    path.write_text("[squares]\nm = [64]\n")
    with pytest.raises(ProblemError, match="has no shapes"):
        shapes.load(path)


# Result files


def row(m: int, **medians: float | str) -> dict:
    providers = {
        name: {"skipped": us} if isinstance(us, str) else {"median_us": us, "tflops": 1000 / us}
        for name, us in medians.items()
    }
    return {
        "m": m, "n": 8, "k": 8, "batch": 1, "dtype": "bf16", "layout": "tn", "epilogue": "none",
        "providers": providers, "tune_seconds": None,
    }  # fmt: skip


META = {"command": "one", "gpu": "H200", "driver": "1", "packages": {"torch": "2"}, "method": "m"}


def test_a_command_is_told_without_the_folder_that_its_file_went_to():
    told = results.command_line(["/x/benchmarks/decode.py", "--out", "/tmp/o", "--step", "4", "--out=/tmp/p"])
    assert told == "python -m benchmarks.decode --step 4"


def test_rows_are_written_as_they_come_and_replaced_in_place(tmp_path):
    path = tmp_path / "deep" / "peers.json"
    first = results.Results(path, META)
    first.put(row(1, torch=2.0))
    first.put(row(2, torch=2.0))
    assert len(json.loads(path.read_text())["rows"]) == 2
    second = results.Results(path, META | {"command": "two"})
    second.put(row(1, torch=3.0))
    second.put(row(3, torch=2.0))
    data = json.loads(path.read_text())
    assert [(r["m"], r["providers"]["torch"]["median_us"]) for r in data["rows"]] == [
        (1, 3.0),
        (2, 2.0),
        (3, 2.0),
    ]
    assert data["meta"]["command"] == "two" and data["meta"]["earlier_commands"] == ["one"]
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_rows_of_two_efforts_stand_beside_each_other(tmp_path):
    file = results.Results(tmp_path / "tuning_time.json", META)
    file.put({"m": 1, "n": 1, "k": 1, "effort": "quick"})
    file.put({"m": 1, "n": 1, "k": 1, "effort": "full"})
    assert len(file.rows) == 2


@pytest.mark.parametrize("change", [{"gpu": "H100"}, {"driver": "2"}, {"packages": {}}, {"method": "other"}])
def test_rows_of_another_machine_state_are_refused(tmp_path, change):
    path = tmp_path / "peers.json"
    results.Results(path, META).put(row(1, torch=2.0))
    before = path.read_bytes()
    with pytest.raises(results.ResultsError, match=next(iter(change))):
        results.Results(path, META | change)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", '{"rows": 1, "meta": {}}', "[]"])
def test_what_is_no_result_file_is_refused(tmp_path, content):
    path = tmp_path / "peers.json"
    path.write_text(content)
    with pytest.raises(results.ResultsError, match="not a result file"):
        results.Results(path, META)
    assert path.read_text() == content


def test_the_summary_has_ratios_geometric_means_losses_and_skips():
    rows = [
        row(1, torch=4.0, quack=2.0, tunegemm=2.0),
        row(2, torch=4.0, quack="not installed", tunegemm=5.0),
        row(3, torch=4.0, quack=8.0, tunegemm=4.0),
    ]
    text = "\n".join(peers.summary(rows))
    assert "| 1x8x8 | 4.0 us, 0 | **2.000** | **2.000** |" in text
    assert f"| *geometric mean* |  | 1.000 (2) | {(2 * 0.8 * 1) ** (1 / 3):.3f} |" in text
    assert "Where tunegemm loses: 2x8x8 (torch: 25.0 % faster)." in text
    assert "skipped quack: not installed (1 shapes: 2x8x8)" in text


def test_results_go_to_the_folder_of_the_gpu(device, tmp_path):
    assert results.results_path(None, device, "peers.json").parts[-3:] == ("results", "h200", "peers.json")
    assert results.results_path(tmp_path, device, "x.json") == tmp_path / "x.json"


# The interleave


def product(a, b, out):
    torch.mm(a, b, out=out)


def slow(a, b, out):
    work(2e-3)
    torch.mm(a, b, out=out)


def test_everyone_is_timed_in_every_round_and_the_order_of_speed_is_right(backend):
    runs = {"torch": product, "slow": slow, "own": lambda a, b, out: torch.mm(a, b)}
    found = interleave(SMALL, runs, backend, l2_bytes=10_000, rounds=9, min_replay_ms=0.2)
    assert list(found.timings) == list(runs) and not found.skipped
    assert all(len(timing.samples_us) == 9 for timing in found.timings.values())
    assert found.timings["slow"].median_us > 2000 > found.timings["torch"].median_us
    assert found.operand_sets > 1 and found.products_per_replay % found.operand_sets == 0
    assert 0 < found.timings["own"].relative_error < 2e-2
    assert found.timings["torch"].iqr_us >= 0 and found.noise >= 0


def test_wrong_failing_and_unfinished_callables_are_skipped_with_the_reason(backend):
    def raises(a, b, out):
        raise RuntimeError("no such kernel\nmore")

    def wrong(a, b, out):
        torch.mm(a, b, out=out)
        out[3, 5] += 100

    def unwritten(a, b, out):
        torch.mm(a[:8], b, out=out[:8])

    def stale(a, b, out):
        return torch.zeros_like(out)

    runs = {"torch": product, "raises": raises, "wrong": wrong, "unwritten": unwritten, "stale": stale}
    found = interleave(SMALL, runs, backend, l2_bytes=10_000, rounds=3, min_replay_ms=0.1)
    assert list(found.timings) == ["torch"]
    assert found.skipped["raises"] == "RuntimeError: no such kernel"
    assert "NaN" in found.skipped["unwritten"]
    assert "error" in found.skipped["stale"] and "wrong" in found.skipped


def test_at_the_power_cap_each_has_long_turns_and_the_shared_ratio_is_kept(device):
    backend = ThrottledBackend(device)
    runs = {"torch": product, "slow": slow}
    usual = {"l2_bytes": 10_000, "rounds": 3, "min_replay_ms": 0.2, "settle_s": 0.0}
    found = interleave(SMALL, runs, backend, turn_ms=20.0, turns=4, **usual)
    assert found.turn_ms == 20.0 and found.rounds == 4
    assert {len(timing.samples_us) for timing in found.timings.values()} == {4}
    assert {len(timing.samples_us) for timing in found.shared.values()} == {3}
    assert found.shared.keys() == found.timings.keys() == runs.keys()
    found = interleave(SMALL, runs, backend, turn_ms=0, **usual)
    assert found.turn_ms == 0 and not found.shared and found.rounds == 3


def test_a_failing_baseline_is_an_error(backend):
    with pytest.raises(RuntimeError, match="baseline"):
        interleave(SMALL, {"torch": lambda a, b, out: None}, backend, l2_bytes=1, rounds=3)


def test_a_row_reports_the_best_contender_and_the_reasons_of_the_others(monkeypatch, backend, device):
    def two(problem, device, options):
        return [Contender(slow, "slow one"), Contender(product, "fast one", tune_seconds=1.5)]

    def none(problem, device, options):
        raise Skip("not installed")

    def broken(problem, device, options):
        return [Contender(lambda a, b, out: out.zero_())]

    fakes = {"torch": PROVIDERS["torch"], "two": two, "none": none, "broken": broken}
    monkeypatch.setattr("benchmarks.providers.PROVIDERS", fakes)
    got = peers.measure(SMALL, device, backend, list(fakes), Options(1, None), 5)
    assert got["providers"]["none"] == {"skipped": "not installed"}
    assert got["providers"]["two"]["label"] == "fast one" and got["providers"]["two"]["contenders"] == 2
    assert got["providers"]["two"]["tune_seconds"] == 1.5
    assert "relative error" in got["providers"]["broken"]["skipped"]
    torch_row = got["providers"]["torch"]
    assert torch_row["tflops"] == pytest.approx(SMALL.flops / torch_row["median_us"] / 1e6, abs=0.01)
    assert {"m", "n", "k", "batch", "dtype", "layout", "epilogue", "providers", "tune_seconds"} <= got.keys()
    json.dumps(got)
    assert "skipped none: not installed" in "\n".join(peers.summary([got]))


def test_our_kernels_are_skipped_where_nothing_is_recorded(monkeypatch, device, tmp_path):
    with pytest.raises(Skip, match="missing"):
        PROVIDERS["tunegemm_cute"](SMALL, device, Options(1, tmp_path / "missing.sqlite"))


def test_a_peer_that_tunes_too_long_is_stopped_even_if_it_catches_exceptions():
    start = time.perf_counter()
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime), deadline(0.1):
        for _ in range(100):
            with contextlib.suppress(Exception):
                time.sleep(0.05)  # a peer at work, which takes the alarm for an error of its own
    assert time.perf_counter() - start < 2
    assert signal.getsignal(signal.SIGALRM) is before
    with deadline(0.05):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "no alarm comes late"


# Tuning


@pytest.mark.slow
def test_a_process_of_its_own_times_a_tuning(tmp_path):
    """Nothing may be compiled: the library's algorithms are measured, and what ships where it was made."""
    problem, device = Problem.parse("4096x4096x4096"), open_device("replay:h200")
    found = tuning_time.process(problem, device, "warm", tmp_path)
    assert found["imports_s"] > 0 and 0 < found["next_s"] < found["seconds"]
    assert found["compiled"] == 0
    assert found["ratio"] >= 1


# Command lines


@pytest.mark.parametrize("module", [peers, tuning_time, sweep])
@pytest.mark.parametrize("arguments", [["--shapes", "squares"], ["--device", "cuda:99"]])
def test_bad_input_is_one_line_and_exit_code_2(module, arguments, capsys):
    assert module.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and arguments[1] in captured.err


def test_a_model_cannot_be_swept(capsys):
    assert sweep.main(["--device", "model:h200"]) == 2
    assert "measures nothing" in capsys.readouterr().err


@pytest.mark.gpu
def test_peers_end_to_end_on_a_gpu(tmp_path, capsys):
    words = "--shapes 512x512x512 --peers cublaslt,tunegemm_cute,tunegemm --tune --rounds 5"
    assert peers.main([*words.split(), "--out", str(tmp_path), "--db", str(tmp_path / "db.sqlite")]) == 0
    data = json.loads((tmp_path / "peers.json").read_text())
    (found,) = data["rows"]
    assert found["tune_seconds"] > 0
    assert {"torch", "tunegemm_cute", "tunegemm"} <= {
        n for n, p in found["providers"].items() if "median_us" in p
    }
    assert data["meta"]["clocks"]["sm_clock_mhz"]
    assert "| *geometric mean* |" in capsys.readouterr().out


# The host's time per call


@pytest.mark.slow
def test_the_parts_of_the_dispatch_benchmark_that_need_no_gpu(tmp_path, monkeypatch, device, forks):
    """Turns, processes and the file; on the CPU torch computes, so that no launch is measured."""
    for name in ("TUNEGEMM_DB", "TUNEGEMM_CACHE_DIR", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(first_call, "PROCESSES", 1)

    # Programs that import torch before their clock starts: in forks that have it.
    def run(command, *, env, **_):
        return forks.run(f"import sys; sys.argv = {command[2:]}\n{command[2]}", env=env)

    monkeypatch.setattr(first_call, "subprocess", types.SimpleNamespace(run=run))
    dispatch.place(tmp_path)
    slow = functools.partial(time.sleep, 1e-4)  # a call that is known to take 100 us and more
    samples = dispatch.host_times({"slow": slow, "fast": lambda: None}, 3, lambda: None)
    assert [len(each) for each in samples.values()] == [3, 3]
    assert min(samples["slow"]) > 90 > max(samples["fast"])
    on_cpu = dataclasses.replace(device, spec="cpu")
    found = first_call.fresh_processes(SMALL, on_cpu, records=400)
    assert found["records"] >= 400 and not found["first_call_is_tuned"]
    assert 100 < found["bytes_per_record"] < 10_000
    assert 0 < found["import_ms"] <= found["import_and_matmul_ms"]
    calls = dispatch.calls(SMALL, on_cpu) | dispatch.fall_backs(SMALL, on_cpu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for own, torchs in calls.values():
            own(), torchs()
    file = results.Results(tmp_path / "dispatch.json", {"gpu": "none"})
    file.summary = {"ratio_to_torch_mm": 0.7}
    for name in calls:
        file.put(results.problem_fields(SMALL) | {"call": name, "ratio": 0.7})
    written = json.loads((tmp_path / "dispatch.json").read_text())
    assert written["ratio_to_torch_mm"] == 0.7 and [row["call"] for row in written["rows"]] == list(calls)


def test_rows_of_threads_are_told_apart_by_streams_and_captures(tmp_path):
    kept = results.Results(tmp_path / "threads.json", {})
    settings = [
        {"streams": streams, "captures": captures} for streams in (1, 4) for captures in (False, True)
    ]
    kept.put(*({"label": "same", **each, "calls": 1} for each in settings))
    kept.put({"label": "same", **settings[-1], "calls": 2})
    assert [row["calls"] for row in kept.rows] == [1, 1, 1, 2]
