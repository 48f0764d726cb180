"""`patch(fuse=True)`: an MLP whose class's forward is just a gate, and whatever else somebody does to it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tunegemm
from tests.support.fusing import close
from tests.support.gates import Kernels
from tests.support.layers import MLP, given, made
from tests.support.serving import calls_of
from tunegemm.dispatch import extension
from tunegemm.errors import TunegemmWarning
from tunegemm.layers import mlp, sites
from tunegemm.layers.modules import ROWS

pytestmark = pytest.mark.usefixtures("planner")


class Other(MLP):
    """With a step more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class Branches(MLP):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Inherits(MLP):
    pass


class Decorated(MLP):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The other way round, with a docstring."""
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class ByFunction(MLP):
    """As Llama's own code is written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ByAnother(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class ByChildOfChild(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn.forward(self.gate_proj(x)) * self.up_proj(x))


class Twice(MLP):
    """One layer is gate and up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.gate_proj(x))


class Named(nn.Parameter):
    """A parameter of a class of its own."""


def fused(model: nn.Module) -> Any:
    tunegemm.patch(model, fuse=True)
    return model


@pytest.mark.parametrize("make", [MLP, Swapped, ByFunction])
def test_the_gate_is_one_kernel(kernels: Kernels, make: type[MLP]) -> None:
    model, x = fused(made(make())), given()
    with torch.no_grad():
        close(model(x), made(make())(x))
    assert len(kernels.gates) == 1 and type(model) is make


def test_biases_of_gate_and_up_are_added_in_the_kernel(kernels: Kernels) -> None:
    plain, model, x = made(MLP(bias=True)), fused(made(MLP(bias=True))), given()
    with torch.no_grad():
        close(model(x), plain(x))
        assert len(kernels.gates) == 1
        for each in (plain, model):
            each.up_proj.bias = nn.Parameter(torch.ones(96, dtype=x.dtype))
        close(model(x), plain(x))
        assert len(kernels.gates) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: None, lambda: nn.Parameter(torch.ones(1).bfloat16()),
        lambda: nn.Parameter(torch.ones(192).bfloat16()[::2]), lambda: Named(torch.ones(96).bfloat16()),
    ],
    ids=["none", "one for all columns", "with gaps", "a subclass"],
)  # fmt: skip
def test_biases_that_no_kernel_adds_are_the_modules_own(kernels: Kernels, make: Any) -> None:
    plain, model, x = made(MLP(bias=True)), fused(made(MLP(bias=True))), given()
    for each in (plain, model):
        each.up_proj.bias = make()
    with torch.no_grad():
        close(model(x), plain(x))
    assert not kernels.gates


def test_an_mlp_without_a_kernel_is_known_by_its_rows_and_dtype(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, asked = fused(made(MLP())), given(), []
    assert not extension.is_off()  # which reads the mode, as the choice of a kernel does first
    monkeypatch.setattr(mlp, "is_replaced", lambda: bool(asked.append(1)))  # type: ignore[func-returns-value]
    with torch.no_grad():
        with monkeypatch.context() as none:
            none.setattr(sites, "chosen", lambda *_, **__: None)
            for number, rows in enumerate((x, x, x[:1], x[:1])):
                model(rows)
                assert len(asked) == 1 + number // 2 and not kernels.gates
        model(x)
        assert not kernels.gates
        close(model.half()(x.half()), made(MLP()).half()(x.half()))
        assert len(kernels.gates) == 1
        model.bfloat16()
        tunegemm.refresh()
        close(model(x), made(MLP())(x))
    assert len(kernels.gates) == 2


@pytest.mark.parametrize("make", [Other, Branches, Inherits, Decorated, ByAnother, ByChildOfChild])
def test_another_forward_is_not_recognised(make: type[MLP]) -> None:
    model, x = made(make()), given()
    with torch.no_grad():
        expected = model(x)
        close(fused(model)(x), expected)
    assert "forward" not in vars(model)


def test_one_layer_may_be_both(kernels: Kernels) -> None:
    model, x = fused(made(Twice())), given()
    with torch.no_grad():
        close(model(x), made(Twice())(x))
    assert not kernels.gates, "up's weight does not lie behind gate's"


def test_classes_of_transformers_are_recognised() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    for cls in (LlamaMLP, GemmaMLP, Qwen2MLP):
        assert mlp.places_of(cls) == ("down_proj", "act_fn", "gate_proj", "up_proj", "")
    assert mlp.places_of(Phi3MLP) is None


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
        ("gelu_python", ""), ("gelu_python_tanh", ""), ("gelu_new", ""), ("quick_gelu", ""), ("gelu_10", ""),
    ],
)  # fmt: skip
def test_activations_of_transformers(kernels: Kernels, name: str, activation: str) -> None:
    """Those that are torch's function; steps of Python round differently, and stay the model's."""
    from transformers.activations import ACT2FN

    plain, model, x = made(MLP(ACT2FN[name])), fused(made(MLP(ACT2FN[name]))), given()
    assert mlp.activation_of(ACT2FN[name]) == activation
    with torch.no_grad():
        close(model(x), plain(x))
    assert len(kernels.gates) == bool(activation)


class Silu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class Doubled(Silu):
    """Its call is more than its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class Clipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x).clamp(max=1)


class ByAttribute(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@pytest.mark.parametrize(
    ("act", "is_known"),
    [
        (Silu(), True), (Doubled(), False), (Clipped(), False), (ByAttribute(F.gelu), True),
        (ByAttribute(functools.partial(F.gelu, approximate="tanh")), True), (ByAttribute(nn.SiLU()), False),
        (ByAttribute(functools.partial(F.silu, inplace=True)), False), (ByAttribute(torch.tanh), False),
        (ByAttribute(torch.relu), True), (ByAttribute(functools.partial(F.gelu, approximate="none")), True),
    ],
)  # fmt: skip
def test_activations_that_call_torchs_function(kernels: Kernels, act: nn.Module, is_known: bool) -> None:
    plain, model, x = made(MLP(act)), fused(made(MLP(copy.deepcopy(act)))), given()
    with torch.no_grad():
        close(model(x), plain(x))
    assert len(kernels.gates) == is_known


def test_an_activation_that_is_changed_later_is_seen(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = ByAttribute(F.gelu)
    model, x = fused(made(MLP(act))), given()
    with torch.no_grad():
        model(x)
        act.act = torch.tanh
        close(model(x), made(MLP(nn.Tanh()))(x))
        act.act = F.gelu
        monkeypatch.setattr(ByAttribute, "forward", lambda self, x: x)
        close(model(x), made(MLP(nn.Identity()))(x))
    assert len(kernels.gates) == 1


def _replaced(model: Any) -> None:
    model.up_proj = made(nn.Linear(64, 96, bias=False))


def _adapted(model: Any) -> None:
    layer = model.gate_proj
    model.gate_proj = nn.Sequential(layer, nn.Hardtanh())


def _forward(model: Any) -> None:
    layer = model.gate_proj
    layer.forward = lambda x: F.linear(x, layer.weight) * 2


def _own_forward(model: Any) -> None:
    model.forward = lambda x: x + 1


def _act(model: Any) -> None:
    model.act_fn = nn.Tanh()


def _biased(model: Any) -> None:
    model.gate_proj.bias = nn.Parameter(torch.ones(96, dtype=torch.bfloat16))


def _biased_by_buffers(model: Any) -> None:
    for layer in (model.gate_proj, model.up_proj):
        del layer.bias
        layer.register_buffer("bias", torch.ones(96, dtype=torch.bfloat16))


def _hidden(module: Any, name: str, attribute: Any) -> None:
    vars(module)[name] = attribute


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight in front of the parameter": lambda model: _hidden(
        model.gate_proj, "weight", model.gate_proj.weight.detach() * 2
    ),
    "a bias in front of none": lambda model: _hidden(model.up_proj, "bias", torch.ones(96).bfloat16()),
    "a weight in front of down's": lambda model: _hidden(
        model.down_proj, "weight", model.down_proj.weight.detach() * 2
    ),
    "a layer in front of the child": lambda model: _hidden(
        model, "up_proj", made(nn.Sequential(nn.Linear(64, 96, bias=False)))
    ),
    "an activation in front of the child": lambda model: _hidden(model, "act_fn", torch.tanh),
    "a hook of gate": lambda model: model.gate_proj.register_forward_hook(lambda m, i, o: o * 2),
    "a hook of up before": lambda model: model.up_proj.register_forward_pre_hook(lambda m, i: (i[0] + 1,)),
    "a hook of the activation": lambda model: model.act_fn.register_forward_hook(lambda m, i, o: o + 1),
    "a hook of down": lambda model: model.down_proj.register_forward_hook(lambda m, i, o: o * 3),
    "another layer": _replaced,
    "an adapter": _adapted,
    "another forward of a layer": _forward,
    "another forward": _own_forward,
    "another activation": _act,
    "another class of the activation": lambda model: setattr(model.act_fn, "__class__", nn.Tanh),
    "another class of gate": lambda model: setattr(model.gate_proj, "__class__", Doubling),
    "another class": lambda model: setattr(model, "__class__", Other),
    "a bias": _biased,
    "biases that are no parameters": _biased_by_buffers,
    "data": lambda model: setattr(model.up_proj.weight, "data", model.up_proj.weight.data * 2),
    "pruned": lambda model: prune.random_unstructured(model.gate_proj, "weight", amount=0.5),
    "fp32": lambda model: model.float(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_later_is_seen(name: str) -> None:
    torch.manual_seed(0)
    plain, model, x = made(MLP()), fused(made(MLP())), given()
    with torch.no_grad():
        model(x)
        for each in (plain, model):
            torch.manual_seed(1)
            CHANGES[name](each)
        x = x.to(next(model.parameters()).dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TunegemmWarning)  # fp32 has no kernels here
            close(model(x), plain(x))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "act_fn", "down_proj"])
def test_a_child_that_is_gone_is_the_class_forwards_error(name: str) -> None:
    model, x = fused(made(MLP())), given()
    with torch.no_grad():
        model(x)
        delattr(model, name)
        with pytest.raises(AttributeError, match=name):
            model(x)


def test_another_forward_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of kernels replace the forward of transformers' classes."""
    model, x = fused(made(Swapped())), given()
    with torch.no_grad():
        model(x)
        monkeypatch.setattr(Swapped, "forward", lambda self, x: x + 1)
        assert torch.equal(model(x), x + 1)


def test_another_linear_of_torchs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of FLOPs replace it."""
    model, x = fused(made(MLP())), given()
    calls, linear = [], nn.functional.linear
    with torch.no_grad():
        expected = model(x)
        monkeypatch.setattr(nn.functional, "linear", lambda *each: calls.append(each) or linear(*each))
        close(model(x), expected)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("make", "place", "name"),
    [
        (MLP, F, "silu"), (ByFunction, F, "silu"), (MLP, nn.SiLU, "forward"),
        (lambda: MLP(nn.GELU("tanh")), F, "gelu"), (lambda: MLP(Silu()), F, "silu"),
    ],
)  # fmt: skip
def test_another_activation_of_torchs_is_seen(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, make: Any, place: Any, name: str
) -> None:
    """Tools that quantise or watch activations replace functions, as they do the linear layers'."""
    model, plain, x = fused(made(make())), made(make()), given()
    with torch.no_grad():
        model(x)
        monkeypatch.setattr(place, name, lambda *each, **_: each[-1] * 2)
        close(model(x), plain(x))
    assert len(kernels.gates) == 1


def test_a_replica_of_data_parallel_has_its_own_weights() -> None:
    model, x = fused(made(MLP())), given()
    replica: Any = model._replicate_for_data_parallel()  # type: ignore[operator]
    for name, _ in model.named_children():
        replica._modules[name] = nn.Linear(64, 64, dtype=x.dtype) if name == "down_proj" else nn.Identity()
    with torch.no_grad():
        close(replica(x), replica.down_proj(x * x))
        close(model(x), made(MLP())(x))


def test_tools_see_the_signature_of_the_class() -> None:
    model, x = fused(made(MLP())), given(4)
    assert inspect.signature(model.forward) == inspect.signature(MLP().forward)
    with torch.no_grad():
        rows = {"x": {0: torch.export.Dim("rows")}}
        close(torch.export.export(model, (), {"x": x}, dynamic_shapes=rows).module()(x=x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_compiles_it_as_unpatched() -> None:
    model, x = nn.Sequential(fused(made(MLP()))), given()
    with torch.no_grad():
        expected = model(x)
        close(torch.jit.script(model)(x), expected)
        close(model(x), expected)
    assert "forward" not in vars(model[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo])
def test_rows_of_another_layout_are_the_modules_own(layout: Any) -> None:
    plain, model, x = made(MLP()), fused(made(MLP())), given()
    rows = x[0].to_sparse() if layout is torch.sparse_coo else None
    rows = torch.nested.nested_tensor([x[0], x[1, :3]], layout=layout) if rows is None else rows
    with torch.no_grad():
        for _ in range(2):
            results = [call(rows) for call in (model, plain)]
            for each in zip(*(result.unbind() for result in results), strict=True):
                close(*each)
            close(model(x), plain(x))  # from here on it is known, and its check takes no nested tensor


def test_a_global_hook_sees_each_layer() -> None:
    seen: list[str] = []
    model, x = fused(made(MLP())), given()
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m).__name__))
    with torch.no_grad():
        model(x)
    handle.remove()
    assert len(seen) == 5, "two layers, the activation, the third layer, and the MLP"


def test_gradients_modes_and_autocast_are_the_modules_own(kernels: Kernels) -> None:
    plain, model, x = made(MLP()), fused(made(MLP())), given()
    model(x).float().sum().backward()
    plain(x).float().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad)
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **kwargs or {})

    with torch.no_grad():
        with Mode():
            close(model(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            close(model(x), plain(x))
        close(torch.vmap(model)(x), torch.vmap(plain)(x))
        with pytest.raises(RuntimeError):
            model(x[..., :5])
    assert not kernels.gates and seen


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **kwargs or {})


class _Watched(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "within",
    [
        torch.enable_grad, _Dispatched, _Watched, _deterministic, forward_ad.dual_level,
        lambda: torch.autocast("cpu", torch.float16), lambda: tunegemm.policy("batch_invariant"),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda m, i: None),
        lambda: nn.modules.module.register_module_full_backward_hook(lambda m, i, o: None),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_a_call_that_a_kernel_computed_may_be_the_modules_own_next_time(
    kernels: Kernels, within: Callable[[], AbstractContextManager[Any]]
) -> None:
    plain, model, x = made(MLP()), fused(made(MLP())), given()
    with torch.no_grad():
        for _ in range(2):
            close(model(x), plain(x))
        assert len(kernels.gates) == 2
        with within():
            assert model(x).dtype is plain(x).dtype
            assert len(kernels.gates) == 2
        close(model(x), plain(x))
        close(model(x.transpose(0, 1)), plain(x.transpose(0, 1)))
        assert len(kernels.gates) == 3
        close(torch.vmap(model)(x), plain(x))
        close(torch.func.functionalize(model)(x), plain(x))
        close(make_fx(model)(x)(x), plain(x))
        close(torch.jit.trace(model, x, check_trace=False)(x * 2), plain(x * 2))
        assert len(kernels.gates) == 3


def test_a_kernel_is_found_by_one_look(kernels: Kernels) -> None:
    """Within a model the complete checks cost the host more than the gate's operations of torch."""
    model, x = fused(made(MLP())), given()
    with torch.no_grad():
        model(x)
        for change in (lambda: None, tunegemm.refresh):
            change()
            model(x)
            names, _ = calls_of(lambda: model(x))
            ours = [name for name in names if name.startswith("tunegemm.layers")]
            assert len(ours) <= 4, ours
    assert len(kernels.gates) == 5


def test_what_is_known_of_a_call_keeps_no_layer_alive(kernels: Kernels) -> None:
    model, x = fused(made(MLP())), given()
    with torch.no_grad():
        model(x)
    assert len(kernels.gates) == 1
    layers = [weakref.ref(layer) for layer in model.modules()]
    del model
    gc.collect()
    assert not any(layer() for layer in layers)


def test_a_default_device_hides_no_kernel(kernels: Kernels) -> None:
    plain, model, x = made(MLP()), fused(made(MLP())), given()
    with torch.no_grad(), torch.device("cpu"):
        close(model(x), plain(x))
    assert len(kernels.gates) == 1


def test_copies_and_pickles_are_fused_with_weights_of_their_own(kernels: Kernels) -> None:
    model, x = fused(made(MLP())), given()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.up_proj.weight.data.zero_()
        with torch.no_grad():
            assert not other(x).any() and model(x).any()
    assert model.state_dict().keys() == MLP().state_dict().keys()


def test_a_shallow_copy_computes_with_its_own_children(kernels: Kernels) -> None:
    model, x = fused(made(MLP())), given()
    other = copy.copy(copy.copy(model))
    assert other._modules is model._modules, "as for every module"
    other._modules = dict(model._modules)
    other.up_proj = copy.deepcopy(model.up_proj)
    other.up_proj.weight.data.zero_()
    with torch.no_grad():
        assert not other(x).any() and model(x).any()
    assert len(kernels.gates) == 2, "both are fused"
    tunegemm.unpatch(other)
    assert "forward" not in vars(other) and "forward" in vars(model)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(model, protocol))
        assert vars(again)["forward"].__wrapped__.__self__ is again


class Reduced(MLP):
    """Says itself how it is copied."""

    forward = MLP.forward

    def __reduce__(self) -> Any:
        return Reduced, ()


def test_a_class_that_says_how_it_is_copied_is_asked() -> None:
    model = fused(made(Reduced()))
    assert "forward" in vars(model) and type(copy.copy(model)) is Reduced


def _with_same_attributes(module: nn.Module, memo: Any = None) -> nn.Module:
    other: nn.Module = type(module).__new__(type(module))
    vars(other).update(vars(module), _modules=dict(module._modules))
    return other


@pytest.mark.parametrize(
    ("own", "how"),
    [
        ({"__copy__": _with_same_attributes}, copy.copy),
        ({"__deepcopy__": _with_same_attributes}, copy.deepcopy),
        (
            {
                "__getstate__": lambda self: {"all": dict(vars(self), _modules=dict(self._modules))},
                "__setstate__": lambda self, state: vars(self).update(state["all"]),
            },
            copy.copy,
        ),
    ],
)
def test_a_copy_that_its_class_makes_computes_with_its_own_children(
    own: dict[str, Any], how: Callable[..., Any]
) -> None:
    model, x = fused(made(type("Copied", (MLP,), {"forward": MLP.forward, **own})())), given()
    other = how(model)
    other.up_proj = copy.deepcopy(model.up_proj)
    other.up_proj.weight.data.zero_()
    with torch.no_grad():
        assert not other(x).any() and model(x).any()


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda model: model._replicate_for_data_parallel()]
)
def test_a_forward_that_somebody_sets_later_is_copied_and_stays(how: Callable[..., Any]) -> None:
    model, x = fused(made(MLP())), given()
    model.forward = torch.neg  # as libraries do that move weights before each call
    for each in (how(model), model):
        assert torch.equal(each(x), -x)
        tunegemm.unpatch(each)
        assert torch.equal(each(x), -x) and "__reduce_ex__" not in vars(each)
    model = fused(made(MLP()))
    del model.forward
    assert "forward" not in vars(how(model)), "nor does what somebody has removed come back"


def test_unpatch_takes_it_away_again(kernels: Kernels) -> None:
    model, x = made(MLP()), given()
    before = dict(vars(model))
    with torch.no_grad():
        expected = model(x)
        assert tunegemm.patch(model, fuse=True) == 3
        assert tunegemm.patch(model, fuse=True) == 0, "a second time it changes nothing"
        assert tunegemm.unpatch(model) == 3
        assert torch.equal(model(x), expected)
    assert vars(model) == before and not kernels.gates


def test_a_report_tells_recognised_from_served() -> None:
    report = tunegemm.patch(nn.ModuleDict({"mlp": made(MLP())}), fuse=True, report=True)
    (line,) = report.of("fused")
    assert line.name == "mlp"
    rows = ", ".join(map(str, ROWS))
    assert (
        line.why
        == f"gate_proj, up_proj and their gate form a known pattern: has a kernel here for {rows} rows"
    )
    assert [line.name for line in report.of("served")] == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert {line.why for line in report.of("served")} == {
        f"calls tunegemm.linear: has a kernel here for {rows} rows"
    }
    elsewhere = tunegemm.patch(nn.Sequential(MLP()).to("meta", torch.bfloat16), fuse=True, report=True)
    assert len(elsewhere.lines) == 4
    assert all(
        line.why.endswith(": no kernel on meta; move the model to a CUDA device") for line in elsewhere
    )


@pytest.mark.parametrize(("name", "child"), [("act_fn", nn.Tanh()), ("gate_proj", nn.Identity())])
def test_a_report_of_an_mlp_that_somebody_changed_says_so(name: str, child: nn.Module) -> None:
    model = fused(made(MLP()))
    for change in (setattr, lambda *given: delattr(*given[:2])):
        change(model, name, child)
        (line,) = tunegemm.patch(model, report=True).of("fused")
        assert line.why.endswith("form a known pattern: no kernel")


def test_compiled_and_fused_are_the_same(kernels: Kernels) -> None:
    model, x = fused(made(MLP())), given()
    with torch.no_grad():
        close(torch.compile(model, backend="eager", fullgraph=True)(x), made(MLP())(x))


def test_a_model_of_transformers_is_fused(kernels: Kernels) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    make = functools.partial(LlamaMLP, LlamaConfig(hidden_size=64, intermediate_size=96))
    with torch.no_grad():
        close(fused(made(make()))(given()), made(make())(given()))
    assert len(kernels.gates) == 1
