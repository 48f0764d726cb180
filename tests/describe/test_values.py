"""Every fact that a problem, a device and clusters compute of themselves, as it was."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from tests.support.pinned import assert_pinned
from tunegemm.describe.architectures import PARTS
from tunegemm.describe.clusters import groups, places_of, usual_neighbours
from tunegemm.describe.device import even_cut, find_device
from tunegemm.describe.problem import Problem, alignment_of, contiguous_mode, overlaps_itself
from tunegemm.errors import ProblemError

PROBLEMS = [
    Problem.parse("512x6144x4096"),
    Problem.parse("1x4096x4096"),
    Problem.parse("100x3000x5001x3", layout="nt"),
    Problem.parse("16x8192x1024", dtype="fp16", out_dtype="fp32", layout="tt"),
    Problem.parse("4096x4096x2048", epilogue="bias_n+gelu+residual"),
    Problem.parse("64x512x128", epilogue="alpha+beta_c", layout="nn"),
    Problem.parse("256x512x1024", dtype="fp8_e4m3", out_dtype="bf16", epilogue="scale_rowwise+bias_n"),
    Problem.parse("256x512x1024", dtype="fp8_e5m2_e4m3", epilogue="scale_tensor", accumulation="two_level"),
    Problem.parse("64x1024x512", epilogue="swiglu"),
    Problem.parse("2048x4096x2048", groups=16),
    Problem.parse("64x64x64", dtype="tf32", alignment=8),
    Problem.parse("128x128x256", dtype="int8"),
]


def of_problems() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for problem in PROBLEMS:
        facts = [
            problem.shape, problem.dtypes, problem.layout, problem.torch_call, problem.our_call, problem.gate,
            str(problem.as_modelled), problem.out_n, problem.packed_alignment, problem.relative_rate,
            problem.flops, problem.bytes, problem.memory_bytes, problem.arithmetic_intensity,
            [[one.name, list(problem.operand_shape(one))] for one in problem.fused.operands],
        ]  # fmt: skip
        try:
            facts.append([str(one) for one in problem.backward()])
        except ProblemError as error:
            facts.append(str(error))
        found[str(problem)] = facts
    return found


def of_devices() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in PARTS:
        device = find_device(f"model:{name}")
        less = device.with_sm_budget(max(1, device.sm_count - 3))
        found[name] = [
            device.name, device.flops_per_cycle, device.index, device.is_real, device.is_known_part,
            [device.resident_clusters(size) for size in (1, 2, 3, 4, 8)], less.sm_count, less.peak_tflops,
            [less.resident_clusters(size) for size in (1, 2, 4)],
            [device.lacks_memory(Problem.parse(shape)) for shape in ("8x8x8", "150000x150000x150000")],
            [[device.peak_tflops_of(one), device.roofline_us(one)] for one in PROBLEMS],
        ]  # fmt: skip
    found["even cuts"] = [even_cut(sms, size) for sms in (1, 78, 114, 132, 144) for size in (1, 2, 4, 8)]
    return found


def of_clusters() -> dict[str, Any]:
    chance, found = random.Random(0), {}
    for count in (1, 2, 9, 66):
        gpcs = [chance.randrange(8) for _ in range(count)]
        found[f"{count} clusters"] = [list(places_of(gpcs)), usual_neighbours(gpcs)]
    pairs = [[0, 1], [2, 3], [4, 5], [1, 2], [6, 7], [7, 4], [9, 8]]
    found["groups"] = sorted(map(list, groups(pairs).items()))
    return found


def of_tensors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shape, strides in itertools.product(
        ((4, 6), (1, 6), (4, 1), (1, 1), (3, 4, 6)), ((6, 1), (8, 1), (1, 4), (1, 1), (0, 1), (12, 2), (3, 1))
    ):
        steps = strides if len(shape) == 2 else (24, *strides)
        tensor = torch.empty(512, dtype=torch.bfloat16).as_strided(shape, steps)
        modes = []
        for prefer in ("k", "m"):
            try:
                modes.append(contiguous_mode(tensor, row_mode="m", column_mode="k", prefer=prefer))
            except ProblemError as error:
                modes.append(str(error))
        aligned = [
            alignment_of(tensor.as_strided(shape, steps, offset), tensor, a_major, b_major)
            for offset in (0, 4) for a_major in ("k", "m") for b_major in ("k", "n")
        ]  # fmt: skip
        found[f"{shape} {steps}"] = [overlaps_itself(shape, steps), modes, aligned]
    return found


def values() -> dict[str, Any]:
    return of_problems() | of_devices() | of_clusters() | of_tensors()


def test_facts_are_as_they_were() -> None:
    assert_pinned("tests.describe.test_values", values())
