"""What Triton is asked to compile, and what is launched of it, with stand-ins for compiler and driver."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.generate import test_gluon_wgmma, test_triton, test_triton_tma
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.errors import ArtifactError
from tunegemm.generate import families, gluon_wgmma, routing, triton, triton_launch, triton_tma, workspace
from tunegemm.generate.cublaslt import binding, choice
from tunegemm.generate.cublaslt.choice import LibraryChoice
from tunegemm.generate.takes import MOST, NotTaken
from tunegemm.generate.tiles import divided


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def build(*given: Any, **words: Any) -> Resources:
        calls.append((given, words))
        return Resources(90, 0, 0)

    for module, name in (
        (gluon_wgmma, "build"), (routing, "build"), (triton, "build_without_spills"),
        (triton_tma, "build_without_spills"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, build)
    return calls


def compiled(name: str, problem: Problem, candidate: Any, device: str = "h200") -> None:
    family: Any = families.get(name)
    key = family.kernel_key(problem, candidate, find_device(f"model:{device}"))
    family.compile(key, Path("out.o"))


@pytest.mark.parametrize("layout", ["tn", "tt", "nn", "nt"])
@pytest.mark.parametrize("out_major", ["n", "m"])
@pytest.mark.parametrize("name", ["triton_tma", "gluon_wgmma"])
def test_boxes_have_the_contiguous_extent_last(asked: Any, name: str, layout: str, out_major: str) -> None:
    problem = Problem.parse("4096x4096x4096", layout=layout)
    problem = Problem(4096, 4096, 4096, a_major=problem.a_major, b_major=problem.b_major, out_major=out_major)
    module = {"triton_tma": test_triton_tma, "gluon_wgmma": test_gluon_wgmma}[name]
    candidate = module.candidate()
    compiled(name, problem, candidate)
    place = 2 if name == "triton_tma" else 1
    ((given, words),) = asked
    arguments, constants = given[place : place + 2]
    m, n, k = (candidate[f"tile_{extent}"] for extent in "mnk")
    boxes = {
        "a_desc": (m, k) if problem.a_major == "k" else (k, m),
        "b_desc": (n, k) if problem.b_major == "k" else (k, n),
    }
    for desc, (lines, extent) in boxes.items():
        assert arguments[desc].startswith(f"tensordesc<bf16[1, {lines}, {extent}]")
    if name == "triton_tma":
        contiguous = {f"{one}_contiguous": constants[f"{one}_contiguous"] for one in "abd"}
        assert contiguous == {
            "a_contiguous": problem.a_major == "k", "b_contiguous": problem.b_major == "n",
            "d_contiguous": out_major == "n",
        }  # fmt: skip
        lines, extent = (m, candidate["epi_n"]) if out_major == "n" else (candidate["epi_n"], m)
        assert arguments["d_desc"] == f"tensordesc<bf16[1, {lines}, {extent}]>"
        assert arguments["partials"] == "*fp32" and arguments["m"] == "i32"
        assert words["num_stages"] == candidate["stages"] and words["num_warps"] == candidate["warps"]
    else:
        assert arguments["d_desc"].startswith("tensordesc<bf16[1, ")
        scalars = {key for key, kind in arguments.items() if kind == "i32"}
        assert "tiles_m" in scalars and not scalars & {"CONFIG", "a_desc"}


@pytest.mark.parametrize(
    ("rows", "columns", "swizzle"), [(8, 64, 128), (8, 32, 64), (8, 16, 32), (8, 8, 0), (64, 96, 64)]
)
def test_the_widest_swizzle_that_a_line_takes(rows: int, columns: int, swizzle: int) -> None:
    assert f"swizzle_byte_width={swizzle}," in gluon_wgmma.tensor_map_of("bf16", rows, columns, True)
    assert f"[1, {columns}, {rows}]" in gluon_wgmma.tensor_map_of("bf16", rows, columns, False)


@pytest.mark.parametrize(
    ("dtype", "sums", "partials"),
    [("bf16", "fp32", "*fp32"), ("int8", "int32", "*i32"), ("tf32", "fp32", "*fp32")],
)
def test_a_portable_kernel_sums_in_its_dtype(asked: Any, dtype: str, sums: str, partials: str) -> None:
    problem = Problem.parse("4096x4096x4096", dtype=dtype, layout="tt" if dtype == "bf16" else "tn")
    candidate = test_triton.candidate()
    compiled("triton", problem, candidate)
    ((given, words),) = asked
    arguments, constants = given[2:4]
    assert str(constants["sums_dtype"]) == sums and arguments["partials"] == partials
    assert (
        constants["a_contiguous"]
        and constants["b_contiguous"] == (dtype == "bf16")
        and constants["d_contiguous"]
    )
    assert arguments["a"] == arguments["b"] and arguments["m"] == "i32" and words["aligned"]["partials"] == 16
    assert words["num_stages"] >= candidate["stages"]


def test_with_mma_sync_the_compiler_gets_a_stage_more(asked: Any) -> None:
    problem, candidate = Problem.parse("4096x4096x4096"), test_triton_tma.candidate()
    for device in ("h200", "b200"):
        compiled("triton_tma", problem, candidate, device)
    family: Any = families.get("triton_tma")
    key = dict(family.kernel_key(problem, candidate, find_device("model:h200"))) | {"target": "sm_120a"}
    family.compile(key, Path("out.o"))
    assert [words["num_stages"] - candidate["stages"] for _, words in asked] == [0, 0, 1]


def test_each_kernel_of_routing_has_its_types_and_constants(asked: Any) -> None:
    keys = routing.kernels()
    for key in keys.values():
        routing.FAMILY.compile(key, Path("out.o"))
    found = {name: (given, words) for name, (given, words) in zip(keys, asked, strict=True)}
    combine = next(given for name, (given, _) in found.items() if name == "combine bf16 fp32")
    assert combine[1]["weights"] == "*fp32" and combine[1]["rows"] == combine[1]["out"] == "*bf16"
    for name, (given, words) in found.items():
        kernel = name.split()[0]
        warps = {"combine": 2, "spread": 8, "few_up": 1, "few_down": 2 if name.endswith("8") else 1}
        assert words["num_warps"] == warps.get(kernel, 4)
        assert not set(given[1]) & set(given[2]) and set(given[1]) | set(given[2]) == set(given[0].arg_names)
    few = [given[2]["gated"] for name, (given, _) in found.items() if name.startswith("few ")]
    assert few == [False, True, False]
    down = found["few_down fp16 fp32 8"][0]
    assert down[1]["factors"] == "*fp32" and down[1]["weights"] == "*fp16" and down[2]["together"] == 8


@pytest.mark.parametrize("here", [True, False])
def test_kernels_of_routing_keep_arguments_and_refuse_what_they_do_not_take(
    monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    launched: list[Any] = []
    devices: list[int] = []
    arguments = [SimpleNamespace(name=name, type="pointer") for name in ("both", "out")]
    header = SimpleNamespace(entry="gate", arguments=[*arguments, SimpleNamespace(name="units", type="i32")])
    kernel = SimpleNamespace(header=header, launch=lambda *given: launched.append(given))
    monkeypatch.setattr(triton_launch, "load", lambda artifact, index: kernel)
    monkeypatch.setattr(triton_launch, "Arguments", lambda header, values: values)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0 if here else 1, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: devices.append(index) or nullcontext())
    bind = routing.load(Path(), 0)
    room = torch.zeros(64, dtype=torch.bfloat16)
    launch = bind(7, units=3)
    for _ in range(2):
        launch(room, room[8:])
    (ctas, stream, first), (_, _, second) = launched
    assert first is second and (ctas, stream) == (7, 70) and devices == ([] if here else [0, 0])
    assert first == {"units": 3, "both": room.data_ptr(), "out": room.data_ptr() + 16}
    for one, other in ((room[1:], room), (room, room[4:])):
        with pytest.raises(NotTaken, match="at these addresses"):
            launch(one, other)
    assert bind(1, units=MOST - 1) is not None and bind(1, units=-MOST) is not None
    for ctas, number in ((1, MOST), (1, -MOST - 1), (MOST, 1)):
        with pytest.raises(NotTaken, match="gate of"):
            bind(ctas, units=number)


def test_numbers_of_routings_launches() -> None:
    given = {"step": 2, "tokens": 5, "chosen": 3, "count": 33, "units": 9, "x_units": 10}
    blocks, numbers = routing.route_numbers(**given, own_rows=8)
    assert blocks == 2 + 2 and numbers == {
        "step": 2, "total": 15, "chosen": 3, "count": 33, "units": 9, "x_units": 10
    }  # fmt: skip
    assert routing.spread_numbers(**given | {"tokens": 86}) == (2, numbers | {"total": 258})
    assert (
        routing.combine_numbers(step=1, tokens=5, chosen=3, count=4, units=65, weights_stride=6)[0] == 5 * 2
    )
    assert routing.gate_numbers(rows=5, units=129, slope=1.0, limit=0.0, offset=0.0) == (
        10, {"units": 129, "blocks": 2, "slope": 0x3F800000, "limit": 0, "offset": 0}
    )  # fmt: skip
    few: Any = {"rows": 5, "count": 2, "n": 7, "units": 3, "strides": (4, 5, 6)}
    plain = routing.few_numbers(**few, bias_stride=None, gated=False, interleaved=True)
    assert plain[0] == 5 * 4
    assert [plain[1][name] for name in ("has_bias", "bias_stride", "turns", "apart")] == [0, 0, 1, 0]
    gated = [
        routing.few_numbers(**few, bias_stride=0, gated=True, interleaved=interleaved)[1]
        for interleaved in (True, False)
    ]
    assert [(each["has_bias"], each["turns"], each["apart"]) for each in gated] == [(1, 2, 1), (1, 1, 7)]


@pytest.mark.parametrize(
    ("streams", "tiles", "k", "split_k", "division"),
    [
        (False, 10, 1024, 1, (10, 1, 0)), (False, 200, 1024, 1, (132, 1, 0)),
        (False, 10, 1024, 4, (40, 4, 40)),
        (True, 264, 1024, 1, (132, 0, 0)), (True, 232, 2048, 1, (132, 100, 232)),
        (True, 16, 129, 1, (8, 0, 0)),
    ],
)  # fmt: skip
def test_how_a_product_of_blocks_is_divided(
    streams: bool, tiles: int, k: int, split_k: int, division: tuple[int, int, int]
) -> None:
    assert divided(streams, tiles, -(-k // 128), split_k, 132) == division


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((24, 5, 2), LibraryChoice(128, 256, 2, 1, 2)), ((24, 5, 0), LibraryChoice(128, 256, 2, 1, 1)),
        ((0, 5, 1), None), ((9999, 5, 1), None), ((24, 0, 1), None), (None, None), ("error", None),
    ],
)  # fmt: skip
def test_what_the_library_would_choose(monkeypatch: pytest.MonkeyPatch, found: Any, expected: Any) -> None:
    def heuristic(*_: Any) -> list[Any]:
        if found == "error":
            raise binding.LibraryError("planted")
        return [] if found is None else [SimpleNamespace(algorithm=found)]

    def read(algorithm: Any, name: str) -> int:
        return dict(zip(("tile", "cluster_shape", "split_k"), algorithm, strict=True)).get(name, 0)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(binding, "Plan", lambda *_: None)
    monkeypatch.setattr(binding, "heuristic", heuristic)
    monkeypatch.setattr(binding, "read", read)
    problem = Problem(64, 64, 64)
    assert choice.first_choice(problem, 0) == expected
    assert choice.first_choice(Problem.parse("64x64x64", dtype="int8"), 0) is None
    monkeypatch.setattr(binding, "missing", lambda: None)
    algorithms = [{"tile": "128x272"}, {"tile": "256x136"}, {"tile": "UNDEFINED"}]
    numbers: list[int] = []
    rooms: list[int] = []

    def named(problem: Problem, index: int, requested: int, workspace: int) -> list[Any]:
        numbers.append(requested)
        rooms.append(workspace >> 20)
        return algorithms[:requested]

    monkeypatch.setattr("tunegemm.generate.cublaslt.library.algorithms", named)
    problem = Problem.parse("64x64x64", epilogue="residual")
    assert choice.algorithm_to_add(problem, 0) == algorithms[1]  # type: ignore[comparison-overlap]
    assert numbers == [1, 8]
    algorithms.reverse()
    assert choice.algorithm_to_add(problem, 0) == algorithms[0]  # type: ignore[comparison-overlap]
    assert numbers == [1, 8, 1], "more are asked for only where the first adds slowly"
    biased = Problem.parse("64x64x64", epilogue="bias_n+residual")
    assert choice.algorithm_to_add(biased, 0) == algorithms[0]  # type: ignore[comparison-overlap]
    assert rooms == [32, 32, 32, 1], "as torch asks for a product with a bias"
    algorithms.insert(0, {"tile": "128x168"})
    assert choice.algorithm_to_add(problem, 0) == algorithms[0]  # type: ignore[comparison-overlap]
    assert choice.algorithm_to_add(biased, 0) is None, "it adds slowly, and the next may be slower still"
    activated = Problem.parse("64x64x64", epilogue="bias_n+gelu_tanh")
    assert choice.algorithm_to_add(activated, 0) == algorithms[0]  # type: ignore[comparison-overlap]
    assert numbers[3:] == [1, 1, 1, 1]
    del algorithms[:3]
    assert choice.algorithm_to_add(problem, 0) == algorithms[0]  # type: ignore[comparison-overlap]
    algorithms.clear()
    assert choice.algorithm_to_add(problem, 0) is None
    monkeypatch.setattr(binding, "missing", lambda: "no library")
    assert choice.algorithm_to_add(problem, 0) is None
    monkeypatch.setattr(binding, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert choice.algorithm_to_add(problem, 0) is None and choice.first_choice(problem, 0) is None


@pytest.mark.parametrize(
    ("current", "quick", "calls"), [(0, True, ["quick"]), (1, True, ["empty"]), (0, False, ["empty"])]
)
def test_memory_is_of_the_device_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch, current: int, quick: bool, calls: list[str]
) -> None:
    seen: list[str] = []
    guards = SimpleNamespace(_empty_strided_cuda=(lambda *_: seen.append("quick")) if quick else None)
    monkeypatch.setattr(torch._C._dynamo, "guards", guards)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: seen.append("empty"))
    workspace._allocation.__wrapped__(0)(64)
    assert seen == calls


@pytest.mark.parametrize(
    ("changes", "is_limited"), [({}, False), ({"occupancy": 2}, True), ({"schedule": "multistage"}, False)]
)
def test_a_gluon_kernel_has_a_limit_of_registers_where_blocks_share(
    asked: Any, changes: dict[str, Any], is_limited: bool
) -> None:
    candidate = test_gluon_wgmma.candidate(**changes)
    compiled("gluon_wgmma", Problem.parse("4096x4096x4096"), candidate)
    ((given, words),) = asked
    config = given[2]["CONFIG"]
    assert words["max_registers"] == (config.launch_registers if is_limited else None)
    assert words["num_warps"] == (4 if config.specialized else candidate["warps"])


def test_a_launcher_has_the_given_workspace_or_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    family: Any = replace(
        families.get("triton"), launcher=lambda *given: given[-1], workspace=lambda *_: "its own"
    )  # fmt: skip
    problem, candidate = Problem.parse("4096x4096x4096"), test_triton.candidate()
    device = find_device("model:h200")
    assert family.load(problem, candidate, device, Path("a.o"), "given") == "given"
    assert family.load(problem, candidate, device, Path("a.o")) == "its own"
    with pytest.raises(ArtifactError, match="has no compiled object"):
        family.load(problem, candidate, device, None)
