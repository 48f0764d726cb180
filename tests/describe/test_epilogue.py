"""Epilogues: text, arithmetic against eager torch, users' functions, kernels that compile clean."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.sampled import spread
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device
from tunegemm.describe.epilogue import (
    ACTIVATIONS,
    GATED,
    Epilogue,
    Matrix,
    Number,
    PerColumn,
    absolute,
    maximum,
    minimum,
    tanh,
)  # fmt: skip
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ProblemError
from tunegemm.generate.cublaslt.eager import torch_mm
from tunegemm.generate.cute_sm90 import FAMILY
from tunegemm.generate.cute_sm90.rules import config_of
from tunegemm.generate.families import NAMES, get
from tunegemm.measure import operands as data

EVERYTHING = "alpha+scale_tensor+beta_c+bias_n+gelu_tanh+residual+amax"
EPILOGUES = [
    "alpha+beta_c", "beta_c+bias_m+relu", "bias_n", *(f"bias_n+{name}" for name in ACTIVATIONS), *GATED,
    "geglu+residual+amax", "residual", "scale_tensor+bias_n", "scale_rowwise", EVERYTHING,
]  # fmt: skip
SHAPES = [Problem(40, 48, 64), Problem(40, 48, 64, 3), Problem(40, 48, 64, out_major="m")]


@Epilogue.custom
def capped(acc, shift: PerColumn, skip: Matrix, cap: Number):  # type: ignore[no-untyped-def]
    return cap * tanh((acc + shift) / cap) + maximum(skip, 0.0)


class TestText:
    @pytest.mark.parametrize("text", ["", *EPILOGUES])
    def test_round_trips(self, text: str) -> None:
        assert str(Epilogue.parse(text)) == text
        assert bool(Epilogue.parse(text)) == bool(text)
        assert Problem(32, 64, 128, epilogue=text).epilogue == text

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("gelo", "step 'gelo' in 'gelo' is not known; use some of alpha"),
            ("gelu+bias_n", r"'gelu\+bias_n': use the order alpha"),
            ("relu+gelu", "one step of each group"),
            ("bias_n+", "step '' in"),
            ("custom:f@0", "is not known"),
        ],
    )
    def test_refusals_name_the_step(self, text: str, said: str) -> None:
        with pytest.raises(ProblemError, match=said):
            Problem(32, 64, 128, epilogue=text)

    def test_steps_that_are_no_steps_are_refused_before_they_are_used(self) -> None:
        for steps in ("relu", ["relu"], None):
            with pytest.raises(ProblemError, match=r"are no tuple; Epilogue\.parse reads a text"):
                Epilogue(steps)  # type: ignore[arg-type]
        with pytest.raises(ProblemError, match="step 'gelo' in 'gelo' is not known"):
            Epilogue(("gelo",))
        assert Epilogue(("bias_n", "relu")) == Epilogue.parse("bias_n+relu")

    def test_gates_halve_the_output(self) -> None:
        problem = Problem(32, 64, 128, epilogue="swiglu")
        assert (problem.out_n, problem.flops) == (32, replace(problem, epilogue="").flops)
        assert problem.bytes == replace(problem, epilogue="").bytes - 32 * 32 * 2
        with pytest.raises(ProblemError, match="n=63 with epilogue swiglu: gates need an even number"):
            Problem(32, 63, 128, epilogue="swiglu")

    def test_matrices_are_read(self) -> None:
        plain, residual = Problem(32, 64, 128), Problem(32, 64, 128, epilogue="residual")
        assert residual.bytes == plain.bytes + 32 * 64 * 2

    def test_every_step_has_its_operands(self) -> None:
        names = [operand.name for operand in Epilogue.parse(EVERYTHING).operands]
        assert names == ["alpha", "scale_a", "scale_b", "beta", "c", "bias", "residual", "amax"]
        assert Epilogue.parse(EVERYTHING).words == 12


class TestCustom:
    def test_is_known_by_its_source(self) -> None:
        assert str(capped).startswith("custom:capped@")
        assert Epilogue.parse(str(capped)) == capped
        assert [(o.name, o.kind) for o in capped.operands] == [
            ("shift", "n"), ("skip", "matrix"), ("cap", "number")
        ]  # fmt: skip

    def test_another_process_knows_its_text_only(self) -> None:
        problem = Problem(32, 64, 128, epilogue="custom:elsewhere@0123456789abcdef")
        assert problem.bytes == Problem(32, 64, 128).bytes
        with pytest.raises(ProblemError, match="elsewhere@0123456789abcdef is not defined here; call"):
            _ = problem.fused.operands

    def test_foreign_names_are_refused(self) -> None:
        def f(acc):  # type: ignore[no-untyped-def]
            return torch.tanh(acc)

        with pytest.raises(
            ProblemError, match="epilogue 'f' uses 'torch', which kernels do not have; use exp"
        ):
            Epilogue.custom(f)

    def test_operands_need_a_kind(self) -> None:
        def f(acc, bias):  # type: ignore[no-untyped-def]
            return acc + bias

        with pytest.raises(
            ProblemError,
            match="operand 'bias' of epilogue 'f' lacks an annotation of its kind; use one of Number",
        ):
            Epilogue.custom(f)

    def test_branches_are_refused(self) -> None:
        def f(acc):  # type: ignore[no-untyped-def]
            return acc if acc > 0 else acc * 0.1

        with pytest.raises(ProblemError, match=r"epilogue 'f' branches, .*; use where"):
            Epilogue.custom(f)

    def test_what_has_no_name_or_source_is_refused(self) -> None:
        with pytest.raises(ProblemError, match="is not a function by name; give a plain def"):
            Epilogue.custom(lambda acc: acc)
        with pytest.raises(ProblemError, match=r"^epilogue 'relu': give a plain def$"):
            Epilogue.custom("relu")  # type: ignore[arg-type]
        scope: dict[str, Any] = {}
        exec("def f(acc): return acc", scope)
        with pytest.raises(ProblemError, match="define it in a file"):
            Epilogue.custom(scope["f"])

        def tanh(acc):  # type: ignore[no-untyped-def]
            return acc

        with pytest.raises(ProblemError, match="'tanh' has the same name as a built-in function"):
            Epilogue.custom(tanh)

    def test_too_many_operands_are_refused(self) -> None:
        def f(acc, a: Matrix, b: Matrix, c: Matrix, d: Matrix, e: PerColumn):  # type: ignore[no-untyped-def]
            return acc + a + b + c + d + e

        with pytest.raises(ProblemError, match="13 words of operands > 12"):
            Epilogue.custom(f)


@pytest.mark.parametrize("problem", SHAPES, ids=["plain", "batch", "out-m"])
@pytest.mark.parametrize("text", [*EPILOGUES, str(capped)])
def test_eager_torch_computes_what_the_reference_says(text: str, problem: Problem) -> None:
    problem = replace(problem, epilogue=text)
    operands = data.make_operands(problem, torch.device("cpu"), 3)
    wanted = data.expected(problem, operands)
    data.restore(operands)
    torch_mm(problem)(*operands.arguments)
    assert data.check(operands, wanted).objection(data.tolerance(problem)) is None


@pytest.mark.parametrize("problem", SHAPES, ids=["plain", "batch", "out-m"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "text",
    ["scale_tensor", "scale_rowwise+bias_n+gelu", "scale_tensor+residual+amax", "scale_rowwise+swiglu"],
)
def test_eager_torch_scales_int8_products(text: str, out_dtype: str, problem: Problem) -> None:
    problem = replace(problem, in_dtype="int8", out_dtype=out_dtype, epilogue=text)
    operands = data.make_operands(problem, torch.device("cpu"), 3)
    wanted = data.expected(problem, operands)
    assert 0.1 < wanted.std() < 10, "of a size where activations bend"
    data.restore(operands)
    torch_mm(problem)(*operands.arguments)
    assert data.check(operands, wanted).objection(data.tolerance(problem)) is None


def test_a_wrong_epilogue_is_found() -> None:
    """Each operand shows: without one of them, or with a value next to it, the check objects."""
    problem = Problem(40, 48, 64, epilogue=EVERYTHING)
    operands = data.make_operands(problem, torch.device("cpu"), 3)
    wanted = data.expected(problem, operands)
    for index, operand in enumerate(problem.fused.operands[:-1]):
        given = list(operands.fused)
        given[index] = given[index] * 0 if operand.kind in ("number", "scalar") else given[index].roll(1, -1)
        data.restore(operands)
        torch_mm(problem)(operands.a, operands.b, operands.out, *given)
        assert data.check(operands, wanted).objection(data.tolerance(problem)), operand
    data.restore(operands)
    torch_mm(problem)(*operands.arguments)
    assert operands.amax is not None
    operands.amax.mul_(1.5)
    assert "amax is off" in str(data.check(operands, wanted).objection(data.tolerance(problem)))


class TestNotANumber:
    """As of torch's own operations: NaN stays NaN, and what is multiplied by a zero beta is not read."""

    VALUES = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, -1.0, 0.0, 2.0])

    @pytest.mark.parametrize("name", ["maximum", "minimum"])
    def test_of_either_operand(self, name: str) -> None:
        ours, torchs = {"maximum": maximum, "minimum": minimum}[name], getattr(torch, name)
        x, y = torch.meshgrid(self.VALUES, self.VALUES, indexing="ij")
        assert torch.equal(ours(x, y).nan_to_num(7), torchs(x, y).nan_to_num(7))
        for number in (0.5, torch.nan):
            wanted = torchs(self.VALUES, torch.tensor(number)).nan_to_num(7)
            assert torch.equal(ours(self.VALUES, number).nan_to_num(7), wanted)
            assert torch.equal(ours(number, self.VALUES).nan_to_num(7), wanted)

    def test_of_a_magnitude(self) -> None:
        assert torch.equal(absolute(self.VALUES).nan_to_num(7), self.VALUES.abs().nan_to_num(7))

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_of_an_activation(self, name: str) -> None:
        function = getattr(torch.nn.functional, name.removesuffix("_tanh"))
        tanh_or_not = {"approximate": "tanh"} if name == "gelu_tanh" else {}
        found = Epilogue.parse(name).reference(self.VALUES, {}).double()
        # In fp64: torch 2.13's gelu of a vector of fp32 makes NaN of infinity on a CPU.
        wanted = function(self.VALUES.double(), **tanh_or_not)
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("name", GATED)
    def test_of_either_half_of_a_gate(self, name: str) -> None:
        pairs = torch.cartesian_prod(self.VALUES[[0, 4, 6]], self.VALUES[[0, 4, 6]]).flatten()
        found = Epilogue.parse(name).reference(pairs, {})
        assert torch.equal(found.isnan(), pairs[0::2].isnan() | pairs[1::2].isnan())

    @pytest.mark.parametrize("text", ["beta_c", "beta_c+bias_n", "alpha+scale_tensor+beta_c+residual"])
    @pytest.mark.parametrize("beta", [0.0, -0.0, 0.5])
    def test_of_c(self, text: str, beta: float) -> None:
        """By the reference, and by what torch's operations make of it where no kernel does."""
        problem = Problem(40, 48, 64, epilogue=text)
        operands = data.make_operands(problem, torch.device("cpu"), 3)
        named = {o.name: value for o, value in zip(problem.fused.operands, operands.fused, strict=True)}
        named["beta"] = beta
        whole = problem.fused.reference(operands.a.float() @ operands.b.float(), named)
        named["c"] = named["c"].clone()
        named["c"][3, 5] = torch.nan
        found = problem.fused.reference(operands.a.float() @ operands.b.float(), named)
        assert int(found.isnan().sum()) == (beta != 0)
        if not beta:
            assert torch.equal(found, whole)
        torch_mm(problem)(operands.a, operands.b, operands.out, *named.values())
        assert int(operands.out.isnan().sum()) == (beta != 0)


KERNELS = [
    {"schedule": "pingpong", "tile_m": 128, "tile_n": 128, "stages": 4, "swap_ab": False},
    {"schedule": "cooperative", "tile_m": 128, "tile_n": 256, "stages": 4, "swap_ab": False},
    {"schedule": "pingpong", "tile_m": 64, "tile_n": 64, "stages": 6, "swap_ab": True},
]


def candidate(kernel: dict[str, int | str | bool]) -> Candidate:
    fixed: dict[str, int | str | bool] = {"tile_k": 64, "cluster_m": 1, "cluster_n": 1, "epi_n": 32}
    launch = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all", "split_k": 1, "l2_hint": "none"}
    return Candidate.make("cute_sm90", fixed | kernel, launch)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_the_rules_of_registers_reject_spills_and_what_they_admit_does_not(
    pool: CompilePool, h200: Device
) -> None:
    everything_but_amax = EVERYTHING.removesuffix("+amax")
    wide: dict[str, int | str | bool] = {
        "schedule": "pingpong", "tile_m": 128, "tile_n": 192, "stages": 3, "swap_ab": False
    }  # fmt: skip
    tall = wide | {"tile_m": 192, "tile_n": 128, "tile_k": 128, "stages": 5, "cluster_n": 2, "epi_n": 64}
    rows, turned = {"out_dtype": "fp32"}, {"a_major": "m", "b_major": "n", "out_major": "m"}
    fp8 = {"in_dtype": "fp8_e4m3"}
    cases: list[tuple[str, dict[str, str], dict[str, int | str | bool], str | None]] = [
        ("bias_m+amax", rows, wide, "fused_registers"),
        (str(capped), {}, KERNELS[2], None),
        ("bias_n+gelu", {}, KERNELS[2], None),
        ("bias_m+silu", {}, KERNELS[2], None),
        (EVERYTHING, rows, KERNELS[2], None),
        (everything_but_amax, {}, KERNELS[0], None),
        ("residual", rows, wide, "accumulators"),
        ("swiglu", turned, wide | {"tile_n": 176, "epi_n": 16}, "accumulators"),
        ("bias_n+geglu", {}, wide, None),
        ("scale_rowwise+bias_n+gelu_tanh", {}, wide | {"tile_n": 208, "epi_n": 16}, "accumulators"),
        ("scale_rowwise+bias_n+gelu_tanh", fp8, tall, None),
        ("scale_rowwise", fp8, wide | {"tile_k": 128, "stages": 5, "epi_n": 64}, None),
    ]
    #: Their like is compiled above.
    judged: list[tuple[str, dict[str, str], dict[str, int | str | bool], str | None]] = [
        ("residual+amax", {}, KERNELS[1], None),
        ("alpha+beta_c", {}, KERNELS[1], None),
        ("scale_rowwise", {}, KERNELS[1], None),
        ("bias_n+gelu", {}, KERNELS[0], None),
        ("alpha+beta_c+residual", {}, wide, "accumulators"),
        ("bias_n+gelu_tanh+residual", rows, wide | {"tile_n": 176, "epi_n": 16}, None),
        ("swiglu", turned, wide | {"tile_n": 160}, None),
        ("swiglu", {}, wide | {"tile_n": 176, "epi_n": 16}, None),
        ("bias_n", {}, wide | {"tile_n": 208, "epi_n": 16, "cluster_n": 2}, "accumulators"),
    ]
    for text, changes, kernel, rule in (*cases, *judged):
        problem = replace(Problem(128, 512, 512, epilogue=text), **changes)  # type: ignore[arg-type]
        assert FAMILY.check(problem, candidate(kernel), h200).rule == rule, text
    submitted, cases = [], spread(cases)
    for text, changes, kernel, _ in cases:
        problem = replace(Problem(128, 512, 512, epilogue=text), **changes)  # type: ignore[arg-type]
        chosen = candidate(kernel)
        future = pool.submit("cute_sm90", FAMILY.kernel_key(problem, chosen, h200))
        submitted.append((future, FAMILY.smem_bytes(problem, chosen)))
    for case, (future, smem_bytes) in zip(cases, submitted, strict=True):
        found = future.result()
        if case[-1] is not None:
            assert found.artifact is None and "spills" in str(found.failure), case
        else:
            assert found.artifact is not None, (case, found.failure)
            resources = found.artifact.resources
            assert (resources.spill_bytes, resources.smem_bytes) == (0, smem_bytes), case


@pytest.mark.parametrize(
    ("text", "changes", "said"),
    [
        ("bias_n", {"epi_n": 0}, "epilogue bias_n with epi_n 0"),
        ("swiglu", {"swap_ab": True}, "swiglu with swap_ab"),
    ],
)
def test_refused_with_a_reason(h200: Device, text: str, changes: dict[str, int | bool], said: str) -> None:
    chosen = Candidate.make("cute_sm90", dict(candidate(KERNELS[0]).compile_params) | changes)
    verdict = FAMILY.check(Problem(128, 512, 512, epilogue=text), chosen, h200)
    assert verdict.rule == "fused_store" and said in verdict.reason


def test_other_families_say_that_they_do_not_fuse(h200: Device) -> None:
    problem = Problem(128, 512, 512, epilogue="bias_n")
    for name in set(NAMES) - {"cute_sm90", "skinny", "grouped", "cublaslt"}:
        verdict = get(name).check(problem, Candidate.make(name, {}), h200)
        assert (verdict.rule, "without bias_n" in verdict.reason) == ("epilogue", True), name


def test_swapped_operands_are_another_kernel(h200: Device) -> None:
    """With swap_ab the vector of columns runs along the kernel's rows: one object cannot serve both."""
    problem = Problem(128, 512, 512, epilogue="bias_n", out_major="n")
    config = config_of(problem, candidate(KERNELS[2]))
    assert (config.epilogue, config.transposed) == ("bias_n", True)
    assert not config_of(replace(problem, epilogue=""), candidate(KERNELS[2])).transposed
