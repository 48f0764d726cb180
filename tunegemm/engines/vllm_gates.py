"""vLLM: gate and up, and silu's gate of them, by one kernel. Written for 0.26 to 0.33.

vLLM has gate's rows and up's in one weight, multiplies by both at once, and takes the gate of the halves in a
kernel of its own. In the graph that its compiler gets, the pass of `tunegemm.layers` puts one operator in
their place. For each number of rows it is one kernel, or the plain product and then vLLM's kernel.

What has adapters, is quantised or has a bias is another graph, and stays as it is; so are products under
``VLLM_BATCH_INVARIANT``, and models that are not compiled.
"""

from __future__ import annotations

from functools import cache

import torch

from tunegemm.dispatch import api, extension
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.dispatch.guards import deterministic
from tunegemm.engines.common import plain
from tunegemm.groups import grouped
from tunegemm.groups.numbers import multiples
from tunegemm.groups.routing import SILU, routing
from tunegemm.model.grouped import choose
from tunegemm.torch.lowering import lower_to_function

#: In what vLLM's compile cache goes by, beside the records: its graphs have the operator.
FACT = "gates"

_PLAIN = form_of(MATMUL, "")
_GATE = "swiglu"

#: Where the kernel of both is taken, which is that of groups with all rows in one group: numbers of rows
#: from and to, and of rows of weights, gate's and up's together. Two measurements of 2026-11-27 agree there.
#:
#: As products alone, on an H100 and an H200, it was faster than torch's product, or two, and steps: also at
#: 1 to 32 rows, and at 129 to 511 with 14336 to 28672 rows of weights. At 128 rows it took 1.01 to 1.17
#: times as long with 7168 rows of weights, and with 51200 as long as two products.
#:
#: In vLLM, Llama-3-8B on an H200 (`other_rows` of benchmarks/results/h200/vllm.json): with it decode had
#: 1.084 times vLLM's speed at 64 rows and prefill, of 512 and 8192, 1.017 to 1.032; without it 1.067 and
#: 0.996 to 1.002. But at 1, 16 and 256 rows it had 1.045, 1.058 and 1.002, beside 1.079, 1.065 and 1.022.
#: Where between these the ends are is a guess.
SERVED = (
    (33, 64, 7168, 51200),
    (65, 128, 14336, 28672),
    (512, 1023, 14336, 51200),
    (1024, 8192, 7168, 51200),
)
_MOST_ROWS = SERVED[-1][1]

#: Rows and columns of the weights that were multiplied by.
met: dict[torch.Size, None] = {}
#: By device and number of rows where one group ends.
_ends: dict[tuple[torch.device, int], torch.Tensor] = {}

_library = torch.library.Library("tunegemm", "FRAGMENT")
_library.define("engine_gated(Tensor x, Tensor weight) -> Tensor")


def _gated(x: torch.Tensor, weight: torch.Tensor, site: str = "") -> torch.Tensor:
    """``silu(gate) * up`` of the halves of ``x @ weight.T``. site: as for `Dispatcher.compiled`, but rows."""
    weight, rows, result = plain(weight), x.size(0), None
    met[weight.shape] = None
    if _is_served(rows, weight.size(0)) and not deterministic() and not extension.policy().is_batch_invariant:
        result = _by_one_kernel(x, weight)
    if result is None:
        both = x.new_empty((rows, weight.size(0)))
        place = (site, rows) if site else ""
        api.dispatcher.compiled(place, _PLAIN, x, weight.t(), (), (), both)
        result = _gate_of(both)
    return result


@cache
def _is_served(rows: int, columns: int) -> bool:
    return any(least <= rows <= most and few <= columns <= many for least, most, few, many in SERVED)


def _by_one_kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """None where there is no kernel, or none yet."""
    place = x.device, x.size(0)
    ends = _ends.get(place)
    if ends is None:
        numbers = multiples(x.device, torch.int32, 1, _MOST_ROWS + 1)
        if numbers is None:
            return None
        ends = _ends[place] = numbers[x.size(0) : x.size(0) + 1]
    return grouped.groups.below_autograd(x, weight[None].mT, ends, None, _GATE)


def _gate_of(both: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a product, by a kernel of many blocks a row; by vLLM's until that is loaded, and
    on a CPU by torch. (vLLM's has one block a row: with it decode of one sequence was 1.044 of vLLM's speed,
    with Inductor's code of the gate 1.079.)
    """
    columns = both.size(1) // 2
    if not both.is_cuda:
        return torch.nn.functional.silu(both[:, :columns]) * both[:, columns:]
    result = routing.gate(both, SILU)
    if result is None:
        result = both.new_empty((both.size(0), columns))
        torch.ops._C.silu_and_mul(result, both)
    return result


_library.impl("engine_gated", _gated, "CompositeExplicitAutograd")
torch.library.register_fake(
    "tunegemm::engine_gated",
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
    lib=_library,
)


def said() -> str:
    """At which numbers of rows gates are made with their product, of the weights that were multiplied by."""
    found = []
    for shape in met:
        where = ", ".join(f"{least} to {most}" for least, most in ranges(*shape))
        found.append(f"{'x'.join(map(str, shape))} at {where} rows")
    return f"; with silu's gate bf16 {', '.join(found)}" if found else ""


def lower() -> None:
    """See `engines.common.lower`."""
    lower_to_function(
        torch.ops.tunegemm.engine_gated.default, _gated, "tunegemm_engine_gated",
        lambda x, weight: [x.get_size()[0], weight.get_size()[0] // 2],
    )  # fmt: skip


def ranges(columns: int, k: int) -> list[tuple[int, int]]:
    """From and to how many rows the kernel of both may serve the product with a weight (columns, k)."""
    found: list[tuple[int, int]] = []
    for first, last, few, many in SERVED:
        if columns % 16 or not few <= columns <= many or choose(1, columns, k, last, gate=_GATE) is None:
            continue
        if found and first <= found[-1][1] + 1:
            first = found.pop()[0]
        found.append((first, last))
    return found
