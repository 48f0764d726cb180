"""What rules say of kernels that are drawn, and what follows from those that they accept: all its numbers."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.generate import (
    test_cute_sm80,
    test_cute_sm90,
    test_gluon_wgmma,
    test_grouped,
    test_skinny,
    test_triton,
    test_triton_tma,
)
from tests.support.pinned import assert_pinned
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families, tiles
from tunegemm.testing import Examples
from tunegemm.testing.suite import drawn, launches

DEVICES = ("h200", "a100-sxm-80gb", "b200")
EXAMPLES = [
    module.EXAMPLES
    for module in (
        test_cute_sm80, test_cute_sm90, test_gluon_wgmma, test_grouped, test_skinny, test_triton,
        test_triton_tma,
    )
]  # fmt: skip
PROBLEMS = [
    Problem.parse("4096x4096x4096"),
    Problem.parse("8x4096x4096"),
    Problem.parse("16x200x72", dtype="fp16", out_dtype="fp32", layout="tt"),
    Problem.parse("100x3000x5000x3", layout="nt"),
    Problem.parse("4097x4095x1001"),
    Problem.parse("4096x4096x4096", dtype="fp8_e4m3", out_dtype="bf16", accumulation="two_level"),
    Problem.parse("512x768x8192", dtype="int8"),
    Problem.parse("4096x4096x4096", dtype="tf32", alignment=8),
    Problem.parse("4096x4096x2048", epilogue="bias_n+gelu+residual"),
    Problem.parse("64x4096x2048", epilogue="swiglu"),
    Problem.parse("2048x4096x2048", groups=16),
]
#: Of a key what depends on files and compilers.
ELSEWHERE = {"source", "cutlass_dsl", "triton", "object_format"}


def facts(name: str, problem: Problem, launch: Candidate, device: Device) -> Iterator[Any]:
    """What a launch that is accepted is compiled and launched with."""
    family = families.generator(name)
    key = family.kernel_key(problem, launch, device)
    yield family.label(launch)
    yield " ".join(f"{word}={key[word]}" for word in sorted(key) if word not in ELSEWHERE)
    yield family.smem_bytes(problem, launch)
    yield family.reduction_class(problem, launch)
    workspace = family.workspace(problem, launch, device)
    yield workspace and [workspace.partial_bytes, workspace.counter_bytes]
    if name != "grouped":
        yield tiles.tile_count(problem, launch)
        yield tiles.persistent_grid(problem, launch, device)
        yield str(tiles.seen_by_kernel(problem, launch))


def of_family(examples: Examples) -> dict[str, Any]:
    name, chance, found = examples.family, random.Random(examples.family), dict[str, Any]()
    changes = [{}, *(change for _, change in examples.corners), *(one.change for one in examples.rejected)]
    kernels = [*map(examples.candidate, changes), *drawn(name, 30)]
    for part in DEVICES:
        device = find_device(f"model:{part}")
        for problem in PROBLEMS:
            said, reasons = Counter[str](), dict[str, str]()
            accepted: list[list[Any]] = []
            for kernel in kernels:
                for launch in (kernel, chance.choice(launches(name, kernel))):
                    verdict = families.get(name).check(problem, launch, device)
                    said[verdict.rule or "accepted"] += 1
                    reasons.setdefault(verdict.rule, str(verdict))
                    if verdict and launch.launch_params and len(accepted) < 4:
                        accepted.append(list(facts(name, problem, launch, device)))
            place = f"{name} {part} {problem}"
            found[place] = sorted(map(list, said.items()))
            found[f"{place} reasons"] = sorted(reasons.values())
            found[f"{place} facts"] = accepted
    return found


#: Extents at which rules change their minds: of tiles, of a wave, of splits of k, of lines of whole units.
BORDERS = [
    *(Problem(m, n, k) for m, n, k in (
        (1, 64, 64), (8, 256, 256), (16, 4096, 512), (17, 8448, 1024), (64, 2112, 2048), (65, 4096, 65536),
        (128, 128, 8192), (129, 264, 1000), (256, 8448, 4096), (2112, 4224, 512), (4096, 4096, 4096),
    )),
    Problem(64, 1004, 512, out_dtype="fp32"), Problem(128, 512, 2048, 3, a_major="m", b_major="n"),
    Problem(64, 512, 2048, in_dtype="fp16", epilogue="bias_n+swiglu"), Problem(8, 520, 4096, alignment=4),
    Problem(128, 512, 2048, in_dtype="fp8_e4m3", out_dtype="bf16", accumulation="two_level"),
    Problem(128, 512, 2048, in_dtype="int8", out_dtype="int32"), Problem(512, 512, 2048, out_major="m"),
]  # fmt: skip


def of_rules(examples: Examples) -> dict[str, Any]:
    """How many launches each rule refuses by itself, and a hash of all that it says."""
    name, chance = examples.family, random.Random(examples.family)
    kernels = [*map(examples.candidate, [one.change for one in examples.rejected]), *drawn(name, 60)]
    some = [chance.choice(launches(name, kernel)) for kernel in kernels]
    found: dict[str, Any] = {}
    for part in DEVICES[:2]:
        device = find_device(f"model:{part}")
        for rule in families.generator(name).rules:
            said: list[str] = []
            for problem, launch in itertools.product(BORDERS, some):
                try:
                    objection = rule(problem, launch, device)
                except (ArithmeticError, LookupError, ValueError) as error:  # an earlier rule refuses those
                    objection = type(error).__name__
                said += [] if objection is None else [objection]
            text = hashlib.sha256("\n".join(said).encode()).hexdigest()
            found[f"{name} rule {rule.name} {part}"] = [len(said), text[:8]]
    return found


def values() -> dict[str, Any]:
    return {key: value for each in EXAMPLES for key, value in (of_family(each) | of_rules(each)).items()}


@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda each: each.family)
def test_they_are_what_they_were(examples: Examples) -> None:
    found = of_family(examples) | of_rules(examples)
    assert_pinned("tests.generate.test_values", found, of=f"{examples.family} ")
