"""What tests of fused products share: their operands, records, and a kernel of addresses on the CPU."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.serving import BF16, Row, at, dispatcher_of, operands, serve_with
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.describe.epilogue import Epilogue, Matrix, Number, PerColumn, maximum, tanh
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Prepared
from tunegemm.generate.launching import AddressLaunch, AddressLauncher, operand_reader, words_reader

FP8 = torch.float8_e4m3fn


@Epilogue.custom
def bent(acc, shift: PerColumn, skip: Matrix, cap: Number):  # type: ignore[no-untyped-def]
    return cap * tanh((acc + shift) / cap) + maximum(skip, 0.0)


class Recorded(Snapshot):
    """Records of the problems that are given; of all where none are. They are worth it in compiled code."""

    def __init__(self, *problems: Problem) -> None:
        fingerprint = find_device("model:h200").fingerprint
        super().__init__([Row(problem, fingerprint, ratio=9.0) for problem in problems])
        self.asked: list[Problem] = []
        self.digest = os.urandom(8).hex()  # what other runs left on torch's disk is not to be taken

    def find(self, problem, fingerprint):
        self.asked.append(problem)
        return super().find(problem, fingerprint) if self._records else Row(problem, fingerprint, ratio=9.0)


def serve_recorded(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, *problems: Problem, **parts: Any
) -> Recorded:
    """The package serves CPU tensors by this kernel, from records of these problems, or of every one."""
    snapshot = Recorded(*problems)
    usual = {"prepare": lambda record, _: Prepared(kernel.of(record.problem))}
    serve_with(monkeypatch, dispatcher_of(snapshot, **(usual | parts)))
    return snapshot


def close(result: torch.Tensor, expected: torch.Tensor, bound: float = 2e-2) -> None:
    assert result.shape == expected.shape and result.dtype == expected.dtype
    error = (result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    assert error <= bound, float(error)


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def layer(*lead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight, bias and residual of a layer with 64 inputs and 48 outputs."""
    a, b = operands()
    rows = torch.Size(lead or (32,)).numel()
    x = (a[:rows] / 8).view(*(lead or (32,)), 64)
    bias = torch.linspace(-2, 2, 48).to(BF16)
    residual = torch.linspace(-1, 1, rows * 48).to(BF16).view(*x.shape[:-1], 48)
    return x, b.t().contiguous(), bias, residual


class FusedByAddress:
    """A kernel of addresses and words on the CPU, behind the families' own launcher."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.words: list[tuple[int, ...]] = []
        self.launcher = AddressLauncher(operand_reader(problem, 16, 16), self.make, words_reader(problem))

    def make(self, lda: int, ldb: int, ldd: int, *steps: int) -> AddressLaunch:
        m, n, k = self.problem.m, self.problem.n, self.problem.k

        def launch(a: int, b: int, d: int, *words: int) -> None:
            self.words.append(words)
            left, right = at(a, (m, k), (lda, 1)), at(b, (k, n), (1, ldb))
            named, place = {}, 0
            for operand in self.problem.fused.operands:
                if operand.kind == "number":
                    named[operand.name] = struct.unpack("f", struct.pack("I", words[place]))[0]
                elif operand.kind == "matrix":
                    named[operand.name] = at(words[place], (m, n), (words[place + 1], 1))
                else:
                    named[operand.name] = at(words[place], (n,), (1,))
                place += operand.words
            at(d, (m, n), (ldd, 1)).copy_(self.problem.fused.reference(left.float() @ right.float(), named))

        return launch
