"""Files of shapes: ours, TunableOp's and CUTLASS's; and what of them can be tuned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tunegemm.describe.problem import OUTPUT_DTYPES, Problem, operand_dtypes
from tunegemm.describe.workload import Demand, Product, Workload, demands, foreign, merge, read
from tunegemm.describe.workload.formats import Entries, Format, dtype_of
from tunegemm.describe.workload.products import Kind
from tunegemm.errors import WorkloadError
from tunegemm.generate import families

KIND = Kind(512, 6144, 4096, 1, "bf16", "bf16", "k", "k", "n", 16)
SMALL = replace(KIND, m=16)


class TestOwnFormat:
    WORKLOAD = Workload(
        (Product(SMALL, 640, 600, 2, 32, 15.25), Product(KIND, 2, timed=2, median_us=35.5)),
        ("python", "train.py"), "2.13.0", "NVIDIA H200", 2, 1,
    )  # fmt: skip

    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "shapes.json"
        self.WORKLOAD.write(path)
        document = json.loads(path.read_text())
        assert Workload.from_document(document, "x") == (self.WORKLOAD, [])
        assert document["products"][0]["seconds"] == pytest.approx(640 * 15.25e-6)
        assert document["products"][0]["clock"] == "cuda_events"
        assert list(tmp_path.iterdir()) == [path]

    def test_the_text_does_not_depend_on_the_order_of_calls(self) -> None:
        products = self.WORKLOAD.products
        texts = {merge([Workload((p,)) for p in order]).to_json() for order in (products, products[::-1])}
        assert len(texts) == 1

    def test_merge_adds_processes(self) -> None:
        other = Workload((Product(SMALL, 10, 7, 1, timed=32, median_us=17.25),), torch="2.13.0")
        merged = merge([self.WORKLOAD, other], ["python", "x.py"])
        assert merged.products[0] == Product(SMALL, 650, 607, 3, 64, 16.25)
        assert (merged.processes, merged.program, merged.unknown_replays) == (3, ("python", "x.py"), 1)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"format": "else"}, '"format": "tunegemm-shapes"'),
            ({"version": 2}, "version 2 of the format"),
            ({"version": [1]}, "version a list of the format"),
            ({"products": 3}, "`products`: 3 is not a list"),
            ({"products": [{"m": 3}]}, "product 1: it lacks n, k, batch"),
            ({"products": [7]}, "no product in it can be tuned .*: product 1: it 7 is not an object"),
            ({"program": 5}, "program: 5 is not a list"),
            ({"program": [5]}, "a word of program 5 is not a line"),
            ({"torch": "\x1b[31m"}, r"torch '\\x1b\[31m' is not a line"),
            ({"processes": 10**400}, "processes a number of over 19 digits is not a whole number"),
        ],
    )
    def test_damaged(self, tmp_path: Path, change: dict[str, object], named: str) -> None:
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps(json.loads(self.WORKLOAD.to_json()) | change))
        with pytest.raises(WorkloadError, match=f"{path}.*{named}"):
            read(path)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            *(({"m": extent}, f"m {extent!r} is not a whole number from 1") for extent in (0, -1, "4", 1.5)),
            ({"calls": 10**400}, "calls a number of over 19 digits is not a whole number"),
            ({"in_dtype": ["bf16"]}, "in_dtype a list is not a line"),
            ({"median_us": [1]}, "median_us a list is not a number"),
            ({"alignment": "16"}, "alignment '16' is not a whole number"),
        ],
    )
    def test_a_bad_product_is_named_and_the_others_land(self, change: dict[str, object], named: str) -> None:
        document = json.loads(self.WORKLOAD.to_json())
        document["products"][1] |= change
        workload, (line,) = Workload.from_document(document, "x")
        assert workload.products == self.WORKLOAD.products[:1]
        assert line.startswith(f"product 2: {named}")


class TestDemands:
    def test_what_a_call_does_with_its_product_makes_a_problem_of_its_own(self) -> None:
        plain = Product(KIND, 30, timed=30, median_us=10.0)
        scaled = replace(KIND, op="addmm", bias="matrix", epilogue="alpha+beta_c")
        products = [
            plain,
            Product(scaled, 10, timed=10, median_us=14.0),
            Product(replace(KIND, op="linear", epilogue="bias_n+gelu"), 5, timed=5, median_us=12.0),
            replace(plain, calls=10, median_us=14.0),
        ]
        found, refused = demands(products)
        assert found == [
            Demand(Problem(512, 6144, 4096), 40, 11.0),
            Demand(Problem(512, 6144, 4096, epilogue="alpha+beta_c"), 10, 14.0),
            Demand(Problem(512, 6144, 4096, epilogue="bias_n+gelu"), 5, 12.0),
        ]
        assert refused == []

    def test_how_sums_are_kept_is_part_of_it(self) -> None:
        kind = replace(KIND, in_dtype="fp8_e4m3", op="scaled_mm", epilogue="scale_tensor")
        kinds = [replace(kind, accumulation=accumulation) for accumulation in ("fast", "two_level")]
        found, refused = demands([Product(each, 2) for each in kinds])
        assert [demand.problem.accumulation for demand in found] == ["fast", "two_level"] and not refused

    def test_what_is_torchs_whatever_is_tuned_is_no_demand(self) -> None:
        kind = replace(KIND, op="addmm", bias="matrix", refusal="in place: addmm_ is torch's")
        own = replace(KIND, op="linear", epilogue="custom:capped@0123456789abcdef")
        found, refused = demands([Product(kind, 2), Product(own, 1)])
        assert found == []
        assert refused == [
            "addmm 512x6144x4096: in place: addmm_ is torch's",
            "linear 512x6144x4096: epilogue custom:capped@0123456789abcdef is a function of its program: "
            "call tunegemm.tune there",
        ]

    def test_files_from_before_epilogues_were_recorded(self, tmp_path: Path) -> None:
        document = json.loads(Workload((Product(KIND, 1),)).to_json())
        (row,) = document["products"]
        for later in ("epilogue", "accumulation", "refusal"):
            del row[later]
        document["products"] = [
            row | {"op": "addmm", "bias": "vector"},
            row | {"op": "addmm", "bias": "matrix"},
            row | {"op": "addmm_activation", "bias": "vector", "activation": "gelu"},
            row | {"op": "scaled_mm", "in_dtype": "fp8_e4m3"},
        ]
        path = tmp_path / "shapes.json"
        path.write_text(json.dumps(document))
        found, refused = read(path)
        assert [demand.problem.epilogue for demand in found] == ["bias_n", "beta_c"]
        assert "activation" in refused[0] and "its scales were not recorded" in refused[1]

    def test_a_time_on_a_cpu_is_none_on_a_gpu(self) -> None:
        (demand,), _ = demands([Product(replace(KIND, device="cpu"), 3, timed=3, median_us=9e4)])
        assert (demand.calls, demand.call_us) == (3, None)

    def test_a_capture_weighs_where_no_replay_was_seen(self) -> None:
        (demand,), _ = demands([Product(KIND, 0, captured=4)])
        assert demand.calls == 4

    def test_products_without_kernels_are_named(self) -> None:
        found, refused = demands(
            [
                Product(replace(KIND, in_dtype="fp32", out_dtype="fp32"), 1),
                Product(replace(KIND, a_major=""), 1),
            ]
        )
        assert found == []
        assert "mm 512x6144x4096: input dtype 'fp32' has no kernels" in refused[0]
        assert "no contiguous mode" in refused[1]


class TestTunableOp:
    def test_letters_and_leading_dimensions(self, tmp_path: Path) -> None:
        """As PyTorch writes them for x @ weight.T, x @ weight, a gradient of a weight, and a padded x."""
        path = tmp_path / "tunableop_untuned0.csv"
        path.write_text(
            "Validator,PT_VERSION,2.9.0\n"
            "GemmTunableOp_BFloat16_TN,tn_6144_512_4096_ld_4096_4096_6144\n"
            "GemmTunableOp_Half_NN,nn_4096_512_6144_ld_4096_6144_4096\n"
            "GemmTunableOp_BFloat16_NT,nt_4096_6144_512_ld_4096_6144_4096\n"
            "GemmTunableOp_BFloat16_TN,tn_6144_512_4096_ld_4096_4100_6144\n"
            "GemmAndBiasTunableOp_BFloat16_TN,tn_128_16_64_ld_64_64_128,Default,0.1\n"
            "GemmStridedBatchedTunableOp_BFloat16_NN,nn_24_8_16_B_3_ld_24_16_24\n"
            "\n"
            "GemmTunableOp_float_TN,tn_128_16_64_ld_64_64_128\n"
            "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_16_16_16_ld_16_16_16_rw_0_bias_None\n"
            "GemmTunableOp_BFloat16_TN,tn_128_16\n"
            "GemmTunableOp_BFloat16_TN,tn_6144_512_4096_ld_4096_4096_6144\n"
        )
        found, refused = read(path)
        assert found == [
            Demand(Problem.parse("512x6144x4096"), 2),
            Demand(Problem.parse("512x4096x6144", dtype="fp16", layout="tt"), 1),
            Demand(Problem.parse("6144x4096x512", layout="nt"), 1),
            Demand(Problem.parse("512x6144x4096", alignment=8), 1),
            Demand(Problem.parse("16x128x64", epilogue="bias_n"), 1),
            Demand(Problem.parse("8x24x16x3", layout="tt"), 1),
            *(
                Demand(
                    Problem.parse(
                        "16x16x16", dtype="fp8_e4m3", epilogue="scale_tensor", accumulation=accumulation
                    ),
                    1,
                )
                for accumulation in ("fast", "two_level")
            ),
        ]
        assert [line.partition(":")[0] for line in refused] == ["line 9", "line 11"]
        assert "dtype 'float'" in refused[0] and "tn_128_16" in refused[1]

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (
                "GemmTunableOp_tf32_TN,tn_512_256_1024_ld_1024_1024_512,Default,0.01",
                Problem.parse("256x512x1024", dtype="tf32"),
            ),
            (
                "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e5m2_BFloat16_TN,"
                "tn_512_256_1024_ld_1024_1040_512_rw_1_bias_BFloat16",
                Problem.parse("256x512x1024", dtype="fp8_e4m3_e5m2", epilogue="scale_rowwise+bias_n"),
            ),
            (
                "ScaledGemmTunableOp_Float8_e5m2_Float8_e4m3fn_Float8_e4m3fn_TN,"
                "tn_512_256_1024_ld_1024_1024_512_rw_0_bias_None",
                Problem.parse(
                    "256x512x1024", dtype="fp8_e5m2_e4m3", out_dtype="fp8_e4m3", epilogue="scale_tensor"
                ),
            ),
            (
                "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_tf32_TN,tn_512_256_1024",
                Problem.parse("256x512x1024", dtype="fp8_e4m3", out_dtype="fp32", epilogue="scale_tensor"),
            ),
            ("GemmTunableOp_Half_NN,nn_512_256_65", Problem.parse("256x512x65", dtype="fp16", layout="tt")),
            (
                "GemmStridedBatchedTunableOp_BFloat16_TN,tn_24_8_16_B_3,Default,0.1",
                Problem.parse("8x24x16x3"),
            ),
            ("[rank0]: GemmTunableOp_BFloat16_TN,tn_24_8_16_ld_16_16_24", Problem.parse("8x24x16")),
        ],
    )  # fmt: skip
    def test_what_has_kernels_is_read(self, tmp_path: Path, line: str, problem: Problem) -> None:
        """fp8, tf32, older lines, which have no leading dimensions, and a launcher's prefix."""
        path = tmp_path / "tunableop_results0.csv"
        path.write_text(line + "\n")
        found, refused = read(path)
        assert found[0] == Demand(problem, 1) and not refused
        assert all(replace(demand.problem, accumulation="fast") == problem for demand in found)

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            (
                "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,"
                "tn_16_16_16_ld_16_16_16_rw_0_bias_Half",
                "a bias of fp16 beside an output of bf16: kernels add bf16",
            ),
            ("GemmTunableOp_double_TN,tn_16_16_16_ld_16_16_16", "dtype 'double' is not known"),
            (
                "ScaledGemmTunableOp_Float8_e4m3fnuz_Float8_e4m3fnuz_BFloat16_TN,tn_16_16_16",
                "dtype 'float8_e4m3fnuz' is not known",
            ),
        ],
    )
    def test_what_has_none_is_named(self, tmp_path: Path, line: str, named: str) -> None:
        path = tmp_path / "tunableop_untuned0.csv"
        path.write_text(line + "\nGemmTunableOp_Half_TN,tn_24_8_16\n")
        found, refused = read(path)
        assert len(found) == 1
        assert refused[0].startswith("line 1: ") and named in refused[0]

    def test_a_log_that_begins_with_a_bracket(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text(
            "[W1126 12:00:00.000 Context.cpp:80] a warning\n"
            "GemmTunableOp_BFloat16_TN,tn_24_8_16_ld_16_16_24\n"
            "step 1: loss 2.5\n"
        )
        assert read(path) == ([Demand(Problem.parse("8x24x16"), 1)], [])


class TestCutlass:
    def test_entries(self, tmp_path: Path) -> None:
        usual = {"m": 4096, "n": 2048, "k": 1024, "dtype_a": "bf16", "dtype_b": "bf16", "dtype_d": "bf16"}
        entries = [
            usual
            | {"layout": "tnt", "beta": 0.0, "use_fast_acc": False, "dtype_c": "bf16", "dtype_acc": "f32"},
            usual | {"layout": "ttn", "batch_count": 2, "dtype_d": "f32"},
            usual | {"layout": "nnt", "dtype_a": "f16", "dtype_b": "F16", "dtype_d": "f16", "beta": 1.0},
            usual | {"layout": "tnt", "alignment_a": 2},
            usual | {"layout": "tnt", "dtype_a": "e4m3"},
            usual | {"layout": "tn"},
            usual,
            7,
        ]
        path = tmp_path / "problems.json"
        path.write_text(json.dumps(entries))
        found, refused = read(path)
        assert found == [
            Demand(Problem.parse("4096x2048x1024"), 1),
            Demand(
                replace(Problem.parse("4096x2048x1024x2", layout="tt", out_dtype="fp32"), out_major="m"), 1
            ),
            Demand(Problem.parse("4096x2048x1024", dtype="fp16", layout="nn", epilogue="beta_c"), 1),
            Demand(Problem.parse("4096x2048x1024", alignment=4), 1),
        ]
        assert [line.partition(":")[0] for line in refused] == [f"entry {i}" for i in (5, 6, 7, 8)]
        assert "e4m3 x bf16" in refused[0] and "'tn'" in refused[1] and "layout missing" in refused[2]

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (
                {"dtype_a": "e4m3", "dtype_b": "e5m2", "use_fast_acc": False},
                Problem.parse("64x64x64", dtype="fp8_e4m3_e5m2", accumulation="two_level"),
            ),
            (
                {"dtype_a": "e5m2", "dtype_b": "e5m2", "dtype_d": "e4m3", "alpha": 0.5},
                Problem.parse("64x64x64", dtype="fp8_e5m2", out_dtype="fp8_e4m3", epilogue="alpha"),
            ),
            (
                {"dtype_a": "tf32", "dtype_b": "tf32", "dtype_d": "f32", "beta": 2, "dtype_c": "f32"},
                Problem.parse("64x64x64", dtype="tf32", epilogue="beta_c"),
            ),
            (
                {"dtype_a": "s8", "dtype_b": "s8", "dtype_d": "s32", "dtype_acc": "s32"},
                Problem.parse("64x64x64", dtype="int8"),
            ),
        ],
    )
    def test_what_has_kernels_is_read(
        self, tmp_path: Path, change: dict[str, object], problem: Problem
    ) -> None:
        path = tmp_path / "problems.json"
        path.write_text(json.dumps([CUTLASS | change]))
        assert read(path) == ([Demand(problem, 1)], [])

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (
                {"dtype_a": "u8", "dtype_b": "u8"},
                "dtypes u8 x u8 -> bf16, accumulated in f32: dtype 'u8' is not",
            ),
            (
                {"dtype_a": "f32", "dtype_b": "f32", "dtype_d": "f32"},
                "dtypes f32 x f32 -> f32, accumulated in f32: input dtype 'fp32' has no kernels",
            ),
            (
                {"dtype_acc": "f16"},
                "dtypes bf16 x bf16 -> bf16, accumulated in f16: kernels sum bf16 products in another dtype",
            ),
            ({"dtype_c": "f32", "beta": 1}, "a c of fp32 beside an output of bf16: kernels add bf16"),
            ({"use_fast_acc": "yes"}, "use_fast_acc 'yes' is neither true nor false"),
            ({"beta": [1]}, "beta a list is not a number"),
            ({"beta": 10**400}, "beta a number of over 19 digits is not a number"),
            ({"dtype_a": ["bf16"]}, "dtype_a a list is not a line"),
            ({"m": 10**400}, "m a number of over 19 digits is not a whole number"),
            ({"layout": 5}, "layout 5 is not a line"),
            ({"operation": ["gemm"]}, "operation a list has no kernels"),
        ],
    )
    def test_what_has_none_is_named(self, tmp_path: Path, change: dict[str, object], named: str) -> None:
        path = tmp_path / "problems.json"
        path.write_text(json.dumps([CUTLASS | change, CUTLASS]))
        found, refused = read(path)
        assert found == [Demand(Problem.parse("64x64x64"), 1)]
        assert refused[0].startswith(f"entry 1: {named}")


#: What TunableOp and CUTLASS write for ours.
TUNABLE_NAMES = {
    "bf16": "BFloat16", "fp16": "Half", "tf32": "tf32", "fp32": "float", "fp8_e4m3": "Float8_e4m3fn",
    "fp8_e5m2": "Float8_e5m2",
}  # fmt: skip
CUTLASS_NAMES = {
    "bf16": "bf16", "fp16": "f16", "tf32": "tf32", "fp32": "f32", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2",
    "int8": "s8", "int32": "s32",
}  # fmt: skip


@pytest.mark.parametrize("in_dtype", OUTPUT_DTYPES)
def test_every_dtype_that_has_kernels_is_read(tmp_path: Path, in_dtype: str) -> None:
    """Of both tools' files, into every output; and some family has kernels of it."""
    a, b = operand_dtypes(in_dtype)
    for out_dtype in OUTPUT_DTYPES[in_dtype]:
        names = {
            "dtype_a": CUTLASS_NAMES[a],
            "dtype_b": CUTLASS_NAMES[b],
            "dtype_d": CUTLASS_NAMES[out_dtype],
        }
        path = tmp_path / "problems.json"
        path.write_text(json.dumps([CUTLASS | names]))
        ((demand,), refused) = read(path)
        assert demand.problem == Problem.parse("64x64x64", dtype=in_dtype, out_dtype=out_dtype)
        assert not refused and not families.refusal_by_all(demand.problem)
        if not in_dtype.startswith("fp8"):
            continue
        path.write_text(
            f"ScaledGemmTunableOp_{TUNABLE_NAMES[a]}_{TUNABLE_NAMES[b]}_{TUNABLE_NAMES[out_dtype]}_TN,"
            "tn_64_64_64_ld_64_64_64_rw_0_bias_None\n"
        )
        found, refused = read(path)
        assert {(demand.problem.in_dtype, demand.problem.out_dtype) for demand in found} == {
            (in_dtype, out_dtype)
        }
        assert not refused and not families.refusal_by_all(found[0].problem)
    if in_dtype in TUNABLE_NAMES and not in_dtype.startswith("fp8"):
        path.write_text(f"GemmTunableOp_{TUNABLE_NAMES[in_dtype]}_TN,tn_64_64_64\n")
        assert read(path) == ([Demand(Problem.parse("64x64x64", dtype=in_dtype), 1)], [])


class TestSeveralFiles:
    """One for each rank."""

    def test_they_add_up(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"untuned{rank}.csv" for rank in range(3)]
        shared = "GemmTunableOp_Half_TN,tn_24_8_16\n"
        paths[0].write_text(shared + "GemmTunableOp_Half_TN,tn_24_8_32\n")
        paths[1].write_text(shared + "GemmTunableOp_float_TN,tn_24_8_32\n")
        paths[2].write_text("Validator,PT_VERSION,2.9.0\n")  # a rank without a product
        found, refused = read(*paths)
        assert found == [
            Demand(Problem.parse("8x24x16", dtype="fp16"), 2),
            Demand(Problem.parse("8x24x32", dtype="fp16"), 1),
        ]
        assert len(refused) == 1 and refused[0].startswith(f"{paths[1]}: line 2: dtype 'float'")

    def test_times_are_those_of_all_calls(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
        for path, us in zip(paths, (10.0, 16.0), strict=True):
            Workload((Product(KIND, 30, timed=30, median_us=us),)).write(path)
        assert read(*paths) == ([Demand(Problem(512, 6144, 4096), 60, 13.0)], [])

    def test_none_has_a_problem(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"untuned{rank}.csv" for rank in range(2)]
        for path in paths:
            path.write_text("GemmTunableOp_float_TN,tn_24_8_16\n")
        with pytest.raises(
            WorkloadError, match=r"no product in it can be tuned \(2 were left out, the first"
        ):
            read(*paths)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("m,n,k\n1,2,3\n", "not a list of shapes: it begins with 'm,n,k'; supported are"),
        (
            "\n[2026-01-01 00:00:00][cublasLt][1][Trace] A=0X1\n",
            "not a list of shapes: it begins with '\\[2026",
        ),
        ("{gemm} 3\n", "not a list of shapes: it begins with '{gemm} 3'"),
        (" \n", "the file is empty; record again with `tunegemm record`"),
        ("[]", r"no product in it can be tuned \(it lists none\)"),
        (
            '{"model_type": "llama", "hidden_size": 4096}',
            "a model's config.* make the list with: tunegemm shapes /",
        ),
        ('[{"m": 3}]', "the first because: entry 1: n, k, layout"),
        ("{\n", "line 2 column 1"),
    ],
)
def test_what_is_no_list_of_shapes(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=named):
        read(path)
    with pytest.raises(WorkloadError, match="No such file"):
        read(tmp_path / "other")


def entries(text: str) -> Entries | None:
    head, *rows = text.splitlines()
    return [(f"line {i}", row) for i, row in enumerate(rows, 2)] if head == "m,n,k,dtype" else None


def problems(row: str) -> list[Problem]:
    m, n, k, dtype = row.split(",")
    return [Problem(int(m), int(n), int(k), in_dtype=dtype_of(dtype))]


def test_another_tools_format_is_a_module_and_its_place_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CONTRIBUTING.md says of adding one, done here."""
    path = tmp_path / "shapes.csv"
    path.write_text("m,n,k,dtype\n64,32,16,Float16\n64,32,16,complex64\n")
    with pytest.raises(WorkloadError, match="not a list of shapes"):
        read(path)
    monkeypatch.setattr(foreign, "FORMATS", [*foreign.FORMATS, Format("a table", entries, problems)])
    found, (refused,) = read(path)
    assert found == [Demand(Problem(64, 32, 16, in_dtype="fp16"), 1)]
    assert refused.startswith("line 3: ") and "complex64" in refused
    path.write_text("a,b\n")
    with pytest.raises(WorkloadError, match=r"supported are .*TunableOp's CSV, CUTLASS's .* and a table"):
        read(path)


LONG = "7" * 5000
CUTLASS = {
    "m": 64, "n": 64, "k": 64, "layout": "tnt", "dtype_a": "bf16", "dtype_b": "bf16", "dtype_d": "bf16",
}  # fmt: skip


TUNABLE = "GemmTunableOp_BFloat16_TN,tn_128_16_640_ld_640_640_128"
SCALED = (
    "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_128_16_64_ld_64_64_128_rw_1_bias_None"
)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (json.dumps([CUTLASS, CUTLASS | {"k": 4096}]), 7),
        (Workload((Product(SMALL, 2), Product(KIND, 345))).to_json(), 17),
        ("GemmStridedBatchedTunableOp_BFloat16_NN,nn_24_8_16_B_32\nGemmTunableOp_Half_TN,tn_24_8_160\n", 1),
        (f"{TUNABLE},Default,0.1\n{TUNABLE},Default,0.1\n", 1),
        (3 * f"{TUNABLE}\n", 1),
        (3 * f"{SCALED}\n", 1),
    ],
    ids=["CUTLASS", "ours", "older", "results", "untuned", "scaled"],
)
def test_a_cut_file_gives_no_other_product(tmp_path: Path, text: str, step: int) -> None:
    path = tmp_path / "shapes"

    def products_of(text: str) -> set[Problem]:
        path.write_text(text)
        try:
            return {demand.problem for demand in read(path)[0]}
        except WorkloadError:
            return set()

    whole, last_line = products_of(text), text.rfind("\n", 0, -1) if step == 1 else 0
    assert whole
    for cut in range(last_line, len(text), step):
        assert products_of(text[:cut]) <= whole, text[:cut]


@pytest.mark.parametrize(
    "text", [TUNABLE, SCALED, f"{TUNABLE},Default,0.1\n{SCALED}", f"{TUNABLE},Default,0.1"]
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_of_all_kinds_may_end_a_file(tmp_path: Path, text: str, end: str) -> None:
    """Written by hand, a last line may lack its end or columns of others."""
    (path := tmp_path / "shapes").write_text(text + end)
    found, refused = read(path)
    assert not refused and len(found) == text.count("\n") + 1 + text.count("Scaled")


def test_the_line_that_is_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "untuned.csv"
    path.write_text(f"{TUNABLE}\nGemmTunableOp_BFloat16_TN,tn_128_16_64")
    found, (line,) = read(path)
    assert found == [Demand(Problem.parse("16x128x640"), 1)]
    assert line.startswith("line 2: extents 'tn_128_16_64' end the file, perhaps within a number; write it")


def test_numbers_of_5000_digits(tmp_path: Path) -> None:
    path = tmp_path / "shapes"
    path.write_text(json.dumps([CUTLASS]).replace("64", LONG, 1))
    with pytest.raises(WorkloadError, match=f"{path}: not JSON .*4300.*write the file again"):
        read(path)
    path.write_text(
        f"GemmTunableOp_BFloat16_TN,tn_{LONG}_16_64_ld_64_64_128\n"
        "GemmTunableOp_BFloat16_TN,tn_128_16_64_ld_64_64_128\n"
    )
    found, refused = read(path)
    assert [demand.problem for demand in found] == [Problem.parse("16x128x64")]
    assert refused[0].startswith("line 1: extents 'tn_777") and len(refused[0]) < 200


def test_a_byte_order_mark_and_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_bytes("\ufeff".encode() + json.dumps([CUTLASS]).encode())
    assert len(read(path)[0]) == 1
    path.write_bytes(json.dumps([CUTLASS]).encode("utf-16"))
    with pytest.raises(WorkloadError, match=f"{path}: not UTF-8 text"):
        read(path)
