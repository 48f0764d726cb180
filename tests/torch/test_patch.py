"""Patched layers among tools that derive classes of them, compile them, or look for `nn.Linear`."""

from __future__ import annotations

import copy
import io
import linecache
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import tunegemm
from tests.support.serving import calls_of, quietly, serve_with
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.torch.linear import TunedLinear

X = torch.ones(32, 64, dtype=torch.bfloat16)


@pytest.fixture
def model(serve, kernel, monkeypatch) -> nn.Sequential:
    """Two layers that have a kernel, patched."""
    serve_with(monkeypatch, serve(Problem(32, 64, 64)))
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    layers.to(torch.bfloat16)
    assert tunegemm.patch(layers) == 2
    return layers


def test_layers_of_quantised_models_stay_their_own() -> None:
    """transformers' class is an `nn.Linear` whose forward calls kernels of its own; the guide lists it."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layers = nn.Sequential(FP8Linear(64, 64, block_size=(32, 32)), nn.Linear(64, 64))
    assert isinstance(layers[0], nn.Linear) and tunegemm.patch(layers) == 1
    assert type(layers[0]) is FP8Linear and type(layers[1]) is TunedLinear


DERIVING: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    "two": lambda layer: [
        parametrize.register_parametrization(layer, "weight", nn.Identity()) for _ in range(2)
    ],
}


@pytest.mark.parametrize("derive", DERIVING.values(), ids=DERIVING)
def test_a_parametrized_layer_is_unpatched(model, kernel, derive):
    derive(model[0])
    with torch.no_grad():
        expected = quietly(model, X)
    assert len(kernel.calls) == 2
    assert tunegemm.patch(model) == 0, "each is"
    assert (tunegemm.unpatch(model), tunegemm.unpatch(model)) == (2, 0)
    assert parametrize.is_parametrized(model[0], "weight") and isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "ParametrizedLinear"
    with torch.no_grad():
        assert torch.equal(model(X), expected)
    assert len(kernel.calls) == 2
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert (tunegemm.patch(model), tunegemm.unpatch(model)) == (2, 2)


def test_each_layer_keeps_its_own_parametrization(model):
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert tunegemm.unpatch(model) == 2
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
    assert torch.is_tensor(model[2].weight) and parametrize.is_parametrized(model[2], "weight")


def test_layers_that_were_parametrized_first_keep_their_own_way(model):
    tunegemm.unpatch(model)
    parametrizations.weight_norm(model[0])
    assert tunegemm.patch(model) == 1
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
    assert (tunegemm.patch(model), tunegemm.unpatch(model)) == (1, 2)


def test_a_copy_of_a_parametrized_layer_is_unpatched_for_itself(model):
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    copied = copy.deepcopy(model)
    assert (tunegemm.unpatch(copied), tunegemm.unpatch(model)) == (2, 2)


class Own(TunedLinear):
    """With ways of its own."""


def test_a_subclass_that_somebody_wrote_is_left_alone(model):
    class Local(TunedLinear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model.extend([Own(64, 64), Local(64, 64)])
    assert (tunegemm.unpatch(model), type(model[3]), type(model[4])) == (2, Own, Local)
    x = torch.ones(1, 64)
    assert torch.equal(model[4](x), nn.functional.linear(x, model[4].weight, model[4].bias) + 1)


def test_pruned_layers_are_served_what_is_left(model, kernel):
    prune.random_unstructured(model[0], "weight", amount=0.5)
    with torch.no_grad():
        first = nn.functional.linear(X, model[0].weight)
        assert torch.equal(quietly(model[0], X), first) and kernel.calls
    assert tunegemm.unpatch(model) == 2 and type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_an_attribute_in_front_of_a_parameter_is_what_counts(model, kernel, name):
    """Libraries set one for a while: a tensor may not be assigned to a parameter's name."""
    own = {"weight": model[0].weight.detach() * 2, "bias": torch.ones(64, dtype=torch.bfloat16)}[name]
    with torch.no_grad():
        before = quietly(model[0], X)
        vars(model[0])[name] = own
        after = model[0](X)
        assert torch.equal(after, nn.functional.linear(X, model[0].weight, model[0].bias))
        assert not torch.equal(after, before)


@pytest.mark.parametrize(("place", "name"), [(nn.functional, "linear"), (nn.Linear, "forward")])
def test_a_function_that_a_tool_puts_in_place_of_torchs_sees_each_layer(
    model, kernel, monkeypatch, place, name
):
    """As counters of FLOPs, calibration and LoRA of web UIs do, for all layers of the process."""
    before = getattr(place, name)
    expected = quietly(model, X)
    monkeypatch.setattr(place, name, lambda *given: before(*given) * 2)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(model(X), expected * 4)
    assert torch.equal(torch.compile(model, backend="eager")(X), expected * 4)
    monkeypatch.undo()
    kernel.calls.clear()
    with torch.no_grad():
        assert torch.equal(model(X), expected)


def test_fully_sharded_layers_are_unpatched(model, one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model.float()
    mesh = init_device_mesh("cpu", (1,))
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    expected = model(X.float())
    assert (tunegemm.unpatch(model), tunegemm.unpatch(model)) == (2, 0)
    assert isinstance(model[0], FSDPModule) and isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "FSDPLinear" and type(model[0]).forward is nn.Linear.forward
    after = model(X.float())
    assert torch.equal(after, expected)
    after.sum().backward()
    assert model[0].weight.grad is not None


def test_pickles_and_copies_are_patched_and_can_be_unpatched(model, kernel):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            quietly(other, X)
        assert tunegemm.patch(other) == 0 and tunegemm.unpatch(other) == 2
    assert len(kernel.calls) == 4 and tunegemm.unpatch(model) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torchscript_compiles_what_it_does_of_torchs_layers(model, kernel):
    plain = copy.deepcopy(model)
    tunegemm.unpatch(plain)
    expected = plain(X)
    scripted, traced = torch.jit.script(model), torch.jit.trace(model, X)
    assert scripted.code == torch.jit.script(plain).code
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    kernel.calls.clear()  # to trace is to run it, too
    for compiled in (scripted, traced, torch.jit.load(file)):
        assert torch.equal(compiled(X), expected)
    assert not kernel.calls, "torch's, as the guide says"
    assert tunegemm.unpatch(model) == 2, "the model itself is as it was"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tools_find_a_patched_layer_by_its_class(model):
    """As docs/guide/torch.md says."""
    layer, table = model[0], {nn.ReLU: "relu", nn.Linear: "linear"}
    assert isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
    assert table[type(layer)] == table[layer.__class__] == "linear" and type(layer) in [nn.Linear]
    assert {type(layer): 1}[nn.Linear] == 1
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    assert type(model[2]) not in table and parametrize.type_before_parametrizations(model[2]) in table
    assert Own not in table and Own == Own and len({Own, TunedLinear}) == 2
    tunegemm.unpatch(model)
    tunegemm.patch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(model[:1].float(), {nn.Linear})
    assert isinstance(quantized[0], torch.ao.nn.quantized.dynamic.Linear)


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("bias", [False, True])
def test_a_fall_back_asks_for_no_kernel_until_the_next_look(serve, kernel, monkeypatch, bias):
    """It is torch's function; and where a gradient is wanted, nothing is asked at all."""
    layer = nn.Linear(64, 48, bias).to(torch.bfloat16)
    tunegemm.patch(layer)
    serve_with(monkeypatch, dispatcher := serve(Problem(1, 8, 8)))

    def keys(call: Callable[[], object]) -> int:
        """How often the slow path was entered."""
        return calls_of(call)[0].count("tunegemm.dispatch.dispatcher.compute")

    with torch.no_grad():
        expected = nn.functional.linear(X, layer.weight, layer.bias)
        assert torch.equal(layer(X), expected) and keys(lambda: layer(X)) == 0
        assert torch.equal(layer(X), expected)
        with torch.enable_grad():
            layer(X).sum().backward()
            assert layer.weight.grad is not None and keys(lambda: layer(X)) == 0
        assert keys(lambda: layer(X[:16])) == 1, "another number of rows"
        assert keys(lambda: layer(X)) == 0
        dispatcher.planner.quick.until = 0.0
        assert keys(lambda: layer(X)) == 1, "there might be a record now"
        serve_with(monkeypatch, serve(Problem(32, 48, 64, epilogue="bias_n" if bias else "")))
        layer(X)
    assert len(kernel.calls) == 1, "there is"


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_without_a_kernel_is_torchs_after_one_look(serve, kernel, monkeypatch, bias):
    """In a model the dispatcher's own look-up costs several times what it costs in a loop."""
    serve_with(monkeypatch, serve(Problem(32, 64, 64), Problem(32, 64, 64, epilogue="bias_n" * bias)))
    layer = nn.Linear(64, 64, bias=bias).to(torch.bfloat16)
    tunegemm.patch(nn.Sequential(layer))
    few, wide = X[:8], torch.cat([X, X], 1)[:8, :64]

    def enters(x: torch.Tensor) -> bool:
        with torch.no_grad():
            names = calls_of(lambda: layer(x))[0]
        return any(name.startswith("tunegemm.dispatch.dispatcher.") for name in names)

    assert enters(few) and not enters(few) and not enters(few[None]) and not enters(wide)
    assert not kernel.calls and enters(X) and len(kernel.calls) == 1
    assert enters(X) and len(kernel.calls) == 2 and not enters(few)
    with tunegemm.policy("deterministic"):
        assert enters(few) and enters(few), "whose plans are others"
    tunegemm.refresh()
    assert enters(few)
    monkeypatch.setattr(api.dispatcher.planner.quick, "until", 0.0)
    assert enters(few), "which looks for new records"
    with torch.no_grad():
        layer.weight.mul_(2)
        assert torch.equal(layer(few), nn.functional.linear(few, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore::tunegemm.errors.TunegemmWarning")
def test_another_weight_at_the_address_of_one_without_a_kernel_is_found(serve, kernel, monkeypatch):
    """The allocator gives a new model the memory of one that is gone."""
    serve_with(monkeypatch, serve(Problem(32, 48, 64)))
    layer = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    tunegemm.patch(layer)
    quick = api.dispatcher.planner.quick
    with torch.no_grad():
        layer(X)
        assert quick == {layer.weight.data_ptr(): {X.numel()}} and not kernel.calls
        layer.weight = nn.Parameter(layer.weight[:48].detach())
        assert torch.equal(layer(X), nn.functional.linear(X, layer.weight))
        monkeypatch.setattr(quick, "until", 0.0)
        layer(X), layer(X)
        assert len(kernel.calls) == 2
        with tunegemm.policy("deterministic"):
            layer(X[:8])
            assert not quick, "other contexts have another policy"


def test_a_report_names_each_linear_layer() -> None:
    class Own(nn.Linear):
        pass

    layers = nn.ModuleDict({"own": Own(8, 8), "plain": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    report = tunegemm.patch(layers, report=True)
    assert report.patched == 1 and [line.name for line in report.of("served")] == ["plain"]
    assert [str(line) for line in report.of("left")] == [
        "left    own: Own is a subclass with its own forward"
    ]
    assert str(report.of("served")[0]) == (
        "served  plain: calls tunegemm.linear: no kernel on cpu; move the model to a CUDA device"
    )


def test_a_model_without_linear_layers_warns_at_the_callers_line() -> None:
    """The warning names what serves the model's other products; both forms of the call give it."""
    for model, report in ((nn.Conv2d(1, 1, 1), False), (nn.Sequential(nn.LayerNorm(8)), True)):
        with pytest.warns(tunegemm.TunegemmWarning, match=r"no layer .* torch.nn.Linear; .*enable") as given:
            changed = tunegemm.patch(model, report=report)  # the line that the warning names
        (warning,) = given
        assert warning.filename == __file__
        line = linecache.getline(__file__, warning.lineno)
        assert "# the line that the warning names" in line
        assert type(model).__name__ in str(warning.message)
        if isinstance(changed, int):
            assert changed == 0
        else:
            assert changed.patched == 0 and not list(changed)
