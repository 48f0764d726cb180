"""Outputs and operands that end anywhere, on the GPU: nothing is stored beyond a view, nothing misread at odd
extents, and what is not a number stays so.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import tunegemm
from tests.gpu.test_conformance import EXAMPLES, chosen
from tests.support.hopper import hopper
from tests.support.kernels import Kernels, selected
from tests.support.numerics import TOLERANCE, difference, kept, relative_error, room_of
from tests.support.sampled import covering
from tests.support.serving import Row, serve_with
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.epilogue import ACTIVATIONS, GATED, Epilogue, Matrix, PerColumn, maximum, minimum
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.planning import Planner
from tunegemm.generate import families
from tunegemm.measure import operands as data

pytestmark = pytest.mark.gpu

SECOND = {"split_k": 4, "reduction": "second_kernel"}
SKINNY: dict[str, Any] = {
    "tile_m": 8, "tile_n": 32, "tile_k": 256, "warps_n": 1, "warps_k": 8, "stages": 4, "vector_bytes": 16,
    "ctas_per_sm": 2,
}  # fmt: skip


@Epilogue.custom
def clipped(acc, bias: PerColumn, skip: Matrix):  # type: ignore[no-untyped-def]
    return minimum(maximum(acc + bias, -1.0), 1.0) + maximum(skip, acc)


#: What a test asks to be compiled.
Wanted = tuple[Problem, Candidate]


def skinny(split_k: int = 1) -> Candidate:
    return Candidate.make("skinny", SKINNY, {"ctas": "tiles", "split_k": split_k})


# ---- views of the output ----------------------------------------------------------------------------------

#: Extents of lines that end anywhere within a unit of 16 bytes, of one line, and of a batch.
ENDS = [(72, n, 264, 1) for n in (1001, 1002, 1003, 1004, 1006, 1007, 1008)]
ENDS += [(1, 1003, 264, 1), (72, 1, 264, 1), (72, 3, 264, 1), (40, 516, 136, 3)]
KINDS = [("tn", "bf16", "bf16", "n"), ("tn", "bf16", "bf16", "m"), ("nt", "fp16", "fp32", "n")]
KINDS += [("tn", "fp16", "fp32", "m")]


def of_ends(kernels: Kernels, examples: Any, kind: tuple[str, ...]) -> Iterator[Wanted]:
    layout, in_dtype, out_dtype, out_major = kind
    for number, (m, n, k, batch) in enumerate(ENDS):
        plain = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        turned = out_major == "m"
        problem = replace(plain, m=n, n=m, out_major="m", alignment=0) if turned else plain
        for kernel in examples.of_each_schedule:
            candidate = chosen(kernels.device, examples, problem, kernel, number)
            if candidate is not None:
                yield problem, candidate


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda examples: examples.family)
def test_nothing_is_stored_beyond_a_view(kernels: Kernels, examples: Any, kind: tuple[str, ...]) -> None:
    launched = 0
    for problem, candidate in of_ends(kernels, examples, kind):
        launch = kernels.load(problem, candidate)
        case = data.make_operands(problem, torch.device("cuda"), 3)
        for gap in (0, 1):
            memory, out = room_of(problem, gap)
            launch(case.a, case.b, out)
            error = relative_error(out, case.a, case.b)
            assert error < TOLERANCE[problem.out_dtype], (problem, str(candidate), error)
            assert kept(memory, out), (problem, str(candidate), "wrote outside its output")
        launched += 1
    assert launched or examples.family in ("gluon_wgmma", "triton_tma", "skinny", "cute_sm80"), launched


#: What stores otherwise: from registers, 16 columns or 64 at a time, swapped, by a second kernel, in pairs.
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "epi_n 0": ({"epi_n": 0}, {}),
    "epi_n 16": ({"tile_n": 112, "epi_n": 16}, {}),
    "epi_n 64": ({"epi_n": 64}, {}),
    "pingpong": ({"schedule": "pingpong"}, {}),
    "swapped": ({"swap_ab": True, "tile_n": 64}, {}),
    "swapped, epi_n 0": ({"swap_ab": True, "tile_n": 64, "epi_n": 0}, {}),
    "pairs": ({}, {"split_k": 3}),
    "second kernel": ({}, SECOND),
    "stream-K": ({"tile_scheduler": "stream_k"}, {}),
}
REFUSALS = ("fused_store", "fused_registers", "accumulators", "shared_memory", "second_slices")
FUSED = ["", "bias_n+gelu", "residual", "beta_c+relu+residual", "swiglu", "reglu+residual+amax"]


def each_store(device: Device, store: str, text: str) -> Iterator[Wanted]:
    kernel, launch_parameters = STORES[store]
    for out_dtype, n, out_major in itertools.product(("bf16", "fp32"), (1001, 1004, 1006, 17, 1), "nm"):
        stages = {"stages": 3} if out_dtype == "fp32" else {}
        columns = 2 * n if Epilogue.parse(text).gated else n
        problem = Problem(
            200, columns, 4096, out_dtype=out_dtype, epilogue=text, out_major=out_major, alignment=16
        )
        candidate = hopper(kernel | stages, launch_parameters)
        verdict = families.get("cute_sm90").check(problem, candidate, device)
        if verdict.runs:
            yield problem, candidate
        else:
            rules = ("fused_store", "fused_registers", "accumulators", "shared_memory")
            assert verdict.rule in rules, verdict


@cache
def compiled_stores(device: Device) -> list[tuple[str, ...]]:
    """Store, epilogue, dtype and major: each two of them together."""
    every = itertools.product(STORES, FUSED)
    there = {
        (store, text, problem.out_dtype, problem.out_major): None
        for store, text in every
        for problem, _ in each_store(device, store, text)
    }
    return covering(there)


def of_stores(device: Device, store: str, text: str) -> Iterator[Wanted]:
    for problem, candidate in each_store(device, store, text):
        if (store, text, problem.out_dtype, problem.out_major) in compiled_stores(device):
            yield problem, candidate


@pytest.mark.parametrize("text", FUSED)
@pytest.mark.parametrize("store", STORES)
def test_every_store_and_epilogue_ends_at_the_view(kernels: Kernels, store: str, text: str) -> None:
    """Matrices of odd extents, too, which end where their memory does."""
    launched = 0
    for problem, candidate in of_stores(kernels.device, store, text):
        made = data.make_operands(problem, torch.device("cuda"), 5)
        fused = list(made.fused)
        for at, operand in enumerate(problem.fused.operands):
            if operand.kind == "matrix":
                twice = 2 if operand.name == "c" and problem.fused.gated else 1
                shaped = replace(problem, n=twice * problem.n)
                _, fused[at] = room_of(shaped, 1)
                fused[at].copy_(made.fused[at])
        wanted = data.expected(problem, replace(made, fused=tuple(fused)))
        load = kernels.load(problem, candidate)
        for gap in (0, 2):
            memory, out = room_of(problem, gap)
            load(made.a, made.b, out, *fused)
            torch.cuda.synchronize()
            error = difference(out, wanted)
            assert error < 2 * TOLERANCE[problem.out_dtype], (problem, store, error)
            assert kept(memory, out), (problem, store, "wrote outside its output")
        launched += 1
    if not (launched or "epi_n 0" in store or Epilogue.parse(text).gated):
        pytest.fail("no kernel of this kind")


FP8_FUSED = ["scale_tensor", "scale_tensor+residual", "scale_rowwise+beta_c+residual", "scale_tensor+swiglu"]


BYTES = (1001, 1006, 1016, 24, 1)


def of_bytes(text: str, n: int) -> Wanted:
    columns = 2 * n if "swiglu" in text else n
    problem = Problem(200, columns, 512, in_dtype="fp8_e4m3", out_dtype="fp8_e4m3", epilogue=text)
    return problem, hopper({"tile_k": 128})


@pytest.mark.parametrize("text", FP8_FUSED)
@pytest.mark.parametrize("n", BYTES)
def test_outputs_of_bytes(kernels: Kernels, text: str, n: int) -> None:
    problem, candidate = of_bytes(text, n)
    launch = kernels.load(problem, candidate)
    made = data.make_operands(problem, torch.device("cuda"), 5)
    wanted = data.expected(problem, made)
    for gap in (0, 1):
        memory, out = room_of(problem, gap)
        launch(made.a, made.b, out, *made.fused)
        torch.cuda.synchronize()
        assert difference(out, wanted) < data.tolerance(problem), problem
        assert kept(memory, out), (problem, "wrote outside its output")


GATED_BYTES = ("scale_tensor", "scale_tensor+swiglu", "scale_tensor+reglu+residual")
TILES, SUBTILES = (16, 32, 48, 64, 96, 112, 128, 144), (16, 32, 48, 64)


def of_subtiles(text: str, tile_n: int, epi_n: int) -> Wanted:
    problem = Problem(256, 672, 512, in_dtype="fp8_e4m3", out_dtype="fp8_e4m3", epilogue=text)
    return problem, hopper({"tile_k": 128, "tile_n": tile_n, "epi_n": epi_n})


def subtiles() -> list[tuple[int, int, str]]:
    """Those that no rule lets run, and of the others each two values together."""
    h200, sm90 = find_device("model:h200"), families.get("cute_sm90")
    every = [*itertools.product(SUBTILES, TILES, GATED_BYTES)]
    there = [case for case in every if sm90.check(*of_subtiles(*case[::-1]), h200).runs]
    covered = covering(there)
    return [case for case in every if case in covered or case not in there]


@pytest.mark.parametrize(("epi_n", "tile_n", "text"), subtiles())
def test_gated_outputs_of_bytes_by_every_subtile(
    kernels: Kernels, text: str, tile_n: int, epi_n: int
) -> None:
    """Boxes of whole 16 bytes, or none."""
    problem, candidate = of_subtiles(text, tile_n, epi_n)
    verdict = families.get("cute_sm90").check(problem, candidate, kernels.device)
    if not verdict.runs:
        assert verdict.rule in ("store_box", "epilogue_tile", "accumulators", "fused_registers"), verdict
        return
    made = data.make_operands(problem, torch.device("cuda"), 5)
    kernels.load(problem, candidate)(*made.arguments)
    torch.cuda.synchronize()
    checked = data.check(made, data.expected(problem, made))
    assert checked.objection(data.tolerance(problem)) is None


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("call", ["matmul", "mm under enable", "matmul, batch"])
def test_a_served_call_ends_at_the_view(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    for n, pitch in itertools.product((1001, 1004, 1007), (1008, 1016)):
        batch = 2 if "batch" in call else 1
        problem = Problem(256, n, 512, batch)
        launch = kernels.load(problem, hopper())
        seen: list[Problem] = []

        def counted(*arguments: Any, launch: Any = launch, seen: Any = seen, problem: Any = problem) -> None:
            seen.append(problem)
            launch(*arguments)

        row = Row(problem, kernels.device.fingerprint, hopper())
        served = Dispatcher(
            Planner(
                read=lambda row=row: Snapshot([row]),
                prepare=lambda record, device, counted=counted: Prepared(counted),
            )
        )
        serve_with(monkeypatch, served, "cuda")
        lead = (batch,) if batch > 1 else ()
        a = torch.randn(*lead, 256, 512, device="cuda").bfloat16()
        b = torch.randn(*lead, n, 512, device="cuda").bfloat16().mT
        room = torch.full((*lead, 258, pitch), 7.0, device="cuda", dtype=torch.bfloat16)
        out = room[..., 1:257, :n]
        with warnings.catch_warnings():
            for _ in range(2):
                if call == "mm under enable":
                    with tunegemm.enable():
                        torch.mm(a, b, out=out)
                else:
                    tunegemm.matmul(a, b, out=out)
        torch.cuda.synchronize()
        assert seen, (call, n, pitch, "was torch's")
        assert relative_error(out, a, b) < TOLERANCE["bf16"], (call, n, pitch)
        assert kept(room, out), (call, n, pitch, "wrote outside the view")


@pytest.mark.parametrize("layout", ["tn", "tt", "nn"])
@pytest.mark.parametrize("shape", ["200x136x1001", "203x133x1003", "67x1x17"])
def test_what_lies_behind_an_operands_lines_is_not_multiplied(
    kernels: Kernels, shape: str, layout: str
) -> None:
    """Lines that begin at multiples of 16 bytes and end within such a unit: the rest is NaN."""
    problem = Problem.parse(shape, layout=layout)
    launch = kernels.load(problem, hopper())

    def within(rows: int, columns: int, row_major: bool) -> torch.Tensor:
        lines, extent = (rows, columns) if row_major else (columns, rows)
        room = torch.full((lines, -(-extent // 8) * 8 + 8), torch.nan, device="cuda").bfloat16()
        view = room[:, :extent]
        view.copy_(torch.randn(lines, extent, device="cuda"))
        return view if row_major else view.mT

    a = within(problem.m, problem.k, problem.a_major == "k")
    b = within(problem.k, problem.n, problem.b_major == "n")
    memory, out = room_of(problem, 1)
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]
    assert kept(memory, out)


# ---- what is not a number ---------------------------------------------------------------------------------

TEXTS = [
    "", *ACTIVATIONS, *GATED, "amax", "relu+amax", "reglu+residual+amax", "bias_n+relu", "bias_m+relu",
    "residual", "scale_rowwise+relu", "beta_c+relu", str(clipped),
]  # fmt: skip
FUSING: dict[str, tuple[Candidate, int, int]] = {
    "pairs": (hopper(), 256, 512),
    "swapped": (hopper({"swap_ab": True, "tile_n": 64}), 64, 512),
    "split": (hopper(launch={"split_k": 3}), 256, 4096),
    "second kernel": (hopper(launch=SECOND), 256, 4096),
    "skinny": (skinny(), 8, 2048),
    "skinny, split": (skinny(4), 8, 4096),
}


BETAS = ("beta_c", "beta_c+bias_n+relu", "alpha+beta_c+residual")


def of_way(way: str, text: str) -> Wanted:
    candidate, m, k = FUSING[way]
    return Problem(m, 1024, k, epilogue=text), candidate


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", FUSING)
def test_nan_and_infinity_are_as_torch_has_them(kernels: Kernels, way: str, text: str) -> None:
    """In a, in b, of either sign, and in an operand of the epilogue: the same elements are NaN, infinite or
    right as by the reference, which takes torch's operations. amax is NaN where an element is.
    """
    problem, candidate = of_way(way, text)
    verdict = families.get(candidate.family).check(problem, candidate, kernels.device)
    if not verdict.runs:
        assert verdict.rule in ("fused_store", "fused_registers", "second_slices", "accumulators"), verdict
        pytest.skip(str(verdict))
    launch = kernels.load(problem, candidate)
    vectors = [at for at, one in enumerate(problem.fused.operands) if one.kind in ("m", "n", "matrix")]
    for value, where in itertools.product(
        (torch.nan, -torch.nan, torch.inf, -torch.inf), ("a", "b", *vectors)
    ):
        made = data.make_operands(problem, torch.device("cuda"), 5)
        target = {"a": made.a, "b": made.b}.get(where) if isinstance(where, str) else made.fused[where]
        assert target is not None
        place = (3,) if target.ndim == 1 else (3, 5)
        target[place] = value
        if value != value and torch.signbit(torch.tensor(value)):  # the bits of a negative NaN
            target.view(torch.int16 if target.itemsize == 2 else torch.int32)[place] = -1
        wanted = data.expected(problem, made)
        launch(*made.arguments)
        torch.cuda.synchronize()
        label = (problem, way, where, value)
        out = made.out.float()
        assert torch.equal(out.isnan(), wanted.isnan()), label
        right = wanted.isfinite()
        assert torch.equal(out[out.isinf()], wanted[wanted.isinf()]), label
        if bool(right.any()):
            assert difference(out[right], wanted[right]) < 2 * TOLERANCE["bf16"], label
        if made.amax is not None:
            largest = wanted.abs().amax()
            assert bool(made.amax.isnan()) == bool(largest.isnan()), label
            if largest.isinf():
                assert bool(made.amax.isinf()), label


@pytest.mark.parametrize("text", BETAS)
@pytest.mark.parametrize("way", FUSING)
def test_c_is_not_read_where_beta_is_zero(kernels: Kernels, way: str, text: str) -> None:
    problem, candidate = of_way(way, text)
    if not families.get(candidate.family).check(problem, candidate, kernels.device).runs:
        pytest.skip("no such kernel")
    launch = kernels.load(problem, candidate)
    names = [one.name for one in problem.fused.operands]
    for beta in (0.0, -0.0, 0.5):
        made = data.make_operands(problem, torch.device("cuda"), 5)
        fused = list(made.fused)
        fused[names.index("beta")] = beta
        fused[names.index("c")][3, 5] = torch.nan
        made = replace(made, fused=tuple(fused))
        wanted = data.expected(problem, made)
        launch(*made.arguments)
        torch.cuda.synchronize()
        assert int(made.out.isnan().sum()) == (beta != 0), (problem, beta)
        right = ~wanted.isnan()
        assert difference(made.out[right], wanted[right]) < TOLERANCE["bf16"], (problem, beta)


@pytest.fixture(scope="module", autouse=True)
def made(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """All kernels of the module are begun, on all cores, in the order of the tests."""
    wanted: list[Wanted] = []
    for examples, kind in selected(request, "examples", "kind"):
        wanted += of_ends(kernels, examples, kind)
    for store, text in selected(request, "store", "text"):
        wanted += of_stores(kernels.device, store, text)
    wanted += [of_bytes(*case) for case in selected(request, "text", "n")]
    wanted += [of_subtiles(*case) for case in selected(request, "text", "tile_n", "epi_n")]
    wanted += [of_way(*case) for case in selected(request, "way", "text")]
    kernels.begin_all(
        (problem, candidate)
        for problem, candidate in wanted
        if families.get(candidate.family).check(problem, candidate, kernels.device).runs
    )
