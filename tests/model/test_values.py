"""Every term of the model and every choice that goes by it, as they were fitted."""

from __future__ import annotations

import random
from dataclasses import astuple
from typing import Any

import pytest

from tests.support.pinned import FOLDER, assert_pinned
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate import families
from tunegemm.model import grouped, joined
from tunegemm.model.rank import l2_hint, predictions, rank, rank_kernels, steady_ratios
from tunegemm.model.shortlist import choices, covers
from tunegemm.testing.suite import drawn, launches

DEVICES = ("h200", "h100-sxm", "a100-sxm-80gb", "b200")
PROBLEMS = [
    Problem.parse("8x4096x4096"),
    Problem.parse("16x8192x1024", dtype="fp16", out_dtype="fp32"),
    Problem.parse("100x3000x5000x3"),
    Problem.parse("512x768x8192", layout="nt"),
    Problem.parse("4096x4096x4096", dtype="fp8_e4m3", out_dtype="bf16", accumulation="two_level"),
    Problem.parse("8192x8192x8192"),
    Problem.parse("4096x4096x2048", epilogue="bias_n+gelu+residual"),
    Problem.parse("2048x4096x2048", groups=16),
]
FEW = [
    Problem.parse(f"{m}x{n}x{k}", dtype=dtype)
    for m, n, k, dtype in (
        (1, 4096, 4096, "bf16"), (8, 512, 7168, "bf16"), (16, 14336, 4096, "fp16"), (17, 4096, 14336, "bf16"),
        (48, 3584, 3584, "bf16"), (64, 28672, 8192, "bf16"), (128, 6144, 4096, "bf16"),
    )
]  # fmt: skip


def feasible(family: str, problem: Problem, device: Device, count: int) -> list[Candidate]:
    """Launches by chance that the rules accept."""
    chance, found, check = random.Random(f"{family} {problem}"), [], families.get(family).check
    for kernel in drawn(family, 600):
        if check(problem, kernel, device):
            allowed = [one for one in launches(family, kernel) if check(problem, one, device)]
            found += [chance.choice(allowed)] if allowed else []
            if len(found) == count:
                break
    return found


def terms(*devices: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in devices:
        device = find_device(f"model:{name}")
        for family in families.SHIPPED:
            if not families.get(family).compiled or families.refusal_here(family, device):
                continue
            for problem in PROBLEMS:
                some = feasible(family, problem, device, 4)
                for number, one in enumerate(predictions(problem, some, device)):
                    found[f"{name} {family} {problem} {number}"] = list(astuple(one)[1:])
    return found


def orders(*devices: str) -> dict[str, Any]:
    """Labels of kernels as they are ranked, and launches that the model gives them."""
    found: dict[str, Any] = {}
    for name in devices:
        device = find_device(f"model:{name}")
        for problem in PROBLEMS[:7]:
            for family in ("cute_sm90", "triton_tma"):
                label, space = families.get(family).label, families.load_space(family)
                some = feasible(family, problem, device, 12)
                place = f"{name} {family} {problem}"
                found[f"{place} rank"] = [label(one.candidate) for one in rank(problem, some, device)]
                kernels = [one.kernel for one in some]
                ranked = rank_kernels(problem, kernels, space.launch_values, device)
                found[f"{place} kernels"] = [label(one.candidate) for one in ranked]
                found[f"{place} hints"] = [l2_hint(problem, one) for one in kernels[:3]]
                found[f"{place} steady"] = list(
                    steady_ratios(problem, dict.fromkeys(some, 1.1), device).values()
                )
    return found


def listed(*devices: str) -> dict[str, Any]:
    """What is chosen for few rows, for groups and for several weights, by tables of a day."""
    of_groups, of_several = FOLDER / "grouped.toml", FOLDER / "joined.toml"
    found: dict[str, Any] = {}
    for name in devices:
        device = find_device(f"model:{name}")
        gpu = device.name
        for problem in FEW:
            if covers(problem):
                some = choices(problem, device)
                found[f"{name} {problem} few"] = [len(some), round(float(some.terms.total_us.sum()), 3)]
        for rows in (1, 8, 64, 208, 256, 512, 4096, 16384):
            for groups, n, k in ((8, 14336, 4096), (16, 16384, 5120), (32, 4096, 7168), (128, 1536, 2048)):
                key = f"{name} {groups}x{n}x{k} {rows} groups"
                chosen = [
                    grouped.choose(groups, n, k, rows, path=of_groups, gpu=gpu, **words)  # type: ignore[arg-type]
                    for words in (
                        {},
                        {"dtype": "fp8_e4m3"},
                        {"gate": "swiglu"},
                        {"major": "n"},
                        {"ordered": True},
                    )
                ]
                found[key] = [one and [one.label, *astuple(one)[1:]] for one in chosen]
                along = grouped.choose_along_k(groups, n, k, rows, of_groups, gpu=gpu)
                found[f"{key} along k"] = along and [str(along.config), along.swizzle_size]
        for rows in (1, 16, 33, 63, 64, 65, 129, 1000, 4096):
            for ns, gate in (((4096, 1024, 1024), ""), ((512, 512), ""), ((14336, 14336), "swiglu")):
                several = joined.candidates(gate=gate, path=of_several)
                found[f"{name} {rows} {ns} {gate} joined"] = [
                    float(one.estimate(rows, ns[:1] if gate else ns, 4096, gpu)) for one in several
                ]
                best = joined.choose(rows, ns, 4096, gate=gate, gpu=gpu, path=of_several)
                found[f"{name} {rows} {ns} {gate} best"] = best and best.name
    return found


def values() -> dict[str, Any]:
    return terms(*DEVICES) | orders(*DEVICES[:2]) | listed(*DEVICES[:2])


@pytest.mark.parametrize("name", DEVICES)
def test_it_says_what_it_said(name: str) -> None:
    chosen = orders(name) | listed(name) if name in DEVICES[:2] else {}
    assert_pinned("tests.model.test_values", terms(name) | chosen, of=f"{name} ")
