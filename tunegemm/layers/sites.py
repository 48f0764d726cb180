"""The calls that the pass inserts into a graph. Each decides once per input shape how it is computed.

A site knows what the graph's guards promise: dtypes, devices, the layout of weights, and that no gradient is
needed. It checks the rest: dispatch modes and forward-mode AD, on which Dynamo has no guard, the addresses of
this call, and whether the input is contiguous. A `LaunchCache` keeps its decisions, so another policy, a
`refresh` or new records end them. If no kernel is known, torch's operations run as in the original graph;
each linear layer among them is a site of its own. Equal sites are one object, so equal layers of a model
decide once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from tunegemm.describe.epilogue import GATE_OF
from tunegemm.dispatch import api, extension, guards
from tunegemm.dispatch.autograd import DTYPES
from tunegemm.dispatch.extension import Known, LaunchCache
from tunegemm.dispatch.forms import ACTIVATIONS, ALIGNMENT, BELOW_AUTOGRAD, form_of, shaped
from tunegemm.dispatch.guards import REDUCTIONS, capturing, current_device, dispatch_modes
from tunegemm.dispatch.launchers import Plan
from tunegemm.generate import joined
from tunegemm.generate.takes import NotTaken
from tunegemm.groups.grouped import grouped_mm
from tunegemm.model.joined import JoinedChoice, choose

#: Computes a call of known shapes from its operands; None where this call's addresses forbid it.
Way: TypeAlias = Callable[..., Any]

#: How `Gated` names gate and up that are weights of their own.
TWO_WEIGHTS = "two weights"

_BITS = ALIGNMENT - 1
#: Products of several weights are one launch up to so many rows, and elements of all results. For q, k and v
#: of eleven models this is 1.08 to 1.85 of torch's three products by rows (results/h200/joined.json).
MOST_ROWS, MOST_RESULTS = 2048, 1 << 25
#: Weights whose launches one site keeps: some kB each.
_MOST_BOUND = 1024


class Site:
    """One kind of call."""

    decide: Callable[..., Any]
    """A subclass's: `keep` how calls like this one are computed, if that can be known now. Takes the operands
    and returns the result of this call; None if torch must compute it."""
    by_torch: Callable[..., Any]
    """A subclass's: run torch's operations as in the original graph."""
    layers: Sequence[Site] = ()
    """The sites of linear layers that `by_torch` calls."""
    unfused: Callable[..., Any] | None = None
    """`by_torch` without a look for kernels of these layers, which costs some 4 us each in a model."""

    def __init__(self, label: str, facts: tuple[Any, ...]) -> None:
        """label: the kind, for a report. facts: what calls of this site have in common, apart from their
        rows."""
        self.label, self.facts = label, facts
        self.__name__ = f"tunegemm_{type(self).__name__.lower()}"  # which torch.fx writes into code
        ways = LaunchCache(of_products=True)
        self.find, self.keep = ways.find, ways.keep
        """The `Way` for an input's shape."""
        self._settled: Known | Literal[False] = False
        """The latest decision for torch with which no layer has a kernel either."""

    def __repr__(self) -> str:
        return f"<{self.label} of {', '.join(map(str, self.facts))}>"

    def __call__(self, x: torch.Tensor, *operands: torch.Tensor) -> Any:
        if (known := self.find(x.shape)) is self._settled:
            return self.unfused(x, *operands)  # type: ignore[misc]
        result = None
        if known is None or dispatch_modes() or forward_ad._current_level >= 0:
            result = self.kernel(x, *operands)
        elif (way := known.launch) is not None:
            result = way(x, *operands)
        elif (
            self.unfused is not None
            and x.is_contiguous()
            and all(map(_is_torchs, (known, *(layer.find(x.shape) for layer in self.layers))))
        ):
            self._settled = known
        return self.by_torch(x, *operands) if result is None else result

    def kernel(self, x: torch.Tensor, *operands: torch.Tensor) -> Any:
        """Compute the result by a kernel; None if torch must compute it."""
        if dispatch_modes() or forward_ad._current_level >= 0:
            if not guards.only_checks_operators():
                return None
            # If torch computed this first call, a CUDA graph of the next call would keep torch's products.
            with _disable_current_modes():
                return self.kernel(x, *operands)
        if (known := self.find(x.shape)) is not None:
            return None if known.launch is None else known.launch(x, *operands)
        return self.decide(x, *operands) if x.is_contiguous() and x.numel() else None


def _is_torchs(known: Known | None) -> bool:
    """Whether torch computes such calls until there are new records."""
    return known is not None and known.launch is None and known.again == math.inf


class Linear(Site):
    """A linear layer with optional steps after the product: (x, weight[, bias][, residual])."""

    def __init__(self, activation: str, has_bias: bool, has_residual: bool, facts: tuple[Any, ...]) -> None:
        steps = ["bias_n"] * has_bias + [activation] * bool(activation) + ["residual"] * has_residual
        super().__init__("+".join(["linear", *steps]), facts)
        self._form = form_of(BELOW_AUTOGRAD, "+".join(steps))
        self._has_residual = has_residual
        if activation or has_residual:
            self.layers = (linear(has_bias, facts),)
            self.by_torch, self.unfused = (
                _chained(each, ACTIVATIONS.get(activation), has_residual)
                for each in (*self.layers, functional.linear)
            )
        else:
            self.by_torch, self.unfused = self._with_gaps, functional.linear

    def decide(self, x: torch.Tensor, *operands: Any) -> Any:
        if self._has_residual and not operands[-1].is_contiguous():
            return None
        result = self._by_dispatcher(x, *operands)
        rows, right, seen = _as_matrices(x, *operands)
        recent = api.dispatcher.known(self._form, rows, right, *seen)
        way: Way | None = None
        if result is not None:
            plan = recent.plan if recent is not None else None
            if plan is None or plan.launch_at is None:
                way = self._by_dispatcher
            else:
                way = launched(plan, tuple(result.shape), tuple(result.stride()), self._has_residual)
        if recent is not None or way is not None:
            self.keep(x.shape, way)
        return result

    def _by_dispatcher(self, x: torch.Tensor, weight: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """For kernels that are not launched by addresses alone, and for rows with gaps."""
        if self._has_residual and not tensors[-1].is_contiguous():
            return None
        result = api.dispatcher.fused(self._form, *_as_matrices(x, weight, *tensors))
        return None if result is None else shaped(result, (*x.shape[:-1], weight.shape[0]))

    def _with_gaps(self, x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        is_torchs = x.is_contiguous() or dispatch_modes() or forward_ad._current_level >= 0
        result = None if is_torchs else self._by_dispatcher(x, *operands)
        return functional.linear(x, *operands) if result is None else result


def _chained(
    linear: Callable[..., Any], activate: Callable[..., Any] | None, has_residual: bool
) -> Callable[..., Any]:
    """A layer's steps, with this function as the layer."""
    if not has_residual:
        assert activate is not None
        return lambda x, *operands: activate(linear(x, *operands))
    if activate is None:
        return lambda x, *operands: operands[-1] + linear(x, *operands[:-1])
    return lambda x, *operands: operands[-1] + activate(linear(x, *operands[:-1]))


def _as_matrices(
    x: torch.Tensor, weight: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """The operands of a linear layer as the dispatcher takes them: rows, the weight turned, and the rest."""
    seen = tuple(each if each.ndim == 1 else each.view(-1, each.shape[-1]) for each in tensors)
    return x.reshape(-1, x.shape[-1]), weight.t(), seen


def launched(plan: Plan, shape: tuple[int, ...], strides: tuple[int, ...], has_residual: bool) -> Way:
    """A launch of a plan: a check of addresses and settings, an output, a call."""
    launch, words_of, dtype = plan.launch_at, plan.words, plan.output[2]
    assert launch is not None
    setting = REDUCTIONS[dtype] if plan.reduces else None  # a graph compiled under another shares the site
    before = None if setting is None else setting()
    allocate = extension.allocation()
    device = (plan.device.index or 0) if plan.guarded else -1

    def way(x: torch.Tensor, weight: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor | None:
        a, b = x.data_ptr(), weight.data_ptr()
        if (a | b) & _BITS or not x.is_contiguous() or (device >= 0 and device != current_device()):
            return None
        if setting is not None and setting() != before:
            return None
        words = () if words_of is None else words_of(tensors, ())
        if words is None or (has_residual and not tensors[-1].is_contiguous()):
            return None
        result: torch.Tensor = allocate(shape, strides, dtype)
        try:
            launch(a, b, result.data_ptr(), *words)
        except NotTaken:
            return None
        except (RuntimeError, ValueError):  # the dispatcher reports it at the next decision
            if capturing(x.device):
                raise
            extension.forget()
            return None
        return result

    return way


class Joint(Site):
    """Several weights of one input, in one launch that reads them in place (`tunegemm.generate.joined`):
    products side by side, such as q, k and v; or a gate and its up, from two weights or one that holds both.
    """

    gate = ""
    """A gated step; the weights are then gate and up."""
    parts: Callable[..., tuple[Any, Any]]
    """A subclass's: the weights and biases of a call's operands."""

    def decide(self, x: torch.Tensor, *operands: Any) -> Any:
        if not extension.may_load(x.device):
            return None
        weights, biases = self.parts(*operands)
        ns, k = [weight.shape[0] for weight in weights], x.shape[-1]
        way, waits, choice = None, False, None
        if x.device.type == extension.device_type():
            rows, gpu = x.numel() // k, extension.gpu_of(x.device)
            choice = chosen(rows, ns, k, x.dtype, gpu, gate=self.gate, bias=bool(biases))
        if choice is not None:
            bind, waits = load(choice, x.device)
            way = None if bind is None else self._way(bind, x, ns[:1] if self.gate else ns)
        self.keep(x.shape, way, waits=waits)
        return None if way is None else way(x, *operands)

    def _way(self, bind: Callable[..., Any], x: torch.Tensor, columns: Sequence[int]) -> Way:
        """A call with contiguous x: allocates an output and runs the launch that is bound to these weights.

        bind: makes the launch at addresses of the input and the result, from these and from weights and
        biases that stay in place; raises NotTaken. columns: of each result.
        """
        allocate, device = extension.allocation(), x.device
        shape, k, dtype = x.shape, x.shape[-1], x.dtype
        width = sum(columns)
        out_shape = (*shape[:-1], width)
        strides = x.new_empty(out_shape, device="meta").stride()
        index, is_guarded = device.index, device.type == "cuda" and device.index is not None
        is_split = len(columns) > 1
        known: dict[tuple[int, ...], Callable[[int, int], None]] = {}

        def way(x: torch.Tensor, *operands: Any) -> Any:
            if not x.is_contiguous() or (is_guarded and current_device() != index):
                return None
            key = tuple([each.data_ptr() for each in operands])
            launch = known.get(key)
            result: Any = allocate(out_shape, strides, dtype)
            try:
                if launch is None:
                    weights, biases = self.parts(*operands)
                    launch = bind(x.view(-1, k), weights, result.view(-1, width), biases)
                    if len(known) >= _MOST_BOUND:
                        known.clear()
                    known[key] = launch
                launch(x.data_ptr(), result.data_ptr())
            except NotTaken:
                return None
            except (RuntimeError, ValueError) as error:
                _family.failed(device, error)
                self.keep(shape, None)
                return None
            return result.split(columns, -1) if is_split else result

        return way


_family = extension.Family(joined.FAMILY, "several weights", "torch computes them")


def chosen(
    rows: int, ns: Sequence[int], k: int, dtype: torch.dtype, gpu: str, *, gate: str = "", bias: bool = False
) -> JoinedChoice | None:
    """The kernel of several weights that serves such a product; None if torch computes it."""
    if extension.is_off() or extension.policy().is_batch_invariant:
        return None
    if not gate and (rows > MOST_ROWS or rows * sum(ns) > MOST_RESULTS):
        return None
    if dtype not in DTYPES or k % 8 or any(n % 8 for n in ns):
        return None
    return choose(rows, ns, k, gate=gate, dtype=DTYPES[dtype], bias=bias, gpu=gpu)


def load(choice: JoinedChoice, device: torch.device) -> tuple[Callable[..., Any] | None, bool]:
    """What binds a choice's kernel to operands, None if there is none; and whether it is being compiled."""
    kernel, waits = _family.kernel(choice.config, device)
    if kernel is None:
        return None, waits
    return partial(kernel.bound, device=extension.device_of(device), **choice.words), False


class Gated(Joint):
    """Gate and up: (x, gate, up[, gate's bias, up's bias]), or in one weight (x, weight[, bias])."""

    def __init__(self, activation: str, layout: str, has_bias: bool, facts: tuple[Any, ...]) -> None:
        """layout: two weights; or one weight with the gate first, the up first, or both alternating."""
        place = "" if layout == TWO_WEIGHTS else f", {layout} in one weight"
        super().__init__(f"gate and up with {activation}{place}", facts)
        self.gate, self._activate = GATE_OF[activation], ACTIVATIONS[activation]
        self._layout, self.layers = layout, (linear(has_bias, facts),)
        self.by_torch, self.unfused = self._composed(self.layers[0]), self._composed(functional.linear)

    def _halves(self, whole: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        if self._layout == "alternate":
            return (whole[..., ::2], whole[..., 1::2]) if dim else (whole[::2], whole[1::2])
        return whole.chunk(2, dim) if self._layout == "gate first" else whole.chunk(2, dim)[::-1]

    def parts(self, *operands: Any) -> tuple[Any, Any]:
        if self._layout == TWO_WEIGHTS:
            return operands[:2], operands[2:]
        halves = [self._halves(each, 0) for each in operands]
        return halves[0], halves[1] if len(halves) > 1 else ()

    def _composed(self, linear: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's operations, with this function for the layers."""
        activate, halves = self._activate, self._halves
        if self._layout == TWO_WEIGHTS:
            return lambda x, *operands: activate(linear(x, *operands[::2])) * linear(x, *operands[1::2])

        def of_halves(x: torch.Tensor, *operands: Any) -> torch.Tensor:
            gate, up = halves(linear(x, *operands), -1)
            return activate(gate) * up

        return of_halves


class Several(Joint):
    """Linear layers of one input: (x, *weights, *biases). Returns a tuple of results; a kernel returns views
    of one tensor."""

    def __init__(self, has_bias: bool, columns: tuple[int, ...], facts: tuple[Any, ...]) -> None:
        super().__init__(f"{len(columns)} layers of one input", facts)
        self._columns, (_, k, row_stride, *rest) = columns, facts
        self.layers = [linear(has_bias, (n, k, row_stride, *rest)) for n in columns]

    def parts(self, *operands: Any) -> tuple[Any, Any]:
        count = len(self._columns)
        return operands[:count], operands[count:]

    def by_torch(self, x: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
        count = len(self._columns)  # each layer has its weight, and its bias behind all weights
        return tuple([site(x, *operands[place::count]) for place, site in enumerate(self.layers)])

    def unfused(self, x: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
        count, linear = len(self._columns), functional.linear
        return tuple([linear(x, *operands[place::count]) for place in range(count)])


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of two matrices, or of batches of them."""
    is_watched = dispatch_modes() or forward_ad._current_level >= 0
    result = None if is_watched else api.dispatcher.below_autograd(a, b)
    return torch.matmul(a, b) if result is None else result


def grouped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A product of rows in groups."""
    return grouped_mm(a, b, offs=ends)


# One site for equal arguments: layers that are alike decide once.
chain, gated, several = cache(Linear), cache(Gated), cache(Several)


def linear(has_bias: bool, facts: tuple[Any, ...]) -> Any:
    """The site of a single linear layer."""
    return chain("", has_bias, False, facts)
