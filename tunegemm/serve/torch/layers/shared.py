"""Weights of linear layers that are computed as one product, in one storage: no memory is doubled.

The parameters stay the layers' own, as views of that storage: rows after one another, or, as gated kernels
read them, in turns. What moves a parameter elsewhere, as `Module.to` and loading with ``assign=True`` do, is
noticed by its address at the next call. The memory of the storage cannot be another's meanwhile, since this
module holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.functional import linear

from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.serve import api
from tunegemm.serve.forms import BELOW_AUTOGRAD, Form, form_of
from tunegemm.serve.guards import (
    any_autocast,
    capturing,
    dispatch_modes,
    functorch_level,
    grad_enabled,
    tracing,
)
from tunegemm.serve.plans import State
from tunegemm.serve.torch.autograd import DTYPES, PLAIN
from tunegemm.serve.torch.fx import data_ptr
from tunegemm.serve.torch.layers import halves
from tunegemm.serve.torch.several import traced_part
from tunegemm.serve.torch.together import most_joined, together

#: Eager layers of up to so many rows wait for the host, which the library's product with a residual costs
#: some 17 us more than torch's product and sum: on an H200 such layers took 1.03 to 1.12 times as long.
_FEW_ROWS = 256
#: Stands for what is known to be the library's in graphs alone.
_FORGRAPHS = object()
GRAPHS = id(_FORGRAPHS)
#: A first layer that was called so often in a row without the others computes for itself from then on.
_MAX_WASTED = 3
is_inference_mode_enabled = torch.is_inference_mode_enabled
#: On which stream of a device work is put now; absent from CPU builds.
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Held(NamedTuple):
    """Results of layers that are still to be called, and in what circumstances they hold."""

    x: torch.Tensor
    version: int | None
    """Of the input; None where it counts none."""
    device: int
    """The index of one that has streams; -1 for others."""
    stream: int
    grads: bool
    inference: bool
    states: list[tuple[int, int]]
    """Of all weights, and behind them of all biases, if any: versions and addresses."""
    parts: dict[int, torch.Tensor]
    """The results, by the layers' places."""


class _Turn(threading.local):
    """Of each thread what it computed for layers that it is still to call."""

    held: _Held | None = None
    wasted = 0
    """How often in a row the first layer was called without the others."""


class Shared:
    """Linear layers that read one input. One layer by itself is a case of it."""

    layers: tuple[Any, ...] = ()
    """Empty in a copy that is being made."""
    _made: Set[int] = frozenset()
    """Addresses of the storages that were made for the weights and biases."""
    is_taken_apart = False

    def __init__(self, layers: Sequence[torch.nn.Linear], *, in_turns: bool = False) -> None:
        """in_turns: whether the rows of two weights alternate, as `tunegemm.interleave` puts them."""
        self.layers = tuple(layers)
        self.in_turns = in_turns
        self.rows = [layer.out_features for layer in self.layers]
        self.is_taken_apart = len(self.layers) > 1 and not in_turns
        """Whether layers may take their parts of one product."""
        self.most_joined = most_joined(self.rows) * layers[0].in_features
        """Of how many elements of an input torch may take one product."""
        self._forget()

    def _forget(self) -> None:
        self._right: torch.Tensor | None = None  # (k, n), all weights
        self._weight: torch.Tensor | None = None  # the same, (n, k)
        self._one_group: torch.Tensor | None = None  # and as kernels of groups take it
        self._halves: dict[torch.Size, halves.Bound] = {}  # what those kernels serve, where it lies
        self._bias: tuple[torch.Tensor, ...] = ()
        self._device: torch.device | None = None
        self._places: tuple[tuple[Any, str, int, Any, Any, Any], ...] = ()
        self._weights: tuple[tuple[dict[str, Any], int], ...] = ()
        """Each layer's parameters, and the address of its weight."""
        self._index = -1  # of the device
        self._joins: State | None = None  # the state of the planner in which torch may take them as one
        self._asked: tuple[State | None, dict[int, bool]] = None, {}  # by such a state, for `has_kernels`
        self._turn = _Turn()

    def __getstate__(self) -> dict[str, Any]:
        """The layers: their copies are put together anew, by `pack`."""
        names = "layers", "in_turns", "rows", "is_taken_apart", "most_joined"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def is_packed(self) -> bool:
        """Whether the weights were last seen in one storage."""
        return self._right is not None

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        """The weights, or the biases, which may be none."""
        found = [layer._parameters[name] for layer in self.layers]
        return [parameter for parameter in found if parameter is not None]

    def pack(self) -> str:
        """Puts the parameters into one storage, unless they are there; why not, empty where it is done."""
        self._forget()
        if not self.layers or (reason := refusal(self.layers, in_turns=self.in_turns, own=self._made)):
            return reason if self.layers else "it is being made"
        with torch.inference_mode(False), torch.no_grad():
            self._right = self._joined(self.parameters("weight"))
            self._weight, self._device = self._right.t(), self._right.device
            self._index = self._right.get_device()
            biases = self.parameters("bias")
            self._bias = (self._joined(biases),) if biases else ()
        self._places = tuple(
            (
                layer._parameters,
                name,
                parameter.data_ptr(),
                parameter.dtype,
                parameter.shape,
                parameter.stride(),
            )
            for layer in self.layers
            for name in (("weight", "bias") if biases else ("weight",))
            for parameter in [layer._parameters[name]]
            if parameter is not None
        )
        self._weights = tuple((layer._parameters, data_ptr(layer.weight)) for layer in self.layers)
        return ""

    def unpack(self) -> None:
        """Gives each parameter a storage of its own."""
        is_packed = self.is_packed
        self._forget()
        if is_packed and len(self.layers) > 1:
            for parameter in (*self.parameters("weight"), *self.parameters("bias")):
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)

    def _joined(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """All as one, weights as (k, n)."""
        given = [parameter.detach() for parameter in parameters]
        whole = together(given, in_turns=self.in_turns)  # they may be there already
        if whole is None:
            whole = given[0].new_empty((sum(self.rows), *given[0].shape[1:]))
            self._made = {*self._made, whole.untyped_storage().data_ptr()}
            views = (
                whole.unflatten(0, (-1, len(given))).unbind(1) if self.in_turns else whole.split(self.rows)
            )
            for view, each in zip(views, parameters, strict=True):
                view.copy_(each)
                each.data = view
            whole = whole.t()
        return whole

    def is_in_place(self) -> bool:
        """Whether the parameters are still views of the storage."""
        if self._right is None:
            return False
        for parameters, name, address, dtype, shape, stride in self._places:
            parameter = parameters.get(name)
            if (
                type(parameter) not in PLAIN
                or data_ptr(parameter) != address
                or parameter.shape != shape  # which code that prunes makes smaller in place
                or parameter.stride() != stride
                or parameter.dtype is not dtype
            ):
                self._forget()  # which frees what is not shared any more
                return False
        if not self._bias:
            for parameters, _ in self._weights:
                if parameters.get("bias") is not None:  # somebody has given it one
                    self._forget()
                    return False
        return True

    def is_missed(self, what: object, x: Any) -> bool:
        """Whether there is no kernel, as far as is known: all that a fall-back to torch costs more.

        what: a form, or who asks for one, told apart by identity.
        """
        if self._right is None or type(x) not in PLAIN:
            return True
        planner = api.dispatcher.planner
        known = planner.state.torchs
        return bool(known) and (id(what), id(self), x.numel()) in known and monotonic() < planner.next_look

    def is_few(self, x: Any) -> bool:
        """Whether rows are so few that one product of torch's may take the place of several."""
        return self._right is not None and type(x) in PLAIN and x.numel() <= self.most_joined

    def may_add(self, what: object, of: Any, stream: Any) -> bool:
        """Whether a kernel may be known that adds a stream; what, of: as for `is_missed`.

        While a CUDA graph is captured that may be one of the library's, which costs the host more than it
        saves at few rows.
        """
        if self._right is None or type(of) not in PLAIN:
            return False
        planner = api.dispatcher.planner
        if known := planner.state.torchs:
            own = id(self)
            if (id(what), own, of.numel()) in known and monotonic() < planner.next_look:
                return (GRAPHS, own, stream.numel()) in known and capturing(stream.device)
        return True

    def remember_missed(self, what: object, x: torch.Tensor) -> None:
        """There is no kernel, until the planner next looks."""
        api.dispatcher.planner.state.remember_torchs(id(what), id(self), x.numel())

    def taken(self, x: Any, *others: torch.Tensor) -> Any:
        """The input as the methods below take it; None where a call means more than its product, or autograd
        wants to know of it: a node of Python's costs the host more than one product in the place of several
        gains (docs/decisions/0028).

        x: not `is_missed`, or of few rows. others: what else goes into the call. This is all that is looked
        at before a launch; each look costs every call.
        """
        # Of one layer the weight may have moved, which costs nothing to follow.
        if not self.is_in_place() and (len(self.layers) > 1 or self.pack()):
            return None
        # Those that `is_transformed` has: torch.func's and forward-mode's products are torch's.
        if dispatch_modes() or functorch_level() is not None or forward_ad._current_level >= 0:
            return None
        if x.ndim < 2 or x.is_nested:
            return None
        if grad_enabled() and self._trains(x, *others):
            return None
        return self._autocast(x) if any_autocast() else x

    def _trains(self, *tensors: torch.Tensor) -> bool:
        """Whether autograd wants to know of a call, where it is on."""
        return any(tensor.requires_grad for tensor in tensors) or any(
            parameters[name].requires_grad for parameters, name, *_ in self._places
        )

    def _autocast(self, x: torch.Tensor) -> torch.Tensor | None:
        """The input as autocast gives it to these layers; None where it casts their weights, too."""
        assert self._weight is not None
        dtype, device_type = self._weight.dtype, x.device.type
        if not torch.is_autocast_enabled(device_type):
            return x
        if torch.get_autocast_dtype(device_type) is not dtype or x.dtype is torch.float64:
            return None
        if x.dtype is dtype:
            return x
        return x.to(dtype) if x.is_floating_point() else None

    def product(self, form: Form, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | None:
        """What the form makes of x and all weights, by one kernel, below autograd; None where there is none.

        form: of BELOW_AUTOGRAD, not `is_missed`; x: as `taken` gives it; others: what the epilogue takes
        after the bias.
        """
        result: torch.Tensor | None = api.dispatcher.fused(form, x, self._right, (*self._bias, *others))
        if result is None:
            self.remember_missed(form, x)
        return result

    def sum(
        self, form: Form, x: torch.Tensor, stream: torch.Tensor, what: object, of: torch.Tensor
    ) -> torch.Tensor | None:
        """`product` with a stream added; None, too, where it is for graphs (`may_add`).

        Its first launch says whether it is. what, of: by which it `is_missed` in eager code from then on.
        """
        assert self._right is not None
        state, few = api.dispatcher.planner.state, x.numel() <= _FEW_ROWS * self._right.shape[0]
        if few and (GRAPHS, id(self), stream.numel()) in state.torchs and not capturing(x.device):
            return None
        result: torch.Tensor | None = api.dispatcher.fused(form, x, self._right, (*self._bias, stream))
        if result is None:
            self.remember_missed(form, x)
        elif few:
            state = api.dispatcher.planner.state
            recent = state.recent.get(data_ptr(self._right) | form.tag)
            record = None if recent is None or recent.plan is None else recent.plan.record
            if record is None or record.candidate.family != TORCH_MM.family or capturing(x.device):
                return result
            self.remember_missed(_FORGRAPHS, stream)
            self.remember_missed(what, of)
            return None
        return result

    def gated(self, form: Form, x: torch.Tensor, gate: str) -> torch.Tensor | None:
        """What `product` says of a gated form, or a kernel of groups (`halves`); None where there is neither.

        Of one layer, gate is the first half of its rows.
        """
        assert self._weight is not None
        if self._one_group is None:
            self._one_group = halves.one_group(self._weight)
        result = None
        if self.in_turns and not self.is_missed(halves, x):
            result = api.dispatcher.fused(form, x, self._right, self._bias)
            if result is None:
                self.remember_missed(halves, x)
        if result is None:
            result = halves.gated(
                x, self._one_group, self._bias, gate, in_turns=self.in_turns, known=self._halves
            )
        if result is None:
            self.remember_missed(form, x)
        return result

    def parts(self, x: Any) -> Sequence[torch.Tensor] | None:
        """The result of each layer, of one product; None where each is to be computed by itself."""
        if self._right is None or type(x) not in PLAIN:
            return None
        form, planner = PLAIN_FORMS[len(self._bias)], api.dispatcher.planner
        size, known = x.numel(), planner.state.torchs  # as of `is_missed`, which would be a call more
        has_none = bool(known) and (id(form), id(self), size) in known and monotonic() < planner.next_look
        if (has_none and size > self.most_joined) or (x := self.taken(x)) is None:
            return None
        whole = None if has_none else self.product(form, x)
        if whole is None and (whole := self.by_torch(x)) is None:
            return None
        return torch.unsafe_split_with_sizes(whole, self.rows, -1)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor | None:
        """torch's product of x, as `taken` gives it, and all weights, where that is faster than layer by
        layer and means the same.

        Not where a row's bits are not to depend on how many there are, or where everything is to be torch's.
        """
        weight = self._weight
        if (
            weight is None
            or x.numel() > self.most_joined
            or tracing()
            or x.dtype is not weight.dtype
            or x.get_device() != self._index
        ):
            return None
        planner = api.dispatcher.planner
        if self._joins is not planner.state:  # the state is another where the policy or the mode is
            if (
                x.device != self._device
                or x.device.type != planner.device_type
                or planner.is_off
                or planner.state.policy.is_batch_invariant
            ):
                return None
            self._joins = planner.state
        return linear(x, weight, *self._bias)

    def has_kernels(self, x: torch.Tensor) -> bool:
        """Whether there is a kernel for the first layer by itself, of an input as `taken` gives it.

        Then two of ours are faster than one product of torch's, of whose columns each step reads every other:
        on an H200 a decode step of two layers of Gemma-2-9B, eager, took 485 and 555 us.
        """
        planner, size = api.dispatcher.planner, x.numel()
        if self._asked[0] is not planner.state:
            self._asked = planner.state, {}
        found = self._asked[1].get(size)
        if found is None:
            assert self._right is not None
            if capturing(x.device):
                return False  # nothing is read or loaded now
            right = self._right[:, :: len(self.layers)]
            family = planner.family(PLAIN_FORMS[0], x, right, max(x.get_device(), 0))
            found = self._asked[1][size] = family not in ("", TORCH_MM.family)
        return found

    def lies_together(self) -> bool:
        """Whether a graph that is made now may take the weights as one: for Dynamo a constant."""
        if not torch.compiler.is_exporting():
            return self.is_in_place()
        # What exports puts fake tensors in the parameters' place, of which no address can be asked.
        return self.is_packed and all((layer.bias is None) != bool(self._bias) for layer in self.layers)

    lies_together._dynamo_marked_constant = True  # type: ignore[attr-defined] # see `ops`

    def traced_part(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """`part` while a graph is made."""
        if not self.lies_together():
            return None
        index = [place for place, one in enumerate(self.layers) if one is layer]
        return traced_part(x, *self.traced_parameters(), index[0]) if index else None

    def traced_parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights, and the biases, as a graph that is made now reads them."""
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        return weights, [] if biases[0] is None else biases

    def part(self, layer: Any, x: Any) -> torch.Tensor | None:
        """The result of one layer. The first computes all, for the others to take where they get the same x.

        None where the layer is to compute for itself.
        """
        turn = self._turn
        held = turn.held
        if layer is not self.layers[0]:
            if held is None or held[0] is not x:
                return None
            _, version, device, stream, grads, inference, states, parts = held
            try:
                place = self.layers.index(layer)
            except ValueError:  # a copy that shares what the layer has, such as a replica, is none of them
                return None
            weight = layer._parameters.get("weight")
            if (
                weight is None
                or states[place] != (weight._version, data_ptr(weight))
                or (self._bias and states[place - len(self.layers)] != _state(layer._parameters.get("bias")))
                or (version is not None and x._version != version)
                or grad_enabled() is not grads
                or is_inference_mode_enabled() is not inference
                or (device >= 0 and _stream_of(device) != stream)
            ):
                return None
            part = parts.pop(place, None)  # each is taken once: what is written into it is its own
            if not parts:
                turn.held = None
            return part
        if turn.wasted >= _MAX_WASTED:
            return None
        if held is not None:
            turn.wasted, turn.held = turn.wasted + 1, None
        elif turn.wasted:
            turn.wasted = 0
        results = self.parts(x)
        if results is None:
            return None
        parts = dict(enumerate(results))
        states = [(parameters["weight"]._version, address) for parameters, address in self._weights]
        if self._bias:
            states += [_state(parameters["bias"]) for parameters, _ in self._weights]
        device = -1 if _stream_of is None else x.get_device()
        turn.held = _Held(
            x,
            None if x.is_inference() else x._version,
            device,
            0 if device < 0 else _stream_of(device),
            grad_enabled(),
            is_inference_mode_enabled(),
            states,
            parts,
        )
        return parts.pop(0)


def _state(parameter: Any) -> tuple[int, int]:
    """What changes where a parameter is changed or moved."""
    return (0, 0) if parameter is None else (parameter._version, data_ptr(parameter))


#: Of all weights, without a bias and with one.
PLAIN_FORMS = (form_of(BELOW_AUTOGRAD, ""), form_of(BELOW_AUTOGRAD, "bias_n"))


def remember_left(marks: Sequence[tuple[int, int, int]], who: int, x: torch.Tensor) -> None:
    """That torch computes all of a method's steps, until records are looked at again, if so it is.

    marks: of the steps; who: the id of the function that has them; x: its first argument.
    """
    state, size = api.dispatcher.planner.state, x.numel()
    for what, layers, least in marks:
        if size <= least or (what, layers, size) not in state.torchs:
            return
    state.remember_torchs(who, size)
    if any((GRAPHS, layers, size) in state.torchs for _, layers, _ in marks):
        state.remember_torchs(who, -size)  # but in CUDA graphs


def refusal(layers: Sequence[Any], *, in_turns: bool = False, own: Set[int] = frozenset()) -> str:
    """Why the weights of layers cannot be in one storage; empty where they can.

    own: addresses of storages that were made for them before, which some may have left.
    """
    for name in ("weight", "bias"):
        given = [layer.__dict__.get("_parameters", {}).get(name) for layer in layers]
        if name == "bias" and all(bias is None for bias in given):
            continue
        first = given[0]
        for parameter in given:
            if parameter is None:
                return f"some have no {name}, or one that something else makes"
            if type(parameter) is not torch.nn.Parameter:
                return f"a {name} is a {type(parameter).__name__}, sharded or quantized"
            if parameter.layout is not torch.strided or not parameter.numel():
                return f"a {name} is sparse, or has no elements"
            if parameter.is_meta:
                return f"a {name} is on meta; patch the model once it has memory"
            if parameter.dtype not in DTYPES:
                return (
                    f"a {name} is {str(parameter.dtype).removeprefix('torch.')}; fused kernels are of 16 bits"
                )
            if parameter.is_inference():
                return f"a {name} was made in inference mode, and cannot be moved"
            if len(layers) == 1 and not parameter.is_contiguous():
                return f"the {name} is not contiguous"
        for what in ("dtype", "device", "requires_grad"):
            unlike = {str(getattr(parameter, what)).removeprefix("torch.") for parameter in given}
            if len(unlike) > 1:
                return f"{name}s differ in {what}: {', '.join(sorted(unlike))}"
        if len({parameter.shape[1:] for parameter in given}) > 1:
            return f"{name}s differ in columns"
        if in_turns and any(parameter.shape != first.shape for parameter in given):
            return f"{name}s differ in rows"
        if len(layers) > 1 and together([each.detach() for each in given], in_turns=in_turns) is None:
            for parameter in given:  # which would be moved
                if parameter.untyped_storage().data_ptr() in own:
                    continue
                if not parameter.is_contiguous():
                    return f"a {name} is not contiguous"
                if parameter.untyped_storage().nbytes() > parameter.nbytes:
                    return f"a {name} is a part of a larger buffer, through which something else may write"
    return ""
