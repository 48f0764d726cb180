"""Launches a sample of the Hopper kernel's schedules, grouped and joined kernels, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.support.sanitized STORE

`tests/test_gpu_sanitizer.py` compiles the kernels into STORE and runs that.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.grouped import DTYPES
from tests.support.hopper import hopper
from tests.support.numerics import Case
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.describe.device import find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.operation import Operation
from tunegemm.generate import along_k, block_groups, blocks, joined, quantize
from tunegemm.generate.along_k import AlongK
from tunegemm.generate.block_groups import BlockGroupKernel
from tunegemm.generate.blocks import BlockKernel
from tunegemm.generate.blocks.config import BlockConfig
from tunegemm.generate.cute_sm90.config import KernelConfig
from tunegemm.generate.grouped.config import GroupedConfig
from tunegemm.generate.joined import JoinedKernel
from tunegemm.generate.quantize import BLOCK, Quantizer
from tunegemm.groups.routing import Gate, Routing, few
from tunegemm.model.block_groups import listed as listed_of_block_groups
from tunegemm.model.blocks import listed as listed_of_blocks
from tunegemm.model.grouped import configs, kinds, listed, listed_along_k, maker_of
from tunegemm.model.joined import listed as listed_of_weights
from tunegemm.store.provided import provide_blocks, provide_grouped, provide_joined

_PINGPONG = {"schedule": "pingpong", "cluster_n": 1}
_NARROW = {"tile_m": 64, "tile_n": 16, "epi_n": 16, "cluster_n": 1, "swap_ab": True}
_STREAM, _SECOND = {"tile_scheduler": "stream_k"}, {"reduction": "second_kernel"}
#: Shape, what else the problem is, what of the kernel (`hopper`, clusters of 1x2) and of its launch differs.
CASES = [
    ("328x520x392", {}, {}, {}),
    ("328x520x392", {"layout": "nt"}, {"cluster_m": 2, "cluster_n": 1, "tile_m": 256}, {}),
    ("328x520x392x2", {}, {"tile_m": 192, "tile_n": 160, "stages": 3, "cluster_n": 1}, {}),
    ("200x264x328", {}, _PINGPONG | {"tile_m": 64}, {"l2_hint": "b_first"}),
    ("328x520x392", {}, _PINGPONG | {"cluster_m": 2}, {"raster_order": "along_n"}),
    ("200x520x1032", {}, {"tile_m": 64}, {"split_k": 3}),
    ("200x520x1032", {}, _PINGPONG | {"tile_n": 64}, {"split_k": 4}),
    ("16x520x1032", {}, _NARROW, {"split_k": 2}),
    ("200x520x1032", {}, {"tile_m": 64}, _SECOND | {"split_k": 3}),
    ("16x520x1032", {}, _NARROW, _SECOND | {"split_k": 2}),
    ("200x520x1032", {}, _STREAM | {"tile_m": 64}, {}),
    ("200x520x1032", {}, _PINGPONG | _STREAM | {"tile_n": 64}, _SECOND),
    ("200x264x328", {"out_dtype": "fp32"}, {"tile_m": 64}, {}),
    ("200x272x656", {"dtype": "fp8_e4m3", "epilogue": "scale_rowwise"}, {"tile_k": 128, "tile_m": 64}, {}),
    ("200x272x656", {"dtype": "fp8_e4m3", "accumulation": "two_level"}, {"tile_k": 128, "stages": 3}, {}),
    ("200x272x656", {"dtype": "int8"}, {"tile_k": 128, "stages": 3}, {}),
    ("200x264x328", {"dtype": "tf32"}, {"tile_k": 32}, {}),
    ("328x528x392", {"epilogue": "bias_n+gelu+residual"}, {}, {}),
    ("328x528x392", {"epilogue": "swiglu+amax"}, _PINGPONG | {"tile_m": 64}, {}),
    ("328x528x1032", {"epilogue": "swiglu+amax"}, {"tile_m": 64}, _SECOND | {"split_k": 2}),
    ("328x528x1032", {"epilogue": "alpha+beta_c+bias_m"}, {"tile_m": 64}, {"split_k": 2}),
    ("328x1056x392", {"epilogue": "swiglu+residual"}, _PINGPONG | {"tile_n": 176, "epi_n": 16}, {}),
    (
        "200x272x656", {"dtype": "int8", "out_dtype": "bf16", "epilogue": "scale_rowwise+residual"},
        {"tile_k": 128, "stages": 3}, {},
    ),
]  # fmt: skip


def operations(store: ArtifactStore | None = None) -> Iterator[Operation]:
    """The cases on this machine's GPU."""
    device = find_device("cuda:0")
    for shape, others, kernel, launch in CASES:
        candidate = hopper({"cluster_n": 2} | kernel, launch)
        yield Operation(Problem.parse(shape, **others), candidate, device, store=store)  # type: ignore[arg-type]


def main(folder: str, planted: bool = False, once: bool = False) -> None:
    """Launches each and checks its result. Planted: partial sums get half of the memory that they need.

    Once: kernels with scales of blocks fill each stage once. racecheck sees machine code, and a warp whose
    lanes run together has no instruction there for its barrier: one lane's arrival for all of them looks to
    it as if the others still read.
    """
    for operation in operations(ArtifactStore(Path(folder))):
        need = operation.workspace_bytes
        if planted and not need:
            continue
        workspace = torch.empty(need, dtype=torch.uint8, device="cuda")
        operation.initialize(workspace if need else None)
        if planted:  # an address, of which only the sanitizer knows how much memory is there
            half = torch.zeros(need // 2, dtype=torch.uint8, device="cuda")
            assert operation._memory is not None
            operation._memory.lend(half.data_ptr())
        case = Case.of(operation.problem, seed=5)
        operation.run(*case.operands.arguments)
        objection = case.objection()
        print(operation.problem, operation.candidate, objection or "right", flush=True)
        if objection and not planted:
            raise SystemExit(1)
    if not planted:
        launch_grouped()
        launch_along_k()
        launch_around()
        launch_joined()
        launch_blocks(once)
        launch_block_groups(once)
        launch_quantizers()


def grouped_kernels() -> Iterator[tuple[str, GroupedConfig]]:
    """All plain kernels of groups with their kind, and one of each other kind."""
    for kind in kinds():
        yield from ((kind, config) for config in listed(kind=kind)[: None if kind == "bf16" else 1])


def launch_grouped() -> None:
    """Grouped kernels over ragged groups, empty ones, rows behind the last, and offsets that are none."""
    for kind, config in grouped_kernels():
        artifact = provide_grouped(kind).of(maker_of(config).key_of(config))
        assert artifact is not None, config.label
        kernel, rows = maker_of(config).kernel(config, artifact.path), 144 * (1 + config.fused.gated)
        dtype, out_dtype = DTYPES[config.in_dtype], DTYPES[config.out_dtype]
        a = torch.ones(150, 208, device="cuda").to(dtype)
        weights = torch.ones(5, rows, 208, device="cuda").to(dtype)
        if config.a_major == "m":
            weights = weights.mT.contiguous().mT
        columns, of_rows = torch.ones(5, rows, device="cuda"), torch.ones(150, device="cuda")
        bias = columns if config.fused.scales else columns.to(dtype)
        out = torch.zeros(150, 144, device="cuda", dtype=out_dtype)
        for ends in ([1, 1, 132, 140, 147], [0, 0, 0, 0, 150], [-5, 40, 20, 2**31 - 1, 7]):
            offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
            scales = of_rows if config.fused.scales else None
            kernel.launch(a, weights, out, offsets, bias, scales=scales, blocks=16)
            torch.cuda.synchronize()
        print("grouped", config.label, flush=True)


def launch_along_k() -> None:
    """Kernels of groups along k over the same groups, of operands that end where their memory does."""
    a, b = (torch.ones(150, width, device="cuda", dtype=torch.bfloat16) for width in (208, 264))
    for config in listed_along_k():
        artifact = provide_grouped("along_k").of(along_k.FAMILY.key_of(config))
        assert artifact is not None, config.label
        kernel, out = AlongK.load(config, artifact.path), a.new_zeros(5, 208, 264)
        for ends in ([1, 1, 132, 140, 147], [0, 0, 0, 0, 150], [-5, 40, 20, 2**31 - 1, 7]):
            offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
            kernel.launch(a, b, out, offsets, blocks=16)
            torch.cuda.synchronize()
            if ends[0] == 1:
                sizes = torch.tensor([1, 0, 131, 8, 7], device="cuda")
                assert torch.equal(out.float(), sizes[:, None, None].expand_as(out).float()), config.label
        print("along k", config.label, flush=True)


def joined_kernels() -> list[KernelConfig]:
    """The bf16 kernels of several weights side by side, and of gates those with SwiGLU."""
    found = (config for config in listed_of_weights() if config.in_dtype == "bf16")
    return [config for config in found if not config.fused.gated or "swiglu" in config.fused.steps]


def launch_joined() -> None:
    """Kernels of several weights that end where their memory does, with tiles that hang over it."""
    device, provided = find_device("cuda:0"), provide_joined()
    for config in joined_kernels():
        artifact = provided.of(joined.FAMILY.key_of(config))
        assert artifact is not None, config.label
        kernel, gated = JoinedKernel.load(config, artifact.path), config.fused.gated
        many = not isinstance(config, GroupedConfig)
        ns = (config.tile_n + 8,) * 2 if gated else (config.tile_n + 8, config.tile_n * (1 + many), 24)
        for rows in (1, 150, 300):
            a = torch.ones(rows, 208, device="cuda", dtype=torch.bfloat16)
            weights = [torch.ones(n, 208, device="cuda", dtype=torch.bfloat16) for n in ns]
            biases = [torch.ones(n, device="cuda", dtype=torch.bfloat16) for n in ns]
            if many and "bias_n" not in config.fused.steps:
                biases = []
            out = a.new_zeros(rows, ns[0] if gated else sum(ns))
            kernel.launch(a, weights, out, biases, device=device)
            value = 208.0 + bool(biases)
            assert bool((out == out.new_tensor(value * value if gated else value)).all()), config.label
        print("joined", config.label, flush=True)


def block_kernels() -> list[BlockConfig]:
    """The kernels of fp8 with scales of blocks that write bf16."""
    return [config for config in listed_of_blocks() if config.out_dtype == "bf16"]


def length(config: BlockConfig, once: bool) -> int:
    """A product's K, ragged: once, as many blocks as there are stages, at most 4."""
    return min(400, BLOCK * config.stages - 16) if once else 2000


def launch_blocks(once: bool) -> None:
    """Kernels of fp8 with scales of blocks, of operands and scales that end where their memory does."""
    device, provided = find_device("cuda:0"), provide_blocks()
    for config in block_kernels():
        artifact = provided.of(blocks.FAMILY.key_of(config))
        assert artifact is not None, config.label
        kernel = BlockKernel.load(config, artifact.path)
        k = length(config, once)
        along = -(-k // BLOCK)
        a, weight = (torch.ones(rows, k, device="cuda").to(DTYPES["fp8_e4m3"]) for rows in (150, 264))
        scale_a, scale_b = torch.ones(along, 150, device="cuda").t(), torch.ones(3, along, device="cuda")
        short = [config.rows - 11] if config.loads_short else []  # boxes of 8, and of other powers of two
        if config.narrow:  # E8M0 of lines of units of 4 bytes, and fp32
            along = -(-k // 32)
            scale_a = torch.ones(150, along + 4 - along % 4, device="cuda").to(torch.float8_e8m0fnu)[
                :, :along
            ]
            scale_b = torch.ones(9, along, device="cuda")
        for rows, split_k in itertools.product([150, *(each for each in short if each < 150)], (1, 2)):
            out = torch.zeros(rows, 264, device="cuda", dtype=torch.bfloat16)
            kernel.launch(a[:rows], weight, scale_a[:rows], scale_b, out, device=device, split_k=split_k)
            assert bool((out == k).all()), (config.label, rows, split_k)
        print("blocks", config.label, flush=True)


def launch_block_groups(once: bool) -> None:
    """Kernels of groups with scales of blocks, of operands and scales that end where their memory does."""
    device, provided = find_device("cuda:0"), provide_blocks()
    for config in listed_of_block_groups():
        artifact = provided.of(block_groups.FAMILY.key_of(config))
        assert artifact is not None, config.label
        kernel = BlockGroupKernel.load(config, artifact.path)
        k = length(config, once)
        along = -(-k // BLOCK)
        a = torch.ones(150, k, device="cuda").to(DTYPES["fp8_e4m3"])
        weights = torch.ones(3, 264, k, device="cuda").to(DTYPES["fp8_e4m3"])
        scale_a, scale_b = torch.ones(along, 150, device="cuda").t(), torch.ones(3, 3, along, device="cuda")
        ends = torch.tensor([17, 17, 150], device="cuda", dtype=torch.int32)
        out = torch.zeros(150, 264, device="cuda", dtype=torch.bfloat16)
        kernel.launch(a, weights, scale_a, scale_b, ends, out, blocks=device.sm_count)
        assert bool((out == k).all()), config.label
        print("scaled groups", config.label, flush=True)


def launch_quantizers() -> None:
    """Kernels that quantise, of rows that end where their memory does."""
    provided = provide_blocks()
    for config in quantize.CONFIGS:
        artifact = provided.of(quantize.FAMILY.key_of(config))
        assert artifact is not None, config.label
        kernel = Quantizer.load(config, artifact.path)
        for rows, k in ((1, 8), (6, 400), (150, 1160)):
            x = torch.ones(rows, k * (1 + config.gated), device="cuda", dtype=DTYPES.get(config.dtype))
            values = torch.zeros(rows, k, device="cuda").to(DTYPES["fp8_e4m3"])
            scales = torch.zeros(-(-k // BLOCK), rows, device="cuda").t()
            launch = kernel.bound(x, values, scales)
            launch(x.data_ptr(), values.data_ptr(), scales.data_ptr())
            assert bool((values.float() == 448).all()) and bool((scales > 0).all()), config.label
        print("quantize", config.label, flush=True)


def launch_around() -> None:
    """Kernels around grouped products: few choices and many, of experts that are here and others."""
    steps = Routing()
    for tokens, chosen, count in ((3, 2, 5), (150, 8, 40), (2100, 4, 9)):
        x = torch.ones(tokens, 144, device="cuda", dtype=torch.bfloat16)
        index = torch.randint(-1, count + 2, (tokens, chosen), device="cuda")
        weights = torch.ones(tokens, chosen, device="cuda")
        routed = steps.route(x, index, count)
        assert routed is not None
        inner = steps.gate(routed.rows, Gate(interleaved=tokens > 3))
        result = steps.combine(routed.rows, routed.place, routed.ends, weights)
        assert inner is not None and result is not None
        here = ((index >= 0) & (index < count)).sum(1, keepdim=True)
        assert torch.equal(result.float(), here.float().expand(-1, 144)), (tokens, chosen, count)
    for tokens, chosen, count in ((1, 2, 5), (3, 1, 24), (1, 7, 40)):
        x = torch.ones(tokens, 144, device="cuda", dtype=torch.bfloat16)
        up, down = x.new_ones(count, 144, 144), x.new_ones(count, 144, 72)
        index = torch.randint(-1, count + 2, (tokens, chosen), device="cuda")
        weights = torch.ones(tokens, chosen, device="cuda")
        assert steps.layer(x, up, down, index, weights, (x.new_ones(count, 144), None), Gate()) is not None
    for kind in ("bf16", "gated"):
        of = few(configs(kind)["co64x32"], 0)
        assert of is not None
        a, weights = (
            torch.ones(*size, device="cuda", dtype=torch.bfloat16) for size in ((3, 72), (5, 34, 72))
        )
        for ends in ([0, 1, 1, 3, 3], [1, 1, 1, 2, 2], [-5, 40, 2, 2**31 - 1, 7]):
            out = torch.zeros(3, 34 // (1 + (kind == "gated")), device="cuda", dtype=torch.bfloat16)
            given = torch.tensor(ends, dtype=torch.int32, device="cuda"), weights[:, :, 0].contiguous()
            of(a, weights, out, *given)(a, weights, *given, out)
    print("around", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], planted="planted" in sys.argv[2:], once="once" in sys.argv[2:])
