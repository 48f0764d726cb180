"""The generated blocks of the documents are current, and the generator invents nothing."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tunegemm
from benchmarks.tables import programs
from tunegemm.report.doctor import VARIABLES

ROOT = Path(__file__).parent.parent
GENERATOR = ROOT / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(generate: ModuleType) -> dict[Path, bytes]:
    return generate.figures()


def test_the_blocks_are_current(generate: ModuleType) -> None:
    """As `--check` finds it, whose exit code is tested below."""
    for path in generate.documents():
        text = path.read_text()
        assert generate.refresh(text) == text, f"{path.name} is out of date; run `make docs`"


def test_every_block_is_in_one_document(generate: ModuleType) -> None:
    text = "".join(path.read_text() for path in generate.documents())
    names = sorted(re.findall(r"<!-- generated: ([\w-]+) -->", text))
    of_h100 = [name for name in names if name.endswith(generate.OF_H100)]
    assert [name for name in names if name not in of_h100] == sorted(generate.BLOCKS)
    assert len(set(of_h100)) == len(of_h100) > 0


def test_the_figures_are_current(figures: dict[Path, bytes]) -> None:
    names = {"products", "first-use", "first-use-h100"}
    assert {path.name for path in figures} == {f"{name}.svg" for name in names}
    for path, content in figures.items():
        assert path.read_bytes() == content, f"{path.name} is out of date; run `make docs`"


def test_a_figure_does_not_depend_on_the_processs_style(
    generate: ModuleType, figures: dict[Path, bytes]
) -> None:
    import matplotlib.style

    with matplotlib.style.context("ggplot"):
        assert generate.figures() == figures


def test_links_of_the_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def timed(**medians: float | None) -> dict[str, Any]:
    return {
        name: {"skipped": "not installed"} if us is None else {"median_us": us}
        for name, us in medians.items()
    }


def write_peers(folder: Path, *rows: dict[str, Any]) -> None:
    packages = {"torch": "2.11.0", "cuda": "13.0"}
    meta = {"gpu": "Some GPU", "driver": "580.1", "date": "2026-11-20T12:00:00+00:00", "packages": packages}
    (folder / "peers.json").write_text(json.dumps({"rows": rows, "meta": meta}))


def row(m: int, n: int, k: int, providers: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {"batch": 1, "dtype": "bf16", "layout": "tn", "epilogue": "none", "tune_seconds": 1.0}
    return {"m": m, "n": n, "k": k, "providers": providers} | usual | more


class TestBlocks:
    def test_without_results_nothing_is_claimed(self, generate: ModuleType, tmp_path: Path) -> None:
        for name in ("peers", "tuning-time"):
            text = generate.refresh(f"<!-- generated: {name} -->\nold 1.234\n<!-- end -->\n", tmp_path)
            assert "Nothing measured yet" in text
            assert "1.234" not in text

    def test_peers(self, generate: ModuleType, tmp_path: Path) -> None:
        write_peers(
            tmp_path,
            row(4096, 4096, 4096, timed(torch=200.0, quack=190.0, tunegemm=160.0)),
            row(128, 256, 64, timed(torch=10.0, quack=None, tunegemm=12.5), layout="tt", batch=2),
        )
        table = generate.peers(tmp_path)
        assert "Measured on Some GPU, driver 580.1, 2026-11-20, torch 2.11.0, cuda 13.0." in table
        assert "| 4096x4096x4096 | 200.0 us, 687 | 1.053 | **1.250** |" in table
        assert "| 128x256x64x2 tt | 10.0 us, 1 |  | 0.800 |" in table
        assert "| *geometric mean* |  | 1.053 (1) | 1.000 |" in table
        assert "Where tunegemm loses: 128x256x64x2 tt (torch: 25.0 % faster)." in table

    def test_rows_timed_in_turns_say_what_shared_clocks_would_have_said(
        self, generate: ModuleType, tmp_path: Path
    ) -> None:
        alone = timed(torch=100.0, tunegemm=98.0)
        alone["tunegemm"] |= {"ratio": 1.02, "ratio_shared": 1.06}
        write_peers(
            tmp_path,
            row(4096, 4096, 4096, alone, turn_ms=160.0),
            row(16, 4096, 4096, timed(torch=10.0, tunegemm=8.0), turn_ms=0.0),
        )
        text = generate.peers(tmp_path)
        assert "| M x N x K | torch.mm, TFLOP/s | tunegemm | tunegemm, interleaved |" in text
        assert "| 4096x4096x4096 | 100.0 us, 1374 | **1.020** | 1.060 |" in text
        assert "| 16x4096x4096 | 10.0 us, 54 | **1.250** |  |" in text
        assert "Over the 1 shapes at the power cap it reaches 1.020 of `torch.mm`, interleaved" in text
        assert "Not timed in this run: 8192x8192x8192, 2048x2048x2048" in text

    def test_gains_have_a_line_for_each_use_that_was_measured(
        self, generate: ModuleType, tmp_path: Path
    ) -> None:
        for folder in ("h200", "h100-80gb-hbm3"):
            (tmp_path / folder).mkdir()
        write_peers(
            tmp_path / "h200",
            row(64, 512, 512, timed(torch=2.0, tunegemm=1.0)),
            row(512, 512, 512, timed(torch=2.0, tunegemm=1.6)),
            row(128, 512, 512, timed(torch=3.0, tunegemm=3.0)),
        )
        first = [{"m": m, "listed": m == 1, "ratio": r} for m, r in ((1, 1.2), (128, 1.1), (129, 1.0))]
        (tmp_path / "h100-80gb-hbm3" / "first_use.json").write_text(json.dumps({"rows": first}))
        assert generate.gains(tmp_path / "h200").splitlines()[2:] == [
            "| one product, tuned, up to 64 rows | 2.000 (2.000) |  |",
            "| one product, tuned, 128 to 512 rows | 1.118 (1.000) |  |",
            "| one product with a shipped record |  | 1.200 (1.200) |",
            "| one product nobody tuned, up to 128 rows |  | 1.100 (1.100) |",
            "| one product nobody tuned, more rows |  | 1.000 (1.000) |",
        ]

    def test_bits_at_any_batch(self, generate: ModuleType, tmp_path: Path) -> None:
        product = row(16, 64, 32, {}, differing=3, ratio_to_fastest=0.5, ratio_to_torch=2.0)
        triton = {"ratio_to_triton": 4.0, "triton_differing": 0}
        rows = [product, product | triton | {"m": 1, "epilogue": "swiglu", "differing": 0}]
        (tmp_path / "batch_invariance.json").write_text(json.dumps({"rows": rows, "meta": {}}))
        table = generate.batch_invariance(tmp_path)
        assert (
            "| all | 2 | 3 | 0.500 | 0.500 (16x64x32) | 2.000 | 2.000 (16x64x32) | 4.000 | "
            "4.000 (1x64x32 swiglu) |" in table
        )
        assert "| M = 16 | 1 | 3 | 0.500 | 0.500 (16x64x32) | 2.000 | 2.000 (16x64x32) |  |  |" in table
        assert "0 of the Triton kernel's 1 products have rows with other bits." in table

    def test_no_loss_is_said_only_where_tunegemm_ran(self, generate: ModuleType, tmp_path: Path) -> None:
        write_peers(tmp_path, row(8, 8, 8, timed(torch=2.0, tunegemm=1.0)))
        assert "No peer is faster than tunegemm by more than the noise" in generate.peers(tmp_path)
        write_peers(tmp_path, row(8, 8, 8, timed(torch=2.0, quack=1.0)))
        assert "No peer" not in generate.peers(tmp_path)

    def test_what_is_within_the_noise_is_no_loss_but_said(self, generate: ModuleType, tmp_path: Path) -> None:
        close, far = (timed(torch=us, tunegemm=100.0, triton_tma=us) for us in (99.5, 90.0))
        write_peers(tmp_path, row(8, 8, 8, close, noise=0.01), row(16, 8, 8, far, noise=0.01))
        text = generate.peers(tmp_path)
        assert "Where tunegemm loses: 16x8x8 (torch: 11.1 % faster)." in text
        assert "Within the noise a peer is ahead on 1 of 2 shapes: 8x8x8 (torch: 0.5 % faster)." in text
        assert (
            "beat the record in this interleave by more than the noise: 16x8x8 (triton_tma: 11.1 %)." in text
        )
        assert "triton_tma" not in text.split("Slower than")[0], "it has no column of its own"

    def test_odd_shapes_have_their_own_table(self, generate: ModuleType, tmp_path: Path) -> None:
        write_peers(
            tmp_path,
            row(4096, 4096, 1001, timed(torch=40.0, inductor=10.0, cute_sm80=50.0, tunegemm=40.0)),
            row(64, 64, 64, timed(torch=4.0, tunegemm=2.0)),
        )
        assert "4096x4096x1001" not in generate.peers(tmp_path)
        text = generate.peers_odd(tmp_path)
        assert "| **4.000** | 0.800 | 1.000 |" in text and "64x64x64" not in text
        assert "Inductor is up to 4.0 times as fast" in text

    def test_a_row_without_the_baseline_is_refused(self, generate: ModuleType, tmp_path: Path) -> None:
        write_peers(tmp_path, row(8, 8, 8, timed(tunegemm=1.0)))
        with pytest.raises(generate.DocsError, match="8x8x8: no time of 'torch'"):
            generate.peers(tmp_path)

    def test_tuning_time(self, generate: ModuleType, tmp_path: Path) -> None:
        times = {"cold_s": 12.34, "first_s": 3.96, "warm_s": 1.94, "searched_s": 1.04, "next_s": 0.6}
        row = {"m": 64, "n": 64, "k": 128, "at_cap": True, "measured": 51, "compiled": 7, "ratio": 1.0123}
        (tmp_path / "tuning_time.json").write_text(json.dumps({"meta": {}, "rows": [row | times]}))
        table = generate.tuning_time(tmp_path)
        assert "| 64x64x128 | at the cap | 12.3 | 4.0 | 1.9 | 1.0 | 0.6 | 51 | 7 | 1.012 |" in table

    def test_tuning_many(self, generate: ModuleType, tmp_path: Path) -> None:
        own = {"mode": "without library"}
        rows = [
            own | {"seconds": 4.0, "at_cap": True, "done": True, "last_s": 7.21},
            own | {"seconds": 6.04, "at_cap": True, "done": True, "last_s": 10.21},
            own | {"seconds": 1.5, "at_cap": False, "done": False, "last_s": 11.5},
            {"mode": "inductor", "seconds": 31.2},
            {"mode": "inductor", "seconds": None},
        ]
        one = {
            "done": 2,
            "products": 4,
            "seconds": 11.6,
            "first_s": 3.21,
            "compiled": 7,
            "geometric_mean": 1.05,
        }
        of_peer = {"done": 1, "products": 2, "geometric_mean": None}
        document = {"meta": {}, "rows": rows, "without library": one, "inductor": of_peer}
        (tmp_path / "tuning_many.json").write_text(json.dumps(document))
        table = generate.tuning_many(tmp_path)
        assert "| without library | 12 | 2 of 4 | 3.2 | 3.50 | 7 | 1.050 |" in table
        assert "| without library | at the cap | 2 | 5.0 | 4.0 |" in table
        assert "| without library | below it | 1 | 1.5 | 1.5 |" in table
        assert "| inductor |  | 1 | 31.2 | 31.2 |" in table

    def test_campaign(self, generate: ModuleType, tmp_path: Path) -> None:
        rows = [
            {"seconds": seconds, "steady": steady, "compiled_only": True}
            for seconds, steady in ((1.0, False), (2.04, False), (9.0, False), (5.5, True))
        ]
        (tmp_path / "campaign.json").write_text(json.dumps({"meta": {}, "rows": rows}))
        table = generate.campaign(tmp_path)
        assert "| compiled before | interleaved | 3 | 2.0 | 2.0 |" in table
        assert "| compiled before | steady state | 1 | 5.5 | 5.5 |" in table
        assert "meanwhile" not in table

    def test_clients(self, generate: ModuleType, tmp_path: Path) -> None:
        shared = {
            "layers": 2,
            "torch_us": 2000.0,
            "noise": 0.004,
            "torch_error": 1e-2,
            "tunegemm_us": 1900.0,
            "ratio": 1.05,
            "tunegemm_error": 9e-3,
        }
        rows = [
            {"workload": "prefill", "mode": "eager"} | shared,
            {"workload": "prefill", "mode": "graph"} | shared | {"ratio": 0.99},
        ]
        (tmp_path / "clients.json").write_text(json.dumps({"meta": {}, "rows": rows}))
        text = generate.clients(tmp_path)
        assert "| prefill, eager | 2 | 2.000 | 1.900 | 1.050 | 0.4% | 1.00e-02 | 9.00e-03 |" in text
        assert text.endswith("more than the noise: prefill graph (0.990).")
        more = {"model": "1B", "torch_peak_mib": 100.0, "tunegemm_peak_mib": 97.0}
        more |= {"workload": "train", "mode": "eager"}
        (tmp_path / "clients.json").write_text(json.dumps({"meta": {}, "rows": [rows[0], shared | more]}))
        trained = generate.clients(tmp_path)
        assert "| prefill, eager | 2 | 2.000 | 1.900 | 1.050 | 0.4% |  | 1.00e-02 |" in trained
        assert "| train, eager | 2 of 1B | 2.000 | 1.900 | 1.050 | 0.4% | 0.970 | 1.00e-02 |" in trained
        step = shared | {"workload": "train", "mode": "compile", "tokens": 4096, "served": 9}
        steps = {"meta": {}, "rows": [step | {"tuned": True}, step]}
        (tmp_path / "clients_training.json").write_text(json.dumps(steps))
        told = generate.clients_training(tmp_path)
        assert "| noise | tokens | products tuned and served | torch's error |" in told
        assert "| 0.4% | 4096 | yes, 9 | 1.00e-02 |" in told and "| 0.4% | 4096 | no, 9 | 1.00e-02 |" in told
        (tmp_path / "clients.json").write_text(json.dumps({"meta": {}, "rows": rows}))

    def test_layers(self, tmp_path: Path) -> None:
        shared = {"model": "m", "torch_ms": 2.0, "ratio": 1.1, "noise": 0.004}
        rows = [
            shared | {"rows": "d16", "mode": "graph", "ratio_to_merged": 1.05},
            shared | {"rows": "d16", "mode": "graph", "model": "o", "ratio": 1.2},
            shared | {"rows": "256", "mode": "graph", "ratio": 0.99},
            shared | {"rows": "d16", "mode": "backend", "host_us": 60.0, "torch_host_us": 100.0},
            shared | {"rows": "d16", "mode": "patched"},
        ]
        (tmp_path / "layers.json").write_text(json.dumps({"meta": {}, "rows": rows}))
        text = programs.layers(tmp_path)
        assert "| d16 | 2 | 1.149 | 1.100 (m) | 1.050 | 0.4% |" in text
        assert "| 256 | 1 | 0.990 | 0.990 (m) |  | 0.4% |" in text
        assert "| d16 | 1 | 1.100 | 1.100 (m) |  | 0.4% | 0.60 |" in text
        assert "- patched: d16 1.100\n" in text
        assert text.endswith("- slower than torch by more than the noise: m 256 graph (0.990)")

    def test_first_use_kinds(self, generate: ModuleType, tmp_path: Path) -> None:
        row = {"m": 64, "n": 512, "k": 512, "dtype": "bf16", "epilogue": "residual", "served": True}
        rows = [
            row | {"ratio": 1.21, "expected": 1.2},
            row | {"m": 32, "ratio": 0.97, "expected": 1.1},
            row | {"m": 4096, "ratio": 1.0, "expected": None, "served": False},
        ]
        (tmp_path / "first_use_kinds.json").write_text(json.dumps({"meta": {}, "rows": rows}))
        text = generate.first_use_kinds(tmp_path)
        assert (
            "| bf16 residual | 32-64 | 2 | 2 | 1.083 | 0.970 | 1.083 | 1.149 | 32x512x512 residual 0.970 |"
            in text
        )
        assert "| bf16 residual | 4096-4096 | 1 | 0 | 1.000 | 1.000 |" in text
        assert text.endswith(
            "67% of 3 products were served. Geometric mean of all: 1.055 of torch; 1 below 0.98."
        )

    def test_every_command_is_listed(self, generate: ModuleType, tmp_path: Path) -> None:
        text = generate.cli(tmp_path)
        for words in (
            "tunegemm tune`",
            "tunegemm leaderboard`",
            "tunegemm space`",
            "tunegemm doctor`",
            "`--budget`",
        ):
            assert words in text

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": []}'])
    def test_damaged_result_file(self, generate: ModuleType, tmp_path: Path, content: str) -> None:
        (tmp_path / "peers.json").write_text(content)
        with pytest.raises(generate.DocsError, match=r"peers\.json"):
            generate.peers(tmp_path)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("<!-- generated: nothing -->\n<!-- end -->", "'nothing'"),
            ("<!-- generated: peers -->\n", "no end mark"),
        ],
    )
    def test_bad_blocks(self, generate: ModuleType, tmp_path: Path, text: str, named: str) -> None:
        with pytest.raises(generate.DocsError, match=named):
            generate.refresh(text, tmp_path)

    def test_refreshing_twice_changes_nothing(self, generate: ModuleType, tmp_path: Path) -> None:
        """Of a stale text; that a current one stays as it is, `test_the_blocks_are_current` shows of all."""
        stale = "before\n<!-- generated: peers -->\nold 1.234\n<!-- end -->\nafter\n"
        once = generate.refresh(stale, tmp_path)
        assert once != stale and generate.refresh(once, tmp_path) == once


def test_the_check_fails_on_a_stale_block(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(GENERATOR, tmp_path / "docs")
    (tmp_path / "README.md").write_text("<!-- generated: peers -->\n1.5 x faster\n<!-- end -->\n")
    command = [sys.executable, str(tmp_path / "docs" / "generate.py")]
    assert subprocess.run([*command, "--check"], capture_output=True).returncode == 1
    assert "1.5" in (tmp_path / "README.md").read_text(), "--check must change nothing"
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run([*command, "--check"], capture_output=True).returncode == 0


def test_every_document_says_the_same_version() -> None:
    said = {
        "CITATION.cff": r"^version: (\S+)",
        "CHANGELOG.md": r"^## \[(\d\S+)\]",
        "SECURITY.md": r"version, (\d\S+), gets",
        "docs/reference/versions.md": r"^tunegemm (\d\S+)\. ",
        "docs/quickstart.md": r"tunegemm-(\d\S+)-py3-none-any",
    }
    for name, pattern in said.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found and found[1] == tunegemm.__version__, name


def test_the_readme_links_what_a_newcomer_asks_for() -> None:
    """How to install, versions, safety, costs and other tools, troubleshooting, undoing, security, citing."""
    linked = set(re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()))
    guides = {f"docs/guide/{name}.md" for name in ("safety", "costs", "troubleshooting", "undo", "which_way")}
    others = {
        "docs/quickstart.md",
        "docs/reference/versions.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "CITATION.cff",
    }
    assert guides | others <= linked
    headings = {
        "docs/quickstart.md": ("1. Install",),
        "docs/guide/costs.md": ("Beside other tools",),
        "docs/guide/undo.md": ("Uninstall",),
    }
    for name, wanted in headings.items():
        text = (ROOT / name).read_text()
        assert all(re.search(rf"^## {re.escape(one)}$", text, re.MULTILINE) for one in wanted), name


#: What describes the tree as it is, which the changelog does not.
TOLD = [
    path
    for folder in ("docs", "tunegemm", "benchmarks", "fit", "db", "search_spaces", ".")
    for path in sorted(ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*"))
    if path.suffix in (".md", ".py", ".toml") and path.name != "CHANGELOG.md"
]


def test_result_files_that_documents_and_comments_name_are_there() -> None:
    """A file that a sentence cites must not vanish or be renamed."""
    results = {path.name for path in (ROOT / "benchmarks").rglob("*.json")}
    missing = []
    for path in TOLD:
        cited = re.findall(r"([\w-]+-20\d\d-\d\d-\d\d\.json)", path.read_text())
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in cited if name not in results]
    assert not missing, missing


def test_files_and_modules_that_documents_and_comments_name_are_there() -> None:
    missing = []
    for path in TOLD:
        text = path.read_text()
        cited = re.findall(r"\b(?:tests|docs|tunegemm|benchmarks|fit)/[\w/-]+\.(?:py|md|toml|html)\b", text)
        modules = re.findall(r"(?:-m |`)(benchmarks|fit)\.(\w+)", text)
        cited += [f"{folder}/{name}" for folder, name in modules]
        missing += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in cited
            if not any((ROOT / place).exists() for place in (name, f"{name}.py"))
        ]
    assert not missing, missing


def test_the_environments_variables_are_those_that_the_code_reads() -> None:
    """Named in one table for users, and known to `tunegemm doctor`, which takes others for misspelt."""
    named = re.compile(r"\"(TUNEGEMM_\w+)\"")
    read = {name for path in (ROOT / "tunegemm").rglob("*.py") for name in named.findall(path.read_text())}
    assert read == set(VARIABLES)
    table = (ROOT / "docs" / "reference" / "environment.md").read_text()
    listed = re.findall(r"^\| `(TUNEGEMM_\w+)` \|", table, re.MULTILINE)
    assert set(listed) == {name for name in read if not name.endswith("_PARTS")}, "of child processes alone"
    assert len(listed) == len(set(listed))


def test_the_reference_has_each_public_name_and_each_of_its_methods_with_an_example() -> None:
    """What the page lists is public, whatever else a class has; its examples run in test_documents_run.py."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    listed = dict(re.findall(r"\.\. auto\w+:: (\w+)\n(?:   :members:(.*)\n)?", page))
    assert sorted(listed) == sorted(tunegemm.__all__)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    lacking = [name for name in listed if not re.search(rf"\btunegemm\.{name}\b", code)]
    for name, members in listed.items():
        owner = getattr(tunegemm, name)
        own = [each for each in vars(owner) if not each.startswith("_")] if isinstance(owner, type) else []
        shown = [word.strip() for word in members.split(",") if word.strip()]
        if f"autoclass:: {name}\n   :members:\n" in page:
            shown = own
        assert set(shown) <= {*own, *getattr(owner, "__dataclass_fields__", ())}, name
        for member in shown:
            if member in own and callable(found := getattr(owner, member)):
                assert inspect.getdoc(found), f"{name}.{member}"
                lacking += [] if re.search(rf"\.{member}\b", code) else [f"{name}.{member}"]
    assert not lacking, lacking
