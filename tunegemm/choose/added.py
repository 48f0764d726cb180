"""Residuals that torch's library adds itself, where none of our kernels is expected to do better.

torch computes ``x @ w.t() + residual`` by two kernels, and writes and reads the product between them.
cublasLtMatmul reads its C elsewhere than it writes D, which torch has no call for: the algorithm that torch
launches for the product alone (`cublaslt.choice`) adds the residual to its sums, and one kernel is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunegemm.choose.fitted import Allows, Outlook, Predicted, anything
from tunegemm.choose.neighbours import library_us
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.generate.cublaslt import FAMILY
from tunegemm.generate.cublaslt.choice import as_torch_chooses
from tunegemm.model.terms import elementwise_us
from tunegemm.store.record import Record


def by_the_library(
    problem: Problem, device: Device, product: Sequence[Record], allows: Allows = anything
) -> Outlook:
    """The library's algorithm for a product with a residual, as its C.

    product: what serves the product alone, behind which torch would add the residual.
    """
    candidate = as_torch_chooses(problem, device.index) if device.is_real else None
    if candidate is None:
        return Outlook(refusal="the library names no algorithm that adds its residual")
    if (reason := allows(problem, candidate)) or not (verdict := FAMILY.check(problem, candidate, device)):
        return Outlook(refusal=f"the library's sum with its residual: {reason or verdict}")
    modelled = replace(device, spec="model")
    alone_us = library_us(replace(problem, epilogue=""), modelled)
    matrix_bytes = problem.m * problem.n * DTYPE_BYTES[problem.out_dtype]
    after_us = elementwise_us(3 * matrix_bytes, modelled)
    saved_us = elementwise_us(2 * matrix_bytes, modelled)
    faster = max((record.ratio for record in product), default=1.0)
    torchs_us = alone_us + after_us
    if alone_us / faster + after_us < torchs_us - saved_us:
        return Outlook(refusal="a faster product leaves the library's sum with its residual behind")
    ratio = torchs_us / (torchs_us - saved_us)
    record = Record(problem, candidate, device.fingerprint, FAMILY.label(candidate), ratio=ratio)
    basis = "torch's own algorithm, which also adds the residual: one kernel fewer"
    return Outlook((Predicted(record, record.label, ratio, 1.0, basis),))
