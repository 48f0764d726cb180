"""Every family's kernels on the GPU, against fp32, on ragged, strided, batched and tiny shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import (
    test_cute_sm80,
    test_cute_sm90,
    test_gluon_wgmma,
    test_skinny,
    test_triton,
    test_triton_tma,
)
from tests.support.kernels import Kernels, selected
from tests.support.numerics import (
    TOLERANCE,
    Examples,
    check_bits,
    check_product,
    check_refusals,
    check_views,
    poisoned,
    relative_error,
)
from tests.support.sampled import covering
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.generate import families

pytestmark = pytest.mark.gpu

MODULES = (
    test_cute_sm80, test_cute_sm90, test_gluon_wgmma, test_triton, test_triton_tma, test_skinny
)  # fmt: skip
EXAMPLES = [module.EXAMPLES for module in MODULES]
# m, n, k, batch and the padding of each row, in elements
SHAPES = [
    (512, 512, 512, 1, 0),
    (1000, 1032, 520, 1, 0),
    (8, 8, 8, 1, 0),
    (72, 264, 1096, 1, 8),
    (304, 520, 136, 3, 0),
    (2048, 2112, 1000, 1, 16),
]
KINDS = [
    ("tn", "bf16", "bf16"), ("tt", "bf16", "bf16"), ("nn", "fp16", "fp16"), ("nt", "bf16", "fp32"),
    ("tn", "fp16", "fp32"), ("tt", "fp16", "bf16"),
]  # fmt: skip


def square(kind: tuple[str, str, str]) -> Problem:
    layout, in_dtype, out_dtype = kind
    return Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout)


SQUARE = square(KINDS[0])


def label(examples: Examples, kernel: int) -> str:
    return f"{examples.family}-{families.get(examples.family).label(examples.kernel(kernel))}"


every_kernel = pytest.mark.parametrize(
    ("examples", "kernel"),
    [
        pytest.param(one, kernel, id=label(one, kernel))
        for one in EXAMPLES
        for kernel in range(len(one.kernels))
    ],
)
every_family = pytest.mark.parametrize("examples", EXAMPLES, ids=lambda examples: examples.family)


def runs(device: Device, problem: Problem, candidate: Candidate) -> bool:
    """Whether it can be launched: where a rule objects to its worth alone, it is right all the same."""
    return families.get(candidate.family).check(problem, candidate, device).runs


def chosen(
    device: Device, examples: Examples, problem: Problem, kernel: int, number: int
) -> Candidate | None:
    """The kernel with its launch of that number, or one that it has; with fewer stages, where an fp32 output
    leaves room for no more. None where no kernel of the family has the problem.
    """
    for fewer in ({}, {"stages": 2}):
        for shift in range(len(examples.launches)):
            candidate = examples.launch(kernel, number + shift, **fewer)
            if runs(device, problem, candidate):
                return candidate
    return None


def on_shapes(
    device: Device, examples: Examples, kernel: int, kind: tuple[str, str, str]
) -> Iterator[tuple[Problem, Candidate, int]]:
    """The problems of a kind that the kernel has, with what is launched and the padding of each row."""
    layout, in_dtype, out_dtype = kind
    for number, (m, n, k, batch, pad) in enumerate(SHAPES):
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        if (candidate := chosen(device, examples, problem, kernel, number)) is not None:
            yield problem, candidate, pad


#: The tests' kernels of a kind: those that none has for it, and of the others enough that each value of a
#: parameter has each layout and dtype. All have the first kind, which other tests launch, too.
Case = tuple[int, int, tuple[str, str, str]]


def parts_of(case: Case) -> Iterator[tuple[str, str, Value]]:
    family, kernel, (layout, in_dtype, out_dtype) = case
    params = EXAMPLES[family].kernel(kernel).params
    for name, value in {**params, "layout": layout, "in_dtype": in_dtype, "out_dtype": out_dtype}.items():
        yield EXAMPLES[family].family, name, value


def cases() -> list[Case]:
    h200 = find_device("model:h200")
    every = [
        (family, kernel, kind)
        for kind in KINDS
        for family, examples in enumerate(EXAMPLES)
        for kernel in range(len(examples.kernels))
    ]
    there = [case for case in every if any(on_shapes(h200, EXAMPLES[case[0]], *case[1:]))]
    covered = covering(there, parts_of, given=[case for case in there if case[2] == KINDS[0]])
    return [case for case in every if case in covered or case not in there]


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    wanted = [(*case, KINDS[0]) for case in selected(request, "examples", "kernel")]
    wanted += selected(request, "examples", "kernel", "kind")
    kernels.begin_all(
        (problem, candidate) for case in wanted for problem, candidate, _ in on_shapes(kernels.device, *case)
    )
    return kernels


@pytest.mark.parametrize(
    ("examples", "kernel", "kind"),
    [
        pytest.param(EXAMPLES[one], kernel, kind, id=f"{'-'.join(kind)}-{label(EXAMPLES[one], kernel)}")
        for one, kernel, kind in cases()
    ],
)
def test_right_on_every_shape(
    kernels: Kernels, examples: Examples, kernel: int, kind: tuple[str, str, str]
) -> None:
    launched = 0
    for problem, candidate, pad in on_shapes(kernels.device, examples, kernel, kind):
        check_product(kernels.load(problem, candidate), problem, str(candidate), pad=pad, runs=2)
        launched += 1
    if launched < len(SHAPES) - 1:  # a kernel may be without a batch
        verdict = families.get(examples.family).check(square(kind), examples.kernel(kernel), kernels.device)
        assert launched == 0 and verdict.rule in examples.refusals, (launched, verdict)


@every_kernel
def test_back_to_back_runs_agree_bitwise(kernels: Kernels, examples: Examples, kernel: int) -> None:
    problem = Problem.parse("2048x2112x1000")
    a = torch.randn(2048, 1000, device="cuda").bfloat16()
    b = torch.randn(2112, 1000, device="cuda").bfloat16().t()
    candidates = [examples.launch(kernel, number) for number in range(len(examples.launches))]
    launched = [candidate for candidate in candidates if runs(kernels.device, problem, candidate)]
    assert launched
    for candidate in launched:
        check_bits(kernels.load(problem, candidate), a, b, str(candidate))


@every_family
def test_refuses_what_it_cannot_read(kernels: Kernels, examples: Examples) -> None:
    check_refusals(kernels.load(SQUARE, examples.launch(0)))


@every_family
def test_views_with_an_aligned_offset_are_right(kernels: Kernels, examples: Examples) -> None:
    for kernel in examples.of_each_schedule:
        check_views(kernels.load(SQUARE, examples.launch(kernel)))


@every_family
def test_a_captured_launch_replays(kernels: Kernels, examples: Examples) -> None:
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    for kernel in examples.of_each_schedule:
        launch, out = kernels.load(SQUARE, examples.launch(kernel)), poisoned(512, 512)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(a, b.t(), out)
        a.copy_(torch.randn(512, 512, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, a, b.t()) < TOLERANCE["bf16"], examples.launch(kernel)
