"""Problem: parsing, tensors' strides, figures and refusals."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from tunegemm.describe.precision import computing_fp32_in, fp32_precision
from tunegemm.describe.problem import (
    LAYOUTS,
    OUTPUT_DTYPES,
    Problem,
    in_dtype_of,
    normalize_dtype,
    operand_dtypes,
    swapped_dtype,
)
from tunegemm.errors import ArgumentError, ProblemError


class TestParse:
    def test_defaults(self) -> None:
        assert Problem.parse("4096x2112x7168") == Problem(4096, 2112, 7168, 1, "bf16", "bf16", "k", "k", "n")

    def test_batch_blanks_and_capitals(self) -> None:
        problem = Problem.parse(" 128X256x64X3 ", layout="NT")
        assert (problem.m, problem.n, problem.k, problem.batch) == (128, 256, 64, 3)
        assert problem.layout == "nt"

    def test_output_dtype_follows_input_unless_given(self) -> None:
        assert Problem.parse("1x1x1", dtype="fp16").out_dtype == "fp16"
        assert Problem.parse("1x1x1", dtype="fp16", out_dtype="float32").out_dtype == "fp32"

    @pytest.mark.parametrize(
        "shape",
        ["", "4096", "4096x4096", "1x2x3x4x5", "4096*4096*4096", "-1x4x4", "1.5x4x4", "axbxc", "4x4x"],
    )
    def test_no_shape(self, shape: str) -> None:
        with pytest.raises(ProblemError, match="is not MxNxK or MxNxKxL; for example") as caught:
            Problem.parse(shape)
        assert repr(shape) in str(caught.value)

    @pytest.mark.parametrize(
        ("shape", "named"),
        [("0x4x4", "m=0"), ("4x0x4", "n=0"), ("4x4x0", "k=0"), ("4x4x4x0", "batch=0"),
         ("4x4x2147483648", "k=2147483648")],
    )  # fmt: skip
    def test_extent_out_of_range(self, shape: str, named: str) -> None:
        with pytest.raises(ProblemError, match=f"{named} in .*every extent must be from 1 to 2147483647"):
            Problem.parse(shape)

    def test_extents_that_are_no_numbers(self) -> None:
        with pytest.raises(
            ProblemError, match=r"m=512\.0 in .*every extent must be from 1 .*, a whole number"
        ):
            Problem(512.0, 4, 4)  # type: ignore[arg-type]
        with pytest.raises(ProblemError, match=r"Problem\.parse\('4x4x4'\) reads text"):
            Problem("4x4x4")  # type: ignore[call-arg, arg-type]

    def test_largest_extent(self) -> None:
        assert Problem.parse("2147483647x1x1").m == 2**31 - 1

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"dtype": "int4"}, "'int4'"),
            ({"dtype": "int8", "out_dtype": "bf16"}, "output dtype 'bf16' for int8 inputs; use one of int32"),
            ({"dtype": "int32"}, "'int32' has no kernels; use one of bf16, fp16"),
            ({"dtype": "fp32"}, "'fp32' has no kernels; .* --dtype tf32; use one of bf16, fp16"),
            ({"accumulation": "two_level"}, "'two_level' needs fp8 operands, not bf16"),
            ({"dtype": "e4m3", "accumulation": "exact"}, "'exact' is not known; use one of fast, two_level"),
            ({"out_dtype": "fp8"}, "'fp8'"),
            ({"layout": "kk"}, "layout 'kk' is not known; use one of tn, tt, nn, nt"),
            ({"layout": None}, "layout None is not known"),
            ({"dtype": torch.complex64}, "dtype torch.complex64 is not known; use one of bf16"),
            ({"dtype": None}, "dtype None is not known"),
        ],
    )
    def test_unknown_names(self, arguments: dict[str, str], named: str) -> None:
        with pytest.raises(ProblemError, match=named):
            Problem.parse("64x64x64", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "short"),
    [("torch.bfloat16", "bf16"), ("BF16", "bf16"), ("half", "fp16"), ("float16", "fp16"), ("float", "fp32")],
)
def test_dtype_spellings(name: str, short: str) -> None:
    assert normalize_dtype(name) == short


def test_dtypes_of_torch_are_taken() -> None:
    problem = Problem.parse("64x64x64", dtype=torch.float16, out_dtype=torch.float32)
    assert problem == Problem.parse("64x64x64", dtype="fp16", out_dtype="fp32")
    assert Problem.parse("64x64x64", dtype=torch.float8_e5m2).in_dtype == "fp8_e5m2"


@pytest.mark.parametrize("shape", [None, 4096, ("64", "64")])
def test_what_is_no_text_is_no_shape(shape: object) -> None:
    with pytest.raises(ProblemError, match=re.escape(f"shape {shape!r} is not MxNxK")):
        Problem.parse(shape)  # type: ignore[arg-type]


class TestConstruction:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"m": -5}, "m=-5"),
            ({"m": "a"}, "m='a' in 'a'x8x8: every extent"),
            ({"k": 1.5}, "k=1.5 in"),
            ({"n": None}, "n=None in 8xNonex8: every extent"),
            ({"out_dtype": "int32"}, "output dtype 'int32' for bf16 inputs; use one of bf16, fp16, fp32"),
            ({"a_major": "n"}, "majors 'n', 'k'"),
            ({"b_major": "m"}, "majors 'k', 'm'"),
            ({"out_major": "k"}, "output major 'k'"),
        ],
    )
    def test_refusals(self, change: dict[str, object], named: str) -> None:
        with pytest.raises(ProblemError, match=named):
            dataclasses.replace(Problem(8, 8, 8), **change)  # type: ignore[arg-type]

    def test_int8_products_are_stored_in_fewer_bits_once_they_are_scaled(self) -> None:
        scaled = Problem.parse("8x8x8", dtype="int8", out_dtype="bf16", epilogue="scale_rowwise+bias_n")
        assert (scaled.out_dtype, str(scaled)) == ("bf16", "8x8x8 int8>bf16 tn align8 scale_rowwise+bias_n")
        with pytest.raises(
            ProblemError, match="use one of int32; with scale_tensor or scale_rowwise bf16, fp16"
        ):
            dataclasses.replace(scaled, epilogue="bias_n")
        with pytest.raises(ProblemError, match="of an int32 product: epilogues compute in fp32"):
            dataclasses.replace(scaled, out_dtype="int32")


class TestFigures:
    def test_flops_and_bytes(self) -> None:
        problem = Problem(3, 5, 7, batch=2, out_dtype="fp32")
        assert problem.flops == 2 * 3 * 5 * 7 * 2
        assert problem.bytes == 2 * ((3 * 7 + 7 * 5) * 2 + 3 * 5 * 4)
        assert problem.arithmetic_intensity == problem.flops / problem.bytes

    def test_square_intensity_is_a_third_of_the_extent(self) -> None:
        assert Problem(4096, 4096, 4096).arithmetic_intensity == pytest.approx(4096 / 3)

    def test_names(self) -> None:
        assert str(Problem(1, 2, 8)) == "1x2x8 bf16 tn"
        assert str(Problem(1, 2, 3, 4, out_dtype="fp32", b_major="n", out_major="m")) == (
            "1x2x3x4 bf16>fp32 tt out-m align2"
        )
        assert Problem.parse(Problem(8, 16, 32, 4).shape) == Problem(8, 16, 32, 4)


def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class TestGroups:
    P = Problem.parse("4096x2048x7168", groups=32)

    def test_rows_are_of_all_groups_and_weights_of_each(self) -> None:
        assert (self.P.groups, self.P.batch, self.P.shape) == (32, 1, "4096x2048x7168")
        assert str(self.P) == "4096x2048x7168 bf16 tn groups32"
        assert self.P.flops == Problem.parse("4096x2048x7168").flops
        weights, rest = 2048 * 7168 * 2, (4096 * 7168 + 4096 * 2048) * 2
        assert (self.P.bytes, self.P.memory_bytes) == (rest + weights, rest + 32 * weights)
        assert not self.P.fused and self.P.out_n == 2048
        assert (self.P.torch_call, Problem(8, 8, 8).torch_call) == ("torch._grouped_mm", "torch.mm")

    def test_none_and_one_are_plain(self) -> None:
        plain = Problem.parse("64x64x64")
        assert Problem.parse("64x64x64", groups=0) == plain == Problem.parse("64x64x64", groups=1)
        assert plain.groups == 0 and plain.as_modelled is plain and plain.memory_bytes == plain.bytes

    def test_the_model_sees_equal_groups_as_kernels_do(self) -> None:
        seen = Problem.parse("100x2048x7168", groups=32).as_modelled
        assert (seen.m, seen.n, seen.k, seen.batch, seen.out_major) == (2048, 4, 7168, 32, "m")

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"shape": "64x64x64x2"}, "a batch of 2"),
            ({"epilogue": "relu"}, "epilogue 'relu' of bf16 with 4 groups: use none, or one of reglu"),
            ({"epilogue": "bias_n+swiglu"}, "(biases need no tuning)"),
            ({"epilogue": "swiglu", "dtype": "fp8_e4m3"}, "with 4 groups: use scale_rowwise"),
            ({"dtype": "fp8_e5m2"}, "in_dtype 'fp8_e5m2' with 4 groups: use one of bf16, fp16, fp8_e4m3"),
            ({"out_dtype": "fp32"}, "out_dtype 'fp32'"),
            ({"layout": "nn"}, "a_major 'm'"),
            ({"layout": "tt", "epilogue": "swiglu"}, "b_major 'n'"),
            ({"epilogue": "swiglu", "shape": "64x63x64"}, "n=63"),
            ({"shape": "64x64x60"}, "alignment 8"),
            ({"groups": -1}, "groups=-1: give 2 or more, or 0"),
        ],
    )
    def test_refusals(self, arguments: dict[str, Any], named: str) -> None:
        with pytest.raises(ProblemError, match=re.escape(named)):
            Problem.parse(**{"shape": "64x64x64", "groups": 4} | arguments)

    @pytest.mark.parametrize(
        ("given", "kind", "said"),
        [
            ({}, {}, "64x128x64 bf16 tn groups4"),
            ({"dtype": "fp16", "epilogue": "swiglu"}, {"dtype": "fp16", "gate": "swiglu"},
             "64x128x64 fp16 tn groups4 swiglu"),
            ({"layout": "tt"}, {"b_major": "n"}, "64x128x64 bf16 tt groups4"),
            ({"dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3"}, "64x128x64 fp8_e4m3 tn groups4 scale_rowwise"),
        ],
    )  # fmt: skip
    def test_kinds(self, given: dict[str, Any], kind: dict[str, str], said: str) -> None:
        problem = Problem.parse("64x128x64", groups=4, **given)
        assert problem == Problem.of_groups(64, 128, 64, 4, **kind) and str(problem) == said
        assert (problem.groups, problem.gate) == (4, kind.get("gate", ""))
        assert problem.out_n == (64 if problem.gate else 128)
        assert problem.as_modelled.in_dtype == problem.in_dtype and not problem.as_modelled.groups
        assert problem.as_modelled.a_major == ("m" if problem.b_major == "n" else "k")

    def test_scales_are_of_rows_and_of_each_groups_columns(self) -> None:
        problem = Problem.of_groups(64, 128, 64, 4, dtype="fp8_e4m3")
        assert [problem.operand_shape(one) for one in problem.fused.operands] == [(64,), (4, 128)]
        assert problem.torch_call == "torch._scaled_grouped_mm"

    def test_one_group_is_none(self) -> None:
        with pytest.raises(ProblemError, match="groups=1: give 2 or more, or 0"):
            Problem(64, 64, 64, groups=1)

    def test_gradients_of_others_than_bf16_are_torchs(self) -> None:
        with pytest.raises(ProblemError, match="gradients of groups have kernels for bf16"):
            Problem.of_groups(64, 64, 64, 4, dtype="fp16").backward()

    @pytest.mark.parametrize("gate", ["", "swiglu"])
    def test_the_gradient_of_a_reads_the_weights_the_other_way_round(self, gate: str) -> None:
        forward = Problem.of_groups(64, 96, 48, 4, gate=gate)
        (of_a,) = forward.backward()
        assert of_a == Problem.of_groups(64, 48, 96, 4, b_major="n")
        assert of_a.backward() == (Problem.of_groups(64, 96, 48, 4),)


class TestFromTensors:
    def test_row_major_and_transposed_weight(self) -> None:
        problem = Problem.from_tensors(operand(16, 32), operand(24, 32).T)
        assert problem == Problem(16, 24, 32)
        assert problem.layout == "tn"

    @pytest.mark.parametrize(("layout", "majors"), LAYOUTS.items())
    def test_all_layouts(self, layout: str, majors: tuple[str, str]) -> None:
        a = operand(16, 32) if majors[0] == "k" else operand(32, 16).T
        b = operand(24, 32).T if majors[1] == "k" else operand(32, 24)
        assert Problem.from_tensors(a, b) == Problem.parse("16x24x32", layout=layout)

    def test_batch(self) -> None:
        problem = Problem.from_tensors(operand(5, 16, 32), operand(5, 24, 32).transpose(1, 2))
        assert problem == Problem(16, 24, 32, batch=5)

    def test_dtypes(self) -> None:
        half = operand(4, 8, dtype=torch.float16), operand(8, 4, dtype=torch.float16)
        assert Problem.from_tensors(*half).out_dtype == "fp16"
        assert Problem.from_tensors(*half, out_dtype=torch.float32).out_dtype == "fp32"

    def test_every_second_row(self) -> None:
        assert Problem.from_tensors(operand(32, 32)[::2], operand(32, 24)) == Problem(16, 24, 32, b_major="n")

    def test_every_second_column_has_no_contiguous_mode(self) -> None:
        with pytest.raises(ProblemError, match=r"strides \(64, 2\) of a \(16, 32\) operand.*\.contiguous"):
            Problem.from_tensors(operand(16, 64)[:, ::2], operand(32, 24))

    def test_expanded_operand_has_no_contiguous_mode(self) -> None:
        with pytest.raises(ProblemError, match=r"strides \(0, 0\)"):
            Problem.from_tensors(operand(1, 1).expand(16, 32), operand(32, 24))

    def test_extent_of_one_is_k_major_unless_k_has_gaps(self) -> None:
        """A single row or column is contiguous in both modes; one choice keeps equal products equal."""
        assert Problem.from_tensors(operand(1, 32), operand(24, 32).T).layout == "tn"
        assert Problem.from_tensors(operand(32, 1).T, operand(24, 32).T).layout == "tn"
        assert Problem.from_tensors(operand(16, 32), operand(32, 1)).layout == "tn"
        assert Problem.from_tensors(operand(16, 1), operand(1, 24)).layout == "tn"
        gaps = operand(1, 64)[:, ::2]
        assert Problem.from_tensors(gaps, operand(24, 32).T) == Problem(1, 24, 32, a_major="m", alignment=4)

    @pytest.mark.parametrize(
        ("a", "b", "named"),
        [
            (operand(16, 32), operand(31, 24), r"\(16, 32\) and \(31, 24\) do not multiply"),
            (operand(2, 16, 32), operand(3, 32, 24), "do not multiply"),
            (operand(32), operand(32, 24), "operands of 1 and 2 dimensions"),
            (operand(2, 16, 32), operand(32, 24), "operands of 3 and 2 dimensions"),
            (operand(2, 2, 4, 4), operand(2, 2, 4, 4), "operands of 4 and 4 dimensions"),
            (operand(4, 4), operand(4, 4, dtype=torch.float16), "bf16 and fp16; convert"),
            (*2 * [operand(4, 4, dtype=torch.uint8)], "'torch.uint8' is not known"),
            (operand(4, 4, dtype=torch.float32), operand(4, 4, dtype=torch.float32), "where tf32 is allowed"),
            (operand(0, 4), operand(4, 4), "m=0"),
            (operand(4, 0), operand(0, 4), "k=0"),
        ],
    )
    def test_refusals(self, a: torch.Tensor, b: torch.Tensor, named: str) -> None:
        with pytest.raises(ProblemError, match=named):
            Problem.from_tensors(a, b)

    def test_unknown_output_dtype(self) -> None:
        with pytest.raises(ProblemError, match=r"'torch\.int64' is not known"):
            Problem.from_tensors(operand(4, 4), operand(4, 4), out_dtype=torch.int64)


class TestAlignment:
    """Bytes that divide the addresses and strides of both operands; part of the key."""

    @pytest.mark.parametrize(
        ("shape", "layout", "bytes"),
        [
            ("4096x4096x4096", "tn", 16),
            ("4096x4096x1001", "tn", 2),
            ("4096x4096x1004", "tn", 8),
            ("4096x1001x4096", "tn", 16),  # n is no leading dimension of A or B
            ("4096x1001x4096", "tt", 2),
            ("1002x4096x4096", "nt", 4),
            ("1x4096x1001", "tn", 2),  # a single row of A is not stepped over, but B has many
            ("1x1x1001", "tn", 16),
            ("1x1x1001x3", "tn", 2),
        ],
    )
    def test_packed_operands(self, shape: str, layout: str, bytes: int) -> None:
        problem = Problem.parse(shape, layout=layout)
        assert problem.alignment == problem.packed_alignment == bytes
        a_major, b_major = LAYOUTS[layout]
        lead = (problem.batch,) if problem.batch > 1 else ()
        m, n, k = problem.m, problem.n, problem.k
        a = operand(*lead, m, k) if a_major == "k" else operand(*lead, k, m).mT
        b = operand(*lead, n, k).mT if b_major == "k" else operand(*lead, k, n)
        assert Problem.from_tensors(a, b) == problem

    def test_packed_is_the_default_of_the_constructor(self) -> None:
        assert Problem(5, 7, 11) == Problem.parse("5x7x11") != Problem(5, 7, 11, alignment=16)

    def test_a_lower_one_may_be_given_and_shows(self) -> None:
        problem = Problem.parse("64x64x64", alignment=4)
        assert problem != Problem.parse("64x64x64")
        assert str(problem) == "64x64x64 bf16 tn align4"

    def test_lines_with_gaps_may_be_aligned_better_than_packed_ones(self) -> None:
        assert Problem.parse("64x64x1001", alignment=16) == Problem(64, 64, 1001, alignment=16)

    @pytest.mark.parametrize(
        ("shape", "alignment", "named"),
        [
            ("64x64x64", 32, "alignment 32 of 64x64x64: use one of 2, 4, 8, 16 bytes"),
            ("64x64x64", 3, "alignment 3 of 64x64x64: use one of 2, 4, 8, 16 bytes"),
            ("64x64x64", 1, "alignment 1 of"),
            ("64x64x64", 0, "alignment 0 of 64x64x64: use one of 2, 4, 8, 16 bytes"),
        ],
    )
    def test_refusals(self, shape: str, alignment: int, named: str) -> None:
        with pytest.raises(ProblemError, match=named):
            Problem.parse(shape, alignment=alignment)

    def test_addresses_and_strides_of_views(self) -> None:
        room, b = operand(16 * 40 + 8), operand(24, 32).T
        assert Problem.from_tensors(room[: 16 * 40].view(16, 40)[:, :32], b).alignment == 16
        assert Problem.from_tensors(room[: 16 * 36].view(16, 36)[:, :32], b).alignment == 8
        shifted = room[2 : 2 + 16 * 32].view(16, 32)
        assert Problem.from_tensors(shifted, b).alignment == 4
        padded = operand(16, 1008)[:, :1001]
        assert Problem.from_tensors(padded, operand(24, 1008)[:, :1001].T).alignment == 16


class TestDtypes:
    @pytest.mark.parametrize("in_dtype", OUTPUT_DTYPES)
    def test_every_input_has_a_default_output(self, in_dtype: str) -> None:
        problem = Problem.parse("64x64x64", dtype=in_dtype)
        assert problem.out_dtype == OUTPUT_DTYPES[in_dtype][0]
        assert str(problem) == f"64x64x64 {in_dtype} tn", "a default is not spelled out"
        assert problem == Problem.parse("64x64x64", dtype=in_dtype, out_dtype=problem.out_dtype)

    def test_words(self) -> None:
        problem = Problem.parse("64x64x64", dtype="e5m2", out_dtype="half", accumulation="two_level")
        assert str(problem) == "64x64x64 fp8_e5m2>fp16 two_level tn"
        assert str(Problem.parse("64x64x8", dtype="int8")) == "64x64x8 int8 tn align8"

    def test_bytes_and_rates(self) -> None:
        rates = {"bf16": 1, "fp16": 1, "tf32": 0.5, "fp8_e4m3": 2, "fp8_e5m2_e4m3": 2, "int8": 2}
        for in_dtype, rate in rates.items():
            assert Problem.parse("8x8x8", dtype=in_dtype).relative_rate == rate
        assert Problem.parse("16x32x64", dtype="int8").bytes == 16 * 64 + 64 * 32 + 16 * 32 * 4
        assert Problem.parse("16x32x64", dtype="tf32").bytes == 4 * (16 * 64 + 64 * 32 + 16 * 32)
        assert Problem.parse("64x64x65", dtype="fp8_e4m3").alignment == 1

    @pytest.mark.parametrize("in_dtype", OUTPUT_DTYPES)
    def test_swapping_twice_changes_nothing(self, in_dtype: str) -> None:
        assert swapped_dtype(swapped_dtype(in_dtype)) == in_dtype
        assert in_dtype_of(*operand_dtypes(in_dtype)) == in_dtype

    def test_mixed_fp8(self) -> None:
        assert operand_dtypes("fp8_e5m2_e4m3") == ("fp8_e5m2", "fp8_e4m3")
        assert swapped_dtype("fp8_e5m2_e4m3") == "fp8_e4m3_e5m2"

    @pytest.mark.parametrize(
        ("a_dtype", "b_dtype", "in_dtype"),
        [
            (torch.float8_e4m3fn, torch.float8_e4m3fn, "fp8_e4m3"),
            (torch.float8_e4m3fn, torch.float8_e5m2, "fp8_e4m3_e5m2"),
            (torch.int8, torch.int8, "int8"),
        ],
    )
    def test_of_tensors(self, a_dtype: torch.dtype, b_dtype: torch.dtype, in_dtype: str) -> None:
        a, b = torch.ones(16, 32).to(a_dtype), torch.ones(24, 32).to(b_dtype).T
        assert Problem.from_tensors(a, b) == Problem.parse("16x24x32", dtype=in_dtype)

    def test_fp32_is_tf32_where_torch_may_say_so(self) -> None:
        a, b = torch.ones(16, 32), torch.ones(24, 32).T
        with computing_fp32_in("tf32"):
            assert Problem.from_tensors(a, b) == Problem.parse("16x24x32", dtype="tf32")
        with computing_fp32_in("ieee"), pytest.raises(ProblemError, match="where tf32 is allowed"):
            Problem.from_tensors(a, b)

    def test_torch_without_its_newer_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch 2.11's module has no `fp32_precision`."""
        before = fp32_precision()
        with computing_fp32_in("ieee"):
            for name in ("_get_fp32_precision_getter", "_set_fp32_precision_setter"):
                monkeypatch.delattr(torch._C, name)
            monkeypatch.setattr(torch.backends.cuda, "matmul", object())
            said = {0: False}
            allow = lambda allowed: said.update({0: allowed})  # noqa: E731
            monkeypatch.setattr(torch._C, "_get_cublas_allow_tf32", lambda: said[0])
            monkeypatch.setattr(torch._C, "_set_cublas_allow_tf32", allow)
            with pytest.raises(ZeroDivisionError), computing_fp32_in("tf32"):
                assert fp32_precision() == "tf32"
                raise ZeroDivisionError
            with pytest.raises(ProblemError, match="allow_tf32 = True"):
                Problem.from_tensors(torch.ones(16, 32), torch.ones(24, 32).T)
            monkeypatch.undo()
        assert fp32_precision() == before


class TestBackward:
    """That autograd asks for these is in test_torch.py."""

    @pytest.mark.parametrize(
        ("layout", "of_a", "of_b"),
        [("tn", "tt", "nt"), ("tt", "tn", "nt"), ("nn", "nn", "nn"), ("nt", "tn", "tt")],
    )
    def test_layouts(self, layout: str, of_a: str, of_b: str) -> None:
        problem = Problem.parse("64x48x32x2", layout=layout)
        gradients = problem.backward()
        assert {gradient.flops for gradient in gradients} == {problem.flops}
        assert tuple(gradient.layout for gradient in gradients) == (of_a, of_b)

    def test_an_epilogue_has_its_derivative_before_them(self) -> None:
        forward = Problem.parse("64x48x32", epilogue="bias_n+relu")
        assert forward.backward() == Problem.parse("64x48x32").backward()

    def test_gaps_lower_the_alignment(self) -> None:
        forward = Problem.parse("64x48x32", alignment=4)
        assert [gradient.alignment for gradient in forward.backward()] == [4, 4]

    def test_other_output_dtypes_have_none(self) -> None:
        with pytest.raises(ProblemError, match="differ in dtype"):
            Problem.parse("64x48x32", out_dtype="fp32").backward()


def test_a_keyword_that_is_no_field_names_the_field() -> None:
    with pytest.raises(ArgumentError, match=r"Problem\(\) has no argument 'dtype'; did you mean in_dtype\?"):
        Problem(64, 64, 64, dtype="bf16")  # type: ignore[call-arg]
