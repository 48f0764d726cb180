"""What the GPU tests of all kernel families share: operands on the GPU, and how exact a result must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.launching import Launcher
from tunegemm.measure import operands as data

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# 3/4 of the unit in the last place for 16-bit outputs; fp32 outputs show the tensor cores' accumulation.
TOLERANCE = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-4}


def operand(
    row_major: bool, rows: int, columns: int, batch: int, pad: int, dtype: str, place: str = "cuda"
) -> torch.Tensor:
    """Random (batch, rows, columns); lines of memory are padded by `pad` elements."""
    outer, inner = (rows, columns) if row_major else (columns, rows)
    values = torch.randn(batch, outer, inner + pad, device=place).to(DTYPES[dtype])[:, :, :inner]
    return values if row_major else values.mT


def poisoned(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    """An output of NaN, so that what a kernel does not write shows."""
    return torch.full(shape, torch.nan, device="cuda", dtype=DTYPES[dtype])


def untouched(whole: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether all of a poisoned tensor is as it was but for its part `out`."""
    return int(whole.isnan().sum()) - int(out.isnan().sum()) == whole.numel() - out.numel()


#: What lies around an output of `room_of`: a number of every dtype.
POISON = 7.0


def room_of(problem: Problem, gap: int, place: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and an output in it whose lines begin at multiples of 16 bytes, as near to each other
    as they can and `gap` times 16 bytes further; the last one ends where the memory does.
    """
    rows = problem.out_major == "n"
    lines, extent = (problem.m, problem.out_n) if rows else (problem.out_n, problem.m)
    dtype = data.torch_dtype(problem.out_dtype)
    unit = 16 // dtype.itemsize
    pitch = -(-extent // unit) * unit + gap * unit
    memory = torch.full((problem.batch * lines * pitch - (pitch - extent),), POISON, device=place).to(dtype)
    shape, strides = (problem.batch, lines, extent), (lines * pitch, pitch, 1)
    one = problem.batch == 1
    out = memory.as_strided(shape[one:], strides[one:])
    return memory, out if rows else out.mT


def kept(memory: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the memory of a `room_of` is as it was but for the output, which is overwritten by this."""
    out.fill_(POISON)
    return bool((memory.float() == POISON).all())


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||, in fp32."""
    return ((out.float() - expected.float()).norm() / expected.float().norm()).item()


def relative_error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """||out - fp32 reference|| / ||fp32 reference||."""
    return difference(out, torch.matmul(a.float(), b.float()))


def check_product(launch: Launcher, problem: Problem, label: str, *, pad: int = 0, runs: int = 1) -> None:
    """Random operands whose rows are padded, into a poisoned output within a larger poisoned tensor; each
    further run finds what the last one left of counters and arguments.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    a = operand(problem.a_major == "k", m, k, batch, pad, problem.in_dtype)
    b = operand(problem.b_major == "n", k, n, batch, pad, problem.in_dtype)
    whole = poisoned(batch, m + 3, n + pad, dtype=problem.out_dtype)
    out = whole[:, :m, :n]
    if batch == 1:
        a, b, out = a[0], b[0], out[0]
    for _ in range(runs):
        out.fill_(torch.nan)
        launch(a, b, out)
        torch.cuda.synchronize()
        error = relative_error(out, a, b)
        assert error < TOLERANCE[problem.out_dtype], (problem, label, error)
    assert untouched(whole, out), (problem, label, "wrote outside its output")


def check_bits(launch: Launcher, a: torch.Tensor, b: torch.Tensor, label: str, *, runs: int = 20) -> None:
    """A race would move the result; the order of additions is fixed, so equal inputs give equal bits."""
    outs = [poisoned(a.shape[0], b.shape[1]) for _ in range(runs)]
    for out in outs:
        launch(a, b, out)
    assert relative_error(outs[0], a, b) < TOLERANCE["bf16"], label
    assert all(torch.equal(outs[0], out) for out in outs[1:]), label


def check_refusals(launch: Launcher) -> None:
    """Of a kernel for a product of 512x512x512 that reads 16 bytes at a time."""
    a, out = (torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shifted = torch.zeros(512 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(512, 512)
    with pytest.raises(ValueError, match="multiple of the 16 B"):
        launch(a, shifted.t(), out)
    wide = torch.zeros(512, 516, device="cuda", dtype=torch.bfloat16)[:, :512]
    with pytest.raises(ValueError, match="leading dimension 516"):
        launch(wide, a.t(), out)


def check_views(launch: Launcher) -> None:
    """Operands and an output of 512x512 within larger ones, for a kernel as of `check_refusals`."""
    a = torch.randn(1024, 1024, device="cuda").bfloat16()[256:768, 64:576]
    b = torch.randn(700, 1024, device="cuda").bfloat16()[100:612, 512:].t()
    out = poisoned(600, 1024)[8:520, 8:520]
    launch(a, b, out)
    assert relative_error(out, a, b) < TOLERANCE["bf16"]


@dataclass(frozen=True)
class Case:
    """A problem's operands, as candidates are measured with, and what a right kernel makes of them."""

    problem: Problem
    operands: data.Operands
    wanted: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, seed: int = 0) -> Case:
        operands = data.make_operands(problem, torch.device("cuda"), seed)
        return cls(problem, operands, data.expected(problem, operands))

    def checked(self) -> data.Check:
        """What was written into the output last."""
        torch.cuda.synchronize()
        return data.check(self.operands, self.wanted)

    def objection(self) -> str | None:
        """What is wrong with it; None for nothing."""
        return self.checked().objection(data.tolerance(self.problem))

    def check(self, launch: Launcher, label: str = "", *, runs: int = 1) -> None:
        """Each further run finds what the last one left."""
        for _ in range(runs):
            data.restore(self.operands)
            launch(*self.operands.arguments)
            objection = self.objection()
            assert objection is None, (self.problem, label, objection)


@dataclass(frozen=True)
class Examples:
    """Kernels and launches of a family, all of which `tests/gpu/test_conformance.py` runs."""

    family: str
    names: tuple[str, ...]
    """Of the compile-time parameters, in the order of `kernels`."""
    kernels: list[tuple[Any, ...]]
    launch_names: tuple[str, ...]
    launches: list[tuple[Any, ...]]
    """The first is for every kernel."""
    of_each_schedule: tuple[int, ...] = (0,)
    """Places of kernels that differ most."""
    refusals: frozenset[str] = frozenset()
    """Rules by which a kernel may be without some layout or dtype."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Compile-time parameters that are the same for all."""

    def kernel(self, kernel: int, **changes: Any) -> Candidate:
        values = dict(zip(self.names, self.kernels[kernel], strict=True))
        return Candidate.make(self.family, {**self.fixed, **values, **changes})

    def launch(self, kernel: int, number: int = 0, **changes: Any) -> Candidate:
        """The kernel with the launch of that number, which wraps around."""
        values = self.launches[number % len(self.launches)]
        return self.kernel(kernel, **changes).with_launch(**dict(zip(self.launch_names, values, strict=True)))
