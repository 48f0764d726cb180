"""ATen's operators that multiply matrices, and what torch's library computes along with each product.

One table for what serves, counts or replaces them, and for what a kernel has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunegemm.describe.workload.products import OWN_ACTIVATION

_ADDS = (("alpha",), ("bias_n",), ("alpha", "bias_n"), ("beta_c",), ("alpha", "beta_c"))
SCALES = (
    ("scale_tensor",), ("scale_rowwise",), ("scale_tensor", "bias_n"), ("scale_rowwise", "bias_n"),
)  # fmt: skip


_IN_PLACE = "in place, as tunegemm.enable serves none"


@dataclass(frozen=True)
class Operator:
    """An operator of ATen that multiplies two matrices, or two batches of them."""

    first: int = 0
    """Where the product's first operand stands among the arguments; the second follows it."""
    absorbs: tuple[tuple[str, ...], ...] = ()
    """The steps that it may compute along with the product."""
    refusal: str = ""
    """Why `tunegemm.enable` does not serve it, so that torch computes it; empty where it is served.
    `tunegemm.record` records it either way."""

    @property
    def served(self) -> bool:
        """Whether `tunegemm.enable` serves it."""
        return not self.refusal


OPERATORS = {
    "mm": Operator(),
    "bmm": Operator(),
    "addmm": Operator(1, _ADDS),  # `linear` with a bias arrives here, too
    "baddbmm": Operator(1, _ADDS),
    "_scaled_mm": Operator(0, SCALES),
    "_scaled_mm_v2": Operator(0, SCALES),  # torch.nn.functional.scaled_mm; torch has it from 2.10 on
    "_int_mm": Operator(),
    "addmm_": Operator(1, _ADDS, _IN_PLACE),
    "baddbmm_": Operator(1, _ADDS, _IN_PLACE),
    "_addmm_activation": Operator(1, _ADDS, OWN_ACTIVATION),
}

_ABSORBED = frozenset(steps for operator in OPERATORS.values() for steps in operator.absorbs)


def absorbed(steps: Sequence[str]) -> tuple[str, ...]:
    """The leading steps of an epilogue that one call of the library takes; those of `amax` aside."""
    for count in (2, 1):
        if (leading := tuple(steps[:count])) in _ABSORBED:
            return leading
    return ()
