"""Layers that `patch(model, fuse=True)` computes as one, with kernels planted, and what it leaves."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import tunegemm
from tests.support.fusing import close
from tunegemm.describe.problem import Problem
from tunegemm.errors import ProblemError, TunegemmWarning
from tunegemm.serve.launchers import Prepared
from tunegemm.serve.torch.layers.joined import Joined
from tunegemm.serve.torch.layers.report import Report

BF16 = torch.bfloat16
WIDTH, INNER, ROWS = 64, 96, 16


class Attention(nn.Module):
    """Attention as most model libraries write it."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias) for width in (WIDTH, 32, 32))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        q, k, v = (layer(x).view(*lead, -1, 16).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(-3, -2).reshape(*lead, -1))


class Gates(nn.Module):
    """torchtune's way to write Llama's MLP."""

    def __init__(self, activation: Callable[..., torch.Tensor] | None = None, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER, bias)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)
        self.activation = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.w1(x))
        if self.w3 is not None:
            h = h * self.w3(x)
        return self.w2(h)


class Plain(nn.Module):
    """An MLP with a bias, and a stream to which its result is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))


class Model(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.plain = Attention(), Gates(), Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return self.plain(x + self.mlp(x))


def made(
    make: Callable[[], nn.Module] = Model, *, train: bool = False, dtype: torch.dtype = BF16
) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).train(train)


def given(*lead: int) -> torch.Tensor:
    return torch.randn(*(lead or (2, ROWS // 2)), WIDTH, generator=torch.Generator().manual_seed(1)).to(BF16)


def fuse(model: nn.Module) -> Report:
    return tunegemm.patch(model, fuse=True, report=True)


def fused(report: Report) -> list[str]:
    return [line.name for line in report.of("fused")]


def by_torch(model: nn.Module, *x: torch.Tensor) -> torch.Tensor:
    """What a model gives where nothing is planted: kernels are CUDA's."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        return model(*x)


ALL = ["attention.o", "attention.{q,k,v}", "mlp.w2", "mlp.{w1,w3}", "plain.down", "plain.up"]
TOLERANCE = 3e-2


def test_a_model_is_fused_and_served(serve, kernel):
    model = made()
    with torch.no_grad():
        expected = model(given())
    report = fuse(model)
    assert sorted(fused(report)) == ALL and report.patched == 9
    asked = serve()
    with torch.no_grad():
        close(model(given()), expected, TOLERANCE)
    assert {(problem.n, problem.epilogue) for problem in asked.asked} == {
        (WIDTH + 64, ""), (WIDTH, "residual"), (2 * INNER, "swiglu"), (INNER, "bias_n+gelu_tanh"),
        (WIDTH, "bias_n+residual"),
    }  # fmt: skip
    assert len(kernel.calls) == 6


def test_what_has_no_kernel_is_torchs_to_the_bit():
    for make in (Model, lambda: Attention(bias=True), lambda: Gates(bias=True)):
        model = made(make)
        expected = by_torch(model, given())
        assert fused(fuse(model))
        assert torch.equal(by_torch(model, given()), expected)
        assert torch.equal(by_torch(model, given(3)[None]), by_torch(copy.deepcopy(model), given(3)[None]))


def _joined(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether q, k and v are of one product; they are torch's, and right."""
    parameters = [(layer.weight, layer.bias) for layer in (model.q, model.k, model.v)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)
        results = [layer(x) for layer in (model.q, model.k, model.v)]
    is_joined = len({each.untyped_storage().data_ptr() for each in results}) == 1
    expected = [functional.linear(x, *each) for each in parameters]
    if is_joined:
        weight = torch.cat([weight for weight, _ in parameters])
        bias = None if model.q.bias is None else torch.cat([bias for _, bias in parameters])
        expected = list(functional.linear(x, weight, bias).split([WIDTH, 32, 32], -1))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    return is_joined


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_without_a_kernel_are_one_product_of_torchs(serve, kernel, bias):
    model = made(lambda: Attention(bias))
    fuse(model)
    serve(Problem(1, 8, 8))
    with torch.no_grad():
        for _ in range(3):
            assert _joined(model, given(2, 128)) and _joined(model, given(1, 1))
            assert not _joined(model, given(1, 257)), "it gains nothing there"
        model.k.weight.data = model.k.weight.data * 2
        assert not _joined(model, given()), "one is elsewhere"
    assert not kernel.calls


def test_where_one_product_of_torchs_would_mean_something_else(serve, monkeypatch):
    model = made(Attention)
    fuse(model)
    serve(prepared=Prepared(None))
    assert not _joined(model, given()), "gradients are wanted"
    with torch.no_grad():
        assert _joined(model, given())
        with torch.autocast("cpu", torch.float16):
            assert not _joined(model, given()), "weights are cast"
        with tunegemm.policy("deterministic"):
            assert _joined(model, given())
        with tunegemm.policy("batch_invariant"):
            assert not _joined(model, given()), "a row's bits would depend on how many there are"
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|incompatible"):
            model.q(given()[..., 1:])
        with pytest.raises(RuntimeError, match="dtype"):
            model.q(given().float())
        monkeypatch.setenv("TUNEGEMM_MODE", "off")
        serve(prepared=Prepared(None))
        assert not _joined(model, given())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_gates(serve, kernel, name, bias):
    activation = {
        "silu": functional.silu, "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[name]  # fmt: skip
    model = made(lambda: Gates(activation, bias))
    with torch.no_grad():
        expected = model(given())
        lines = fused(fuse(model))
        serve()
        close(model(given()), expected, TOLERANCE)
    assert (lines, len(kernel.calls)) == (["{w1,w3}"], 2)
    widths = {shapes[2][-1] for shapes in kernel.calls} - {WIDTH}
    assert widths == {2 * INNER if bias or name == "sigmoid" else INNER}, "with the gate, or two results"


def test_memory_is_not_doubled():
    model = made()
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    fuse(model)
    q, k, v = (layer.weight for layer in (model.attention.q, model.attention.k, model.attention.v))
    assert len({each.untyped_storage().data_ptr() for each in (q, k, v)}) == 1
    assert q.untyped_storage().nbytes() == 2 * (q.numel() + k.numel() + v.numel())
    gate, up = model.mlp.w1.weight, model.mlp.w3.weight
    assert gate.stride() == (2 * WIDTH, 1) and up.data_ptr() == gate.data_ptr() + 2 * WIDTH
    assert model.mlp.w2.weight.untyped_storage().nbytes() == 2 * INNER * WIDTH
    tunegemm.unpatch(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]) and each.is_contiguous()
        assert each.untyped_storage().nbytes() == each.nbytes
    assert "_fused_with" not in vars(model.mlp.w1) and type(model.mlp) is Gates


def test_fused_unpatched_and_fused_again(serve, kernel):
    model = made()
    with torch.no_grad():
        expected = model(given())
    for _ in range(2):
        assert sorted(fused(fuse(model))) == ALL
        again = fuse(model)
        assert again.patched == 0 and not again.of("left")
        assert tunegemm.unpatch(model) == 9
        assert torch.equal(by_torch(model, given()), expected)
    assert tunegemm.patch(model) == 9 and sorted(fused(fuse(model))) == ALL
    serve()
    with torch.no_grad():
        close(model(given()), expected, TOLERANCE)
    assert len(kernel.calls) == 6


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved], ids=["deepcopy", "pickle"])
def test_copies_are_fused_and_apart(serve, kernel, copied):
    model = made()
    fuse(model)
    other = copied(model)
    assert other.attention.q.weight.untyped_storage().nbytes() == 2 * WIDTH * (WIDTH + 64)
    assert other.attention.q.weight.data_ptr() != model.attention.q.weight.data_ptr()
    with torch.no_grad():
        model.mlp.w1.weight.zero_()
    expected = by_torch(made(), given())
    serve()
    with torch.no_grad():
        close(other(given()), expected, TOLERANCE)
    assert len(kernel.calls) == 6 and tunegemm.unpatch(other) == 9 and type(other.mlp) is Gates


def test_loading_into_a_fused_model(serve, kernel):
    model, other = made(), made()
    with torch.no_grad():
        for each in other.parameters():
            each.add_(0.01)
    expected = by_torch(other, given())
    fuse(model)
    serve()
    for assign in (False, True):
        model.load_state_dict(other.state_dict(), assign=assign)
        kernel.calls.clear()
        with torch.no_grad():
            close(model(given()), expected, TOLERANCE)
        assert len(kernel.calls) == 6, "they are together again"


def test_what_moves_weights_is_noticed(serve, kernel):
    model = made()
    fuse(model)
    serve()
    model.half()
    expected = by_torch(made(dtype=torch.float16), given().half())
    with torch.no_grad():
        close(model(given().half()), expected, TOLERANCE)
        assert len(kernel.calls) == 6
        for layer in (model.attention.k, model.mlp.w3, model.plain.up):
            layer.weight.data = layer.weight.data * 2
        kernel.calls.clear()
        result = model(given().half())
    assert len(kernel.calls) == 9, "layers whose weights are elsewhere are served each by itself"
    tunegemm.unpatch(model)
    close(result, by_torch(model, given().half()), TOLERANCE)
    fuse(model)
    model.float()
    assert by_torch(model, given().float()).dtype is torch.float32


def test_an_optimizers_steps_are_seen(serve):
    model = made()
    fuse(model)
    serve()
    for options in ({}, {"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        plain = copy.deepcopy(model)
        tunegemm.unpatch(plain)
        with torch.no_grad():
            close(model(given()), plain(given()), TOLERANCE)


def test_safetensors_saves_as_before(tmp_path):
    saving = pytest.importorskip("safetensors.torch")
    for train in (False, True):  # weights in turns, and after one another
        model = made(train=train)
        expected = {name: each.clone() for name, each in model.state_dict().items()}
        fuse(model)
        saving.save_file(model.state_dict(), tmp_path / "a")
        saving.save_model(model, str(tmp_path / "b"))
        for name in "ab":
            found = saving.load_file(tmp_path / name)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], each) for key, each in expected.items())
        saving.load_model(model, str(tmp_path / "b"))


# Training


def test_gradients_of_merged_products(serve, kernel):
    plain, model = made(train=True), made(train=True)
    report = fuse(model)
    assert "mlp.{w1,w3}" in fused(report) and model.mlp.w1.weight.is_contiguous()
    assert "silu and the product with it are torch's" in str(report)
    serve()
    for _ in range(2):  # which add up
        for each in (plain, model):
            x = given().requires_grad_()
            each(x).square().mean().backward()
            each.seen = x.grad
    close(model.seen, plain.seen, TOLERANCE)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and one.grad.shape == other.grad.shape, name
        close(one.grad, other.grad, 6e-2)
    merged = [shapes for shapes in kernel.calls if shapes[1] == (WIDTH, WIDTH + 64)]
    assert len(merged) == 2, "forward, once a step"


def test_frozen_weights_and_inputs_keep_nothing(serve):
    model = made(Attention, train=True)
    fuse(model)
    serve()
    model.q.weight.requires_grad_(False)
    model(given()).sum().backward()
    assert model.q.weight.grad is None and model.k.weight.grad is not None
    for layer in (model.k, model.v, model.o):
        layer.requires_grad_(False)
    x = given().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("bias", [False, True])
def test_derivatives_of_joined_results(bias):
    def run(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, rest = torch.cat(parameters[:2]).detach(), parameters[2:]
        whole = functional.linear(x, weight, torch.cat(rest) if rest else None).detach()
        return Joined.apply(whole, x, weight.t(), *parameters)

    shapes = [(2, 3, 5), (4, 5), (2, 5), *([(4,), (2,)] if bias else [])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(run, inputs) and torch.autograd.gradgradcheck(run, inputs)


def test_results_are_written_into_apart(serve):
    class InPlace(Attention):
        def forward(self, x):  # type: ignore[no-untyped-def]
            q, k, v = self.q(x), self.k(x), self.v(x)
            k.add_(1)
            return torch.cat((q, k.mul_(2), v), -1)

    model = made(InPlace, train=True)
    expected = model(given())
    assert fused(fuse(model)) == ["{q,k,v}"]
    serve()
    close(model(given()), expected, TOLERANCE)
    model(given()).sum().backward()


# What is left


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


LEFT = {
    "has hooks": _hooked, "ways of its own": _parametrized, "requires_grad": _frozen, "float32": _wide,
    "on meta": _meta, "Own has ways": _subclassed, "another module's": _tied,
}  # fmt: skip


@pytest.mark.parametrize("why", LEFT)
def test_what_cannot_be_joined_is_left_with_a_reason(why):
    model = made()
    LEFT[why](model)
    expected = by_torch(model, given()) if why not in ("float32", "on meta") else None
    report = fuse(model)
    assert any(line.name.startswith("mlp") and why in line.why for line in report.of("left")), str(report)
    assert "mlp.{w1,w3}" not in fused(report) and "attention.{q,k,v}" in fused(report)
    if expected is not None:
        assert torch.equal(by_torch(model, given()), expected)


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
