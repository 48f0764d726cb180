"""What `patch(model, fuse=True)` leaves as it is, layers beside torch's own machinery, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import tunegemm
from tests.support.fusing import close
from tests.support.layers import (
    BF16,
    INNER,
    TOLERANCE,
    WIDTH,
    Attention,
    Gates,
    by_torch,
    fuse,
    fused,
    given,
    made,
)
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError


def _hooked(model: nn.Module) -> None:
    model.mlp.w1.register_forward_hook(lambda *_: None)


def _parametrized(model: nn.Module) -> None:
    parametrizations.weight_norm(model.mlp.w3)


def _frozen(model: nn.Module) -> None:
    model.mlp.w1.weight.requires_grad_(False)


def _wide(model: nn.Module) -> None:
    model.mlp.w1.float()


def _meta(model: nn.Module) -> None:
    model.mlp.to("meta")


def _subclassed(model: nn.Module) -> None:
    class Own(nn.Linear):
        pass

    model.mlp.w1.__class__ = Own


def _tied(model: nn.Module) -> None:
    model.tied = nn.Linear(WIDTH, INNER, bias=False)
    model.tied.weight = model.mlp.w1.weight


def _narrow(model: nn.Module) -> None:
    model.mlp.w3.half()


def _quantized(model: nn.Module) -> None:
    class Packed(nn.Parameter):  # as bitsandbytes has its own
        pass

    model.mlp.w3.weight = Packed(model.mlp.w3.weight.detach())


def _sparse(model: nn.Module) -> None:
    model.mlp.w3.weight = nn.Parameter(model.mlp.w3.weight.detach().to_sparse())


def _empty(model: nn.Module) -> None:
    model.mlp.w1, model.mlp.w3 = (nn.Linear(WIDTH, 0, bias=False, dtype=BF16) for _ in range(2))
    model.mlp.w2 = nn.Linear(0, WIDTH, bias=False, dtype=BF16)


def _twice(model: nn.Module) -> None:
    model.mlp.w3 = model.mlp.w1


LEFT = {
    "is sparse": _sparse, "no elements": _empty, "called twice": _twice,
    "differ in dtype: bfloat16, float16": _narrow, "a weight is a Packed": _quantized,
    "has hooks": _hooked, "ways of its own": _parametrized, "requires_grad": _frozen, "float32": _wide,
    "on meta": _meta, "Own has ways": _subclassed, "another module's": _tied,
}  # fmt: skip


#: Which torch cannot compute either.
_NOT_RUN = ("is sparse", "float32", "on meta", "differ in dtype: bfloat16, float16")


@pytest.mark.parametrize("why", LEFT)
def test_what_cannot_be_joined_is_left_with_a_reason(why):
    model = made()
    LEFT[why](model)
    expected = by_torch(model, given()) if why not in _NOT_RUN else None
    report = fuse(model)
    said = [line for line in report.of("left") if line.name.startswith("mlp") and why in line.why]
    assert said and len(set(said)) == len(said), str(report)
    assert "mlp.{w1,w3}" not in fused(report) and "attention.{q,k,v}" in fused(report)
    if expected is not None:
        assert torch.equal(by_torch(model, given()), expected)


@pytest.mark.parametrize("both", [False, True])
def test_weights_that_are_sharded_unlike_are_left(one_rank, both):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, model = init_device_mesh("cpu", (1,)), made()
    layers = [model.mlp.w1, model.mlp.w3][: 1 + both]
    for layer, placement in zip(layers, (Shard(0), Replicate()), strict=False):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement]))
    before = [model.mlp.w1.weight, model.mlp.w3.weight]
    report = fuse(model)
    left = {line.name: line.why for line in report.of("left")}
    assert "sharded" in left["mlp.{w1,w3}"] and "attention.{q,k,v}" in fused(report)
    assert list(map(id, before)) == [id(model.mlp.w1.weight), id(model.mlp.w3.weight)]


def test_code_that_reads_a_weight_itself_reads_what_was_there(serve, kernel):
    """Within the module, where the layer is not called, and from outside."""

    class Reads(Gates):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = functional.linear(x, self.w1.weight)
            return self.w2(functional.silu(gate) * self.w3(x))

    model, plain = made(), made()
    assert "{w1,w3}" not in fused(fuse(made(Reads)))
    fuse(model)
    serve()
    x = given()
    with torch.no_grad():
        model(x)
        for name in ("mlp.w1", "mlp.w3", "attention.q", "attention.k", "attention.v"):
            weight, expected = model.get_submodule(name).weight, plain.get_submodule(name).weight
            assert torch.equal(weight, expected)
            close(functional.linear(x, weight), functional.linear(x, expected), TOLERANCE)
        model.mlp.w1.weight.mul_(2)
        plain.mlp.w1.weight.mul_(2)
        close(model(x), plain(x), TOLERANCE)


def test_hooks_that_come_later_fire(serve, kernel):
    model = made()
    fuse(model)
    serve()
    fired: list[str] = []
    for name in ("attention.k", "mlp.w1", "mlp.activation", "plain.up"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: fired.append(name))
    with torch.no_grad():
        close(model(given()), made()(given()), TOLERANCE)
    assert fired == ["attention.k", "mlp.w1", "mlp.activation", "plain.up"]


@pytest.mark.parametrize("name", ["mlp.w1", "attention.k", "attention.v", "attention.o", "plain.down"])
def test_a_bias_that_comes_or_goes_later_counts(serve, name):
    model, plain = made(), made()
    fuse(model)
    for each in (model, plain):
        layer = each.get_submodule(name)
        has_none = layer.bias is None
        layer.bias = nn.Parameter(torch.linspace(-4, 4, layer.out_features).to(BF16)) if has_none else None
    x = given()
    serve()
    with torch.no_grad():
        close(model(x), plain(x), TOLERANCE)
        exported = torch.export.export(model, (x,)).module()
        for each in (exported, torch.compile(model, backend="aot_eager")):
            close(each(x), plain(x), TOLERANCE)
        for layers in zip(model.attention.children(), plain.attention.children(), strict=True):
            close(*(layer(x) for layer in layers), TOLERANCE)


def test_what_torch_has_compiled_is_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    assert not fuse(scripted).of("fused")


def test_a_forward_that_somebody_put_into_a_layer_is_called(serve):
    model, plain = made(), made()
    fuse(model)
    for each in (model, plain):
        for layer in (each.mlp.w3, each.plain.up):
            layer.forward = lambda x, forward=layer.forward: forward(x) + 1
    serve()
    with torch.no_grad():
        close(model(given()), plain(given()), TOLERANCE)
    again = made()
    again.mlp.w1.forward = again.mlp.w1.forward
    assert "mlp.{w1,w3}" not in fused(fuse(again))


def test_methods_that_somebody_kept_are_torchs_after_unpatching(serve):
    """As accelerate's hooks keep them, and put them back."""
    model, expected = made(), by_torch(made(), given())
    fuse(model)
    kept = [(each, each.forward) for each in model.modules()]
    tunegemm.unpatch(model)
    for module, forward in kept:
        module.forward = forward
    assert torch.equal(by_torch(model, given()), expected)


def test_what_takes_a_layers_place_is_called(serve):
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + 1

    model, plain = made(), made()
    fuse(model)
    for each in (model, plain):
        each.mlp.w1, each.attention.k = Adapter(each.mlp.w1), Adapter(each.attention.k)
        each.plain.down = Adapter(each.plain.down)
    serve()
    with torch.no_grad():
        close(model(given()), by_torch(plain, given()), TOLERANCE)


def test_layers_of_other_inputs_each_compute_their_own(serve, kernel):
    class Cross(Attention):
        def forward(self, x, y):  # type: ignore[no-untyped-def]
            return self.q(x).sum() + self.k(y).sum() + self.v(y).sum()

    model, plain = made(Cross), made(Cross)
    fuse(model)
    serve()
    x, y = given(), given() * 2
    with torch.no_grad():
        for _ in range(6):
            close(model(x, y), plain(x, y), TOLERANCE)
        kernel.calls.clear()
        model(x, y)
    assert sum(out[-1] for *_, out in kernel.calls) <= WIDTH + 64, "no product is computed in vain for long"


def test_a_result_is_not_kept_beyond_a_change_of_its_input_or_weight(serve):
    model, plain = made(Attention), made(Attention)
    fuse(model)
    serve()
    x = given()
    with torch.no_grad():
        model.q(x)
        x.mul_(2)
        close(model.k(x), plain.k(x), TOLERANCE)
        model.q(x)
        model.v.weight.mul_(3)
        close(model.v(x), plain.v(x) * 3, TOLERANCE)
        model.q(x)
    y = model.k(x)
    assert y.requires_grad, "it was computed without gradients"


def _with(name: str, factor: float | None) -> Callable[[nn.Linear], None]:
    """Gives a layer other memory, which has the version that the former had, or takes it away."""

    def change(layer: nn.Linear) -> None:
        if factor is None:
            setattr(layer, name, None)
        else:
            getattr(layer, name).data = getattr(layer, name).data * factor

    return change


@pytest.mark.parametrize(
    "bias, change",
    [
        (False, _with("weight", 7.0)),
        (True, _with("weight", 7.0)),
        (True, _with("bias", 7.0)),
        (True, _with("bias", None)),
        (True, lambda layer: layer.bias.add_(1)),
    ],
)
def test_a_result_is_not_kept_beyond_what_it_was_made_of(serve, bias, change):
    model, plain = made(lambda: Attention(bias)), made(lambda: Attention(bias))
    fuse(model)
    serve()
    with torch.no_grad():
        for name in "kv":
            x = given()
            model.q(x)
            for each in (model, plain):
                change(getattr(each, name))
            close(getattr(model, name)(x), getattr(plain, name)(x), TOLERANCE)


def test_threads_in_turns_each_take_their_own(serve, kernel):
    model, plain = made(Attention), made(Attention)
    fuse(model)
    serve()
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        for seed in range(1, 8):  # more often than a layer may compute in vain
            kernel.calls.clear()
            x, y = given() * seed, given() * -seed
            for name in "qkv":
                close(getattr(model, name)(x), getattr(plain, name)(x), TOLERANCE)
                other = pool.submit(torch.no_grad()(getattr(model, name)), y).result()
                close(other, getattr(plain, name)(y), TOLERANCE)
            assert len(kernel.calls) == 2, "one product for each thread"


@pytest.mark.parametrize("call", ["autocast", "flops", "fx", "export", "compile", "vmap"])
def test_beside_torchs_machinery(serve, call):
    model, plain = made(), made()
    fuse(model)
    serve()
    x = given()
    with torch.no_grad():
        expected = plain(x)
        if call == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                result = model(x)
        elif call == "flops":
            from torch.utils.flop_counter import FlopCounterMode

            with FlopCounterMode(display=False) as ours:
                result = model(x)
            with FlopCounterMode(display=False) as torchs:
                plain(x)
            assert ours.get_total_flops() == torchs.get_total_flops()
        elif call == "fx":
            result = torch.fx.symbolic_trace(model.mlp)(x)
            expected = plain.mlp(x)
        elif call == "export":
            result = torch.export.export(model, (x,)).module()(x)
        elif call == "vmap":
            result = torch.vmap(model.mlp)(x)
            expected = plain.mlp(x)
        else:
            result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    close(result, expected, TOLERANCE)


def test_autocast_to_the_weights_dtype_is_fused(serve, kernel):
    """Norms give fp32 under it, which is cast for each layer."""

    def make() -> nn.Module:
        return nn.Sequential(Attention(), Gates())

    model, plain = made(make), made(make)
    fuse(model)
    serve()
    for dtype, merged in ((BF16, {WIDTH + 64, 2 * INNER}), (torch.float16, set())):
        for x in (given(), given().float()):
            kernel.calls.clear()
            with torch.no_grad(), torch.autocast("cpu", dtype):
                result, expected = model(x), plain(x)
            close(result, expected, TOLERANCE)
            assert {shapes[1][-1] for shapes in kernel.calls} & {WIDTH + 64, 2 * INNER} == merged
    for each in (model, plain):
        x = given().float().requires_grad_()
        with torch.autocast("cpu", BF16):
            each(x).float().square().mean().backward()
        each.seen = x.grad
    close(model.seen, plain.seen, TOLERANCE)


def test_torchs_own_layers(serve, kernel):
    layer = made(lambda: nn.TransformerEncoderLayer(WIDTH, 4, INNER, batch_first=False))
    with torch.no_grad():
        expected = layer(given())
        report = fuse(layer)
        assert fused(report) == ["linear1"] and "self_attn" in [line.name for line in report.of("left")]
        serve()
        close(layer(given()), expected, TOLERANCE)
    assert any(shapes[2][-1] == INNER for shapes in kernel.calls)
    tunegemm.unpatch(layer)
    assert type(layer) is nn.TransformerEncoderLayer


def test_torchs_fast_path_is_kept(serve, kernel):
    layer = made(lambda: nn.TransformerEncoderLayer(WIDTH, 4, INNER, batch_first=True))
    plain = by_torch(layer, given())
    fuse(layer)
    serve()
    assert torch.equal(by_torch(layer, given()), plain) and not kernel.calls


def test_what_forward_does_otherwise_is_not_replaced():
    class Branches(Gates):
        def forward(self, x):  # type: ignore[no-untyped-def]
            if x.shape[0] > 4:
                return self.w2(self.w1(x))
            return super().forward(x)

    class Twice(Gates):
        def forward(self, x):  # type: ignore[no-untyped-def]
            gate = self.activation(self.w1(x))
            return self.w2(gate * self.w3(x) + gate)

    class Counting(Gates):
        calls = 0

        def forward(self, x):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().forward(x)

    class Switching(Gates):
        def forward(self, x):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                return super().forward(x)

    class Casting(Gates):
        def forward(self, x):  # type: ignore[no-untyped-def]
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    class Trains(Gates):
        def forward(self, x):  # type: ignore[no-untyped-def]
            x = super().forward(x)
            return x * 2 if self.training else x

    for cls in (Branches, Twice, Counting, Switching, Casting, Trains):
        model = made(cls)
        before = dict(vars(model))
        assert not any("gate" in line.why for line in fuse(model)), cls.__name__
        assert type(model) is cls and dict(vars(model)) == before


def test_looking_at_a_forward_changes_nothing():
    class Logging(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.seen, self.by_name, self.steps = [[]], {"last": None}, torch.zeros(1)

        def forward(self, x):  # type: ignore[no-untyped-def]
            self.seen[0].append(x)
            self.by_name["last"] = x
            self.known = {x.shape}
            for each in (self.calls, self.steps):
                each.add_(1)
            noise = torch.rand(1)
            return super().forward(x) + noise

    class Counting(Gates):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.steps = [], torch.zeros(1)
            self.register_buffer("calls", torch.zeros(1))

    class Appending(Counting):
        def forward(self, x):  # type: ignore[no-untyped-def]
            self.seen.append(1)
            return super().forward(x)

    class Adding(Counting):
        def forward(self, x):  # type: ignore[no-untyped-def]
            self.steps.add_(1)
            return super().forward(x)

    class Buffering(Counting):
        def forward(self, x):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().forward(x)

    for cls in (Logging, Appending, Adding, Buffering):
        model = made(cls)
        before, state = dict(vars(model)), torch.get_rng_state()
        report = fuse(model)
        assert fused(report) and not any("gate" in line.why for line in report), "what it does is not lost"
        assert vars(model).keys() == before.keys() and type(model) is cls
        assert all(value is before[name] for name, value in vars(model).items())
        assert model.seen == ([[]] if cls is Logging else [])
        assert cls is not Logging or model.by_name == {"last": None}
        assert not model.calls and not model.steps and torch.equal(torch.get_rng_state(), state)
        by_torch(model, given())
        assert model.calls + model.steps + len(model.seen) >= 1


def test_results_that_must_lie_by_themselves_are_left():
    class Flat(Attention):
        def forward(self, x):  # type: ignore[no-untyped-def]
            q = self.q(x).view(-1)
            return q.sum() + self.k(x).view(-1).sum() + self.v(x).sum()

    assert "{q,k,v}" not in fused(fuse(made(Flat)))


def test_a_report_without_fusing_and_bad_models():
    report = tunegemm.patch(made(), report=True)
    assert report.patched == 9 and not report.of("fused") and len(report.of("served")) == 9
    assert str(report).count("\n") == 8
    with pytest.raises(ProblemError, match=r"not a torch\.nn\.Module"):
        tunegemm.patch(torch.zeros(1), fuse=True)  # type: ignore[arg-type]


def test_a_policy_or_mode_without_kernels_is_torchs_to_the_bit(serve, kernel, monkeypatch):
    model = made()
    expected = by_torch(model, given())
    fuse(model)
    serve(Problem(1, 8, 8))
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    assert torch.equal(by_torch(model, given()), expected) and not kernel.calls
