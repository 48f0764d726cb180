"""benchmarks/tuning_many.py: the real command on a recorded device, and what is read of a database."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import tuning_many
from fit.campaign import products
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.device import Fingerprint, device_from_part
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.workload import read
from tunegemm.measure.outcome import Measurement
from tunegemm.store import Database, packs
from tunegemm.tuning.tuner import open_device

FIRST, SECOND = Problem.parse("64x4096x4096"), Problem.parse("4096x4096x4096")
LAYERS = {
    "Llama-3-8B": ["6144x4096", "4096x4096", "28672x4096", "4096x14336"],
    "Qwen3-32B": ["10240x5120", "5120x8192", "51200x5120", "5120x25600"],
    "DeepSeek-V3": ["36864x7168", "7168x18432", "24576x1536", "7168x16384"],
}


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list of one product with recorded times, and one that is not recorded."""
    path = tmp_path / "list.json"
    dtypes = {"layout": "tnt", "dtype_a": "bf16", "dtype_b": "bf16", "dtype_d": "bf16"}
    path.write_text(json.dumps([{"m": one.m, "n": one.n, "k": one.k} | dtypes for one in (FIRST, SECOND)]))
    return path


def arguments(listed: Path, *more: str) -> list[str]:
    return ["--list", str(listed), "--device", "replay:h200", "--out", str(listed.parent / "out"), *more]


def document(listed: Path) -> dict:
    return json.loads((listed.parent / "out" / "tuning_many.json").read_text())


def test_the_list_is_of_100_products_of_the_models_whose_records_ship() -> None:
    demands, refused = read(tuning_many.LIST)
    found = [demand.problem for demand in demands]
    assert len(found) == len(set(found)) == 100 and not refused
    rows = (1, 4, 16, 64, 256, 1024, 4096)
    wanted = [Problem.parse(f"{m}x{layer}") for layers in LAYERS.values() for layer in layers for m in rows]
    assert found[:84] == wanted and set(found) <= set(products())


def test_peers_are_timed_on_products_of_all_kinds() -> None:
    found = tuning_many.spread([demand.problem for demand in read(tuning_many.LIST)[0]], 10)
    assert len({problem.m for problem in found}) >= 6 and len({(p.n, p.k) for p in found}) == 10
    assert tuning_many.spread([FIRST, SECOND], 5) == [FIRST, SECOND]


def test_rows_say_what_the_database_has(tmp_path: Path) -> None:
    path, started = tmp_path / "found.sqlite", time.time() - 100
    versions = ("580.159.04", "13.0", "2.11.0", "4.8.1", "3.6.0")
    device = device_from_part(
        "cuda:0", PARTS["h200"], Fingerprint("NVIDIA H200", 132, "9.0", "", 132, *versions)
    )
    kernels = [Candidate.make("cute_sm90", {"tile_m": 128, "tile_n": n}, {}) for n in (64, 128, 256)]
    steady = {"rounds": 4, "turn_ms": 160.0}
    with Database.open(path, create=True) as database:
        for kernel in kernels:
            database.publish(FIRST, device, Measurement(kernel, (2.0,) * 3, (2.1,) * 3, 1e-3, 0.002, {}))
        best = Measurement(kernels[1], (2.0,) * 3, (2.5,) * 3, 1e-3, 0.002, {})
        database.confirm(FIRST, device, best, label="best")
        turn = Measurement(kernels[2], (2.0,) * 3, (2.2,) * 3, 1e-3, 0.002, steady)
        database.publish(SECOND, device, turn, method="steady_final")
    first, second = tuning_many.stored_rows(path, started, is_one_gpu=True)
    assert (first["m"], first["done"], first["ratio"], first["best"]) == (64, True, 1.25, "best")
    assert first["measured"] == 3 and not first["at_cap"]
    assert 100 <= first["first_s"] <= first["last_s"] == first["seconds"]
    assert (second["m"], second["done"], second["measured"], second["at_cap"]) == (4096, False, 1, True)
    assert second["seconds"] == pytest.approx(second["last_s"] - first["last_s"], abs=0.02)
    assert tuning_many.stored_rows(path, started, is_one_gpu=False)[0]["seconds"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_the_command_is_interrupted_after_its_budget(listed: Path) -> None:
    """Nothing of a recording is stored, so that no product counts as reached."""
    assert tuning_many.main(arguments(listed, "--budget", "9", "--without-library")) == 0
    found = document(listed)
    (mode,) = found.keys() - {"meta", "rows"}
    assert mode == "without library" and found["rows"] == []
    assert found[mode]["exit_code"] == 130 and 9 <= found[mode]["seconds"] < 60
    assert found[mode]["products"] == 2 and found[mode]["reached"] == 0
    assert "Interrupted: the measurements are kept" in (listed.parent / "out" / "tuning_many.log").read_text()


@pytest.mark.parametrize(("pack", "mode"), [(object(), "as installed"), (None, "without library")])
def test_a_command_that_fails_is_said_so(
    listed: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pack: object,
    mode: str,
) -> None:
    """Of a checkout with compiled kernels, and of one without."""
    monkeypatch.setattr(packs, "shipped", lambda: pack)
    assert tuning_many.main(arguments(listed, "--devices", "7")) == 1
    assert "ended with 2: see" in capsys.readouterr().err
    assert document(listed)[f"{mode}, devices 7"]["exit_code"] == 2


@pytest.mark.slow
def test_a_peer_that_cannot_run_is_a_row_with_its_reason() -> None:
    row = tuning_many.peer("quack", FIRST, open_device("replay:h200"), 5)
    assert row["seconds"] is None and row["process_s"] > 0 and "replay:h200" in row["skipped"]


def test_bad_input_is_one_line(listed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = listed.parent / "taken.sqlite"
    taken.touch()
    for more, words in (
        (["--database", str(taken)], "taken.sqlite exists"),
        (["--without-library", "--devices", "0,1"], "give --device"),
        (["--list", str(taken.with_name("none.json"))], "none.json"),
    ):
        assert tuning_many.main(arguments(listed, *more)) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert tuning_many.main(["--device", "replay:h200"]) == 2
    assert "measures nothing" in capsys.readouterr().err
