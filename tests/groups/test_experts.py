"""`experts`, and transformers' layers by it: beside transformers' own ways, and beside fp32 loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tunegemm
from tests.support.grouped import Loops
from tunegemm.errors import ProblemError
from tunegemm.groups import gated_experts
from tunegemm.groups.routing import Gate

EXPERTS, HIDDEN, INNER, CHOSEN = 6, 64, 48, 2


def layer(tokens: int = 11, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    index[index == 3] = 4  # nobody's choice; a token may even have one twice
    return {
        "x": torch.randn(tokens, HIDDEN, dtype=dtype),
        "gate_up": torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) * HIDDEN**-0.5,
        "down": torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype) * INNER**-0.5,
        "index": index,
        "weights": torch.rand(tokens, CHOSEN, dtype=dtype),
    }


def by_loops(
    x: Any, gate_up: Any, down: Any, index: Any, weights: Any, act: Any = functional.silu, **more: Any
) -> torch.Tensor:
    """Token after token, in fp32."""
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(HIDDEN)
        for e, weight in zip(index[t].tolist(), weights[t], strict=True):
            if not 0 <= e < len(gate_up):
                continue
            both = gate_up[e].float() @ x[t].float()
            if "gate_up_bias" in more:
                both = both + more["gate_up_bias"][e].float()
            gate, up = (both[0::2], both[1::2]) if more.get("interleaved") else both.chunk(2)
            out = down[e].float() @ (act(gate) * up)
            if "down_bias" in more:
                out = out + more["down_bias"][e].float()
            row = row + weight.float() * out
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 2, 11, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_what_loops_give(tokens: int, dtype: torch.dtype) -> None:
    given = layer(tokens, dtype)
    result = tunegemm.experts(**given)
    assert result.dtype is dtype and result.is_contiguous()
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 3e-2}
    torch.testing.assert_close(result.float(), by_loops(**given), **bound)


@pytest.mark.parametrize("chosen", [1, CHOSEN])
def test_the_stride_of_a_single_row_does_not_count(chosen: int) -> None:
    """Torch's product of groups refuses this one, which no address depends on."""
    given = layer(1)
    given |= {name: given[name][:, :chosen] for name in ("index", "weights")}
    column = given["x"].view(HIDDEN, 1).t()
    assert column.stride() == (1, 1)
    torch.testing.assert_close(tunegemm.experts(**given | {"x": column}), tunegemm.experts(**given))


@pytest.mark.parametrize(("way", "grad"), [("eager", False), ("eager", True), ("compiled", True)])
@pytest.mark.parametrize(("tokens", "chosen"), [(0, CHOSEN), (3, 0)], ids=["no tokens", "no choices"])
def test_a_layer_of_nothing_gives_nothing(
    loops: Loops, tokens: int, chosen: int, grad: bool, way: str
) -> None:
    given = layer(3, torch.bfloat16)
    given |= {"x": given["x"][:tokens]} | {
        name: given[name][:tokens, :chosen] for name in ("index", "weights")
    }
    given |= {"gate_up_bias": torch.randn(EXPERTS, 2 * INNER).bfloat16(), "weights": given["weights"].float()}
    leaves = {name: each.clone().requires_grad_(grad) for name, each in given.items() if name != "index"}
    call: Callable[..., torch.Tensor] = tunegemm.experts
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(tunegemm.experts, backend="aot_eager", fullgraph=True)
    result = call(**given | leaves)
    assert result.shape == (tokens, HIDDEN) and result.dtype is torch.bfloat16 and not result.any()
    assert result.requires_grad == grad
    if grad:
        result.float().sum().backward()
        for name, each in leaves.items():
            assert each.grad is not None and each.grad.shape == each.shape and not each.grad.any(), name


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_biases_and_rows_that_alternate(activation: Any) -> None:
    given = layer()
    act: dict[str, Callable[..., Any]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": functional.relu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    more: dict[str, Any] = {
        "gate_up_bias": torch.randn(EXPERTS, 2 * INNER),
        "down_bias": torch.randn(EXPERTS, HIDDEN),
        "interleaved": True,
    }
    result = tunegemm.experts(**given, **more, activation=activation)
    expected = by_loops(**given, **more, act=act[activation])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("nobodys", "index_dtype"),
    [(EXPERTS, torch.int64), (-1, torch.int32), (2**31 - 1, torch.int32), (-(2**31), torch.int64)],
)
def test_experts_of_other_processes_add_nothing(nobodys: int, index_dtype: torch.dtype) -> None:
    """By every way: with gradients, without, and compiled."""
    given = layer()
    given["index"] = given["index"].to(index_dtype)
    given["index"][::3, 0] = nobodys
    given["index"][5] = nobodys
    given["weights"][5] = float("inf")  # which a product with zeros would not leave alone
    expected = by_loops(**given)
    torch.testing.assert_close(tunegemm.experts(**given, elsewhere=True), expected, rtol=1e-4, atol=1e-4)
    for each in ("x", "gate_up", "down", "weights"):
        given[each].requires_grad_()
    result = tunegemm.experts(**given, elsewhere=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    grad, of_weights = torch.autograd.grad(result.square().sum(), (given["x"], given["weights"]))
    assert bool(grad.isfinite().all()) and not bool(grad[5].any()) and not bool(of_weights[5].any())


@pytest.mark.parametrize(("number", "named"), [(-1, "-1"), (EXPERTS, str(EXPERTS)), (99, "99")])
def test_on_a_cpu_numbers_of_no_expert_are_named(number: int, named: str) -> None:
    given = layer()
    given["index"][3, 1] = number
    for grad in (False, True):
        with pytest.raises(ProblemError, match=f"index names expert {named} of 6; give numbers from 0 on"):
            tunegemm.experts(**given | {"x": given["x"].clone().requires_grad_(grad)})
    torch.vmap(lambda x: tunegemm.experts(x, *list(given.values())[1:]))(given["x"][None])  # not looked at


def test_gradients_are_those_of_loops() -> None:
    given = layer()
    differentiated = ("x", "gate_up", "down", "weights")
    found = []
    for call in (tunegemm.experts, by_loops):
        own = given | {name: given[name].clone().requires_grad_() for name in differentiated}
        call(**own).square().sum().backward()
        found.append([own[name].grad for name in differentiated])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("tokens", "most"), [(1, 5), (11, 6)])
def test_a_layer_asks_torch_for_few_operators(
    loops: Loops, tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What costs the host's time in eager calls: beside views, memory and the two launches."""
    given = layer(tokens, dtype=torch.bfloat16)
    if tokens > 1:
        given["index"][0, 0] = EXPERTS
    more = {"elsewhere": tokens > 1}
    monkeypatch.setattr(gated_experts, "check_index", lambda index, count: None)  # a GPU's is not looked at
    with torch.no_grad():
        tunegemm.experts(**given, **more)
        loops.calls.clear()
        loops.quiet = True
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            tunegemm.experts(**given)
        loops.quiet = False
        result = tunegemm.experts(**given, **more)
    assert len(loops.calls) == 4
    torch.testing.assert_close(result.float(), by_loops(**given), rtol=5e-2, atol=3e-2)
    free = {
        "to", "reshape", "view", "mT", "slice", "new_empty", "empty_like", "unsqueeze", "expand", "contiguous"
    }  # fmt: skip
    of_torch = [
        event.name.removeprefix("aten::")
        for event in profile.events()
        if event.name.startswith("aten::") and not (event.cpu_parent and "aten::" in event.cpu_parent.name)
    ]
    asked = [name for name in of_torch if name not in free or name == "contiguous"]
    assert len(asked) <= most, asked


@pytest.mark.parametrize("tokens", [1, 11])
def test_autocast_casts_no_step_of_a_layer(tokens: int) -> None:
    """On a GPU it casts products of a matrix and a vector, too, which on a CPU it does not."""
    given = layer(tokens)
    asked: set[str] = set()

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with torch.autocast("cpu", torch.bfloat16), Asked():
        result = tunegemm.experts(**given)
    torch.testing.assert_close(result, by_loops(**given), rtol=1e-4, atol=1e-4)
    assert "_grouped_mm" in asked and not asked & {"mv", "addmv", "mm", "addmm", "bmm", "matmul"}


def test_gradients_under_autocast_to_the_other_dtype() -> None:
    """On a CPU it refuses some functions of operands that are neither of its dtype nor fp32."""
    found = []
    for on in (False, True):
        given = layer(dtype=torch.float16)
        given["x"].requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            result = tunegemm.experts(**given)
        result.float().sum().backward()
        found.append((result, given["x"].grad))
    torch.testing.assert_close(*found)


def test_numbers_are_kept_where_nothing_looks_on() -> None:
    kept = gated_experts.kept
    kept.clear()
    given = layer(70, dtype=torch.bfloat16)
    first = tunegemm.experts(**given)
    assert {(step, size) for _, step, size in kept} == {(1, 4096), (CHOSEN, 4096)}
    tensors = dict(kept)
    with torch._subclasses.FakeTensorMode() as mode:
        tunegemm.experts(**{name: mode.from_tensor(each) for name, each in given.items()})
    assert torch.equal(tunegemm.experts(**given), first)
    assert kept.keys() == tensors.keys() and all(kept[key] is each for key, each in tensors.items())


def test_with_gradients_or_a_gate_of_ones_own_kernels_compute_the_products(loops: Loops) -> None:
    given = layer(dtype=torch.bfloat16)
    plain = tunegemm.experts(**given, activation=lambda both: both[:, :INNER] * both[:, INNER:])
    assert plain.shape == given["x"].shape
    given["gate_up"].requires_grad_()
    tunegemm.experts(**given).sum().backward()
    # The last is the gradient of what went into down.
    assert len(loops.calls) == 5 and all(len(call) == 4 for call in loops.calls)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_parameters_of_an_activation_have_gradients(loops: Loops, elsewhere: bool) -> None:
    """Rows of experts of other processes, whose gradients are memory as it was, add nothing to them."""
    given, found = layer(dtype=torch.bfloat16), []
    if elsewhere:
        given["index"][::2] = -1
    for call in (partial(tunegemm.experts, elsewhere=elsewhere), by_loops):
        scale, shift = (torch.full((INNER,), value, requires_grad=True) for value in (2.0, 0.5))
        act = lambda gate: functional.silu(gate) * scale + shift  # noqa: B023, E731
        own = {"activation": lambda both: (act(both[:, :INNER]) * both[:, INNER:]).bfloat16()}  # noqa: B023
        call(**given, **({"act": act} if call is by_loops else own)).float().square().sum().backward()
        found.append((scale.grad, shift.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-1)
    assert loops.calls


def test_an_activation_need_not_be_hashable() -> None:
    @dataclass
    class Scaled:
        scale: float

        def __call__(self, both: torch.Tensor) -> torch.Tensor:
            return self.scale * both[:, :INNER]

    given = layer()
    one, two = (tunegemm.experts(**given, activation=Scaled(scale)) for scale in (1.0, 2.0))
    torch.testing.assert_close(two, 2 * one)


def test_a_number_for_the_tokens_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        tunegemm.experts(3, *list(layer().values())[1:])  # type: ignore[arg-type]


WRONG: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "no tensor": ({"down": lambda _: None}, "down is a NoneType; give a tensor"),
    "no tensor first": ({"x": lambda _: None}, "x is a NoneType; give a tensor"),
    "numpy's": ({"gate_up": lambda gate_up: gate_up.numpy()}, "gate_up is a ndarray; give a tensor"),
    "names in a list": ({"activation": lambda _: ["silu"]}, r"\['silu'\] has no gated form"),
    "an odd number of rows": (
        {"gate_up": lambda g: torch.cat([g, g[:, :1]], 1)},
        r"gate_up \(6, 97, 64\).*give \(tokens, hidden\)",
    ),
    "float64": (
        {name: lambda each: each.double() for name in ("x", "gate_up", "down")},
        "x is torch.float64; give",
    ),
    "another device": ({"index": lambda index: index.to("meta")}, "index on meta, weights on cpu; give all"),
    "weights elsewhere": ({"down": lambda down: down.to("meta")}, "down on meta, index on cpu"),
    "no rows of gate and up": (
        {"activation": lambda _: lambda both: both},
        r"activation returned \(22, 96\) .*; return \(22, 48\)",
    ),
    "nothing": ({"activation": lambda _: lambda both: None}, "activation returned None; return"),
    "another dtype": (
        {"activation": lambda _: lambda both: both[:, :48].half()},
        "float16; return .* of torch.float32",
    ),
    "a bias without tokens": (
        {
            "x": lambda x: x[:0],
            "index": lambda i: i[:0],
            "weights": lambda w: w[:0],
            "down_bias": lambda _: torch.ones(6, 3),
        },
        r"bias has shape \(6, 3\); give",
    ),
    "a list": ({"index": lambda index: index.tolist()}, "index is a list; give a tensor"),
    "activation": ({"activation": lambda _: "swish"}, "'swish' has no gated form; use silu, gelu"),
    "down": ({"down": lambda d: d.mT}, r"down \(6, 48, 64\); give \(tokens, hidden\)"),
    "halves": ({"gate_up": lambda g: g[:, :-2]}, r"gate_up \(6, 94, 64\)"),
    "weights": ({"weights": lambda w: w[:, :1]}, r"index \(11, 2\) and weights \(11, 1\) of 11 tokens"),
    "tokens": ({"x": lambda x: x[:5]}, "of 5 tokens"),
    "dtypes": ({"x": lambda x: x.half()}, r"x is torch.float16, gate_up torch.float32, down torch.float32"),
    "none": ({"gate_up": lambda g: g[:0], "down": lambda d: d[:0]}, r"gate_up \(0, 96, 64\) is empty; give"),
    "no hidden values": (
        {"x": lambda x: x[:, :0], "gate_up": lambda g: g[..., :0], "down": lambda d: d[:, :0]},
        r"gate_up \(\d+, 96, 0\) is empty; give at least one of each extent",
    ),
    "no inner values": ({"gate_up": lambda g: g[:, :0], "down": lambda d: d[..., :0]}, r", 0, 64\) is empty"),
    "values apart": (
        {"gate_up": lambda g: g.repeat_interleave(2, 2)[..., ::2]},
        r"gate_up has strides \(12288, 128, 2\)",
    ),
    "one line for all": (
        {"down": lambda d: d[:, :1].expand(d.shape)},
        r"down has strides \(\d+, 0, 1\); give",
    ),
    "values that torch reads, and a wrong number": (
        {
            "down": lambda d: torch.cat((d.view(-1)[:1], d.view(-1)))[1:].view(d.shape),
            "index": lambda i: i + 9,
        },
        r"index names expert \d+ of",
    ),
    "integers": ({"weights": lambda w: w.long()}, r"weights are torch.int64; give floats"),
    "floats": ({"index": lambda i: i.float()}, r"index is torch.float32; give numbers of experts"),
}


def test_what_is_true_interleaves() -> None:
    given = layer()
    for value in (0, None, 2, "yes"):
        found = tunegemm.experts(**given, interleaved=value)  # type: ignore[arg-type]
        assert torch.equal(found, tunegemm.experts(**given, interleaved=bool(value)))


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_meta_tensors_give_one(tokens: int) -> None:
    given = {name: each.to("meta") for name, each in layer(tokens or 9, torch.bfloat16).items()}
    if not tokens:
        given |= {name: given[name][:0] for name in ("x", "index", "weights")}
    found = tunegemm.experts(**given)
    assert found.is_meta and found.shape == given["x"].shape and found.dtype is given["x"].dtype


@pytest.mark.parametrize("name", WRONG)
def test_operands_that_are_no_layer_are_named(name: str) -> None:
    changes, words = WRONG[name]
    given = layer()
    with pytest.raises(ProblemError, match=words):
        tunegemm.experts(**given | {key: change(given.get(key)) for key, change in changes.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_experts_are_looked_at_where_that_is_asked_for(
    loops: Loops, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEGEMM_CHECK_GROUPS", "1")
    tunegemm.refresh()
    given = layer(dtype=dtype)
    tunegemm.experts(**given)
    given["index"][3, 1] = EXPERTS
    with pytest.raises(ProblemError, match="index names expert 6 of 6; give numbers from 0 on"):
        tunegemm.experts(**given)
    tunegemm.experts(**given, elsewhere=True)
    given["index"][3, 1] = -1
    with pytest.raises(ProblemError, match="index names expert -1 of 6"):
        tunegemm.experts(**given)
    tunegemm.experts(**given, elsewhere=True)


# ---- transformers -----------------------------------------------------------------------------------

SIZE = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256,
}  # fmt: skip


def model(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from tunegemm.engines import transformers as ours

    ours.register()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**SIZE))
    for name, parameter in made.named_parameters():
        if "experts" in name:  # which transformers leaves as the memory was
            torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_models_of_transformers_are_as_their_own_ways(family: str) -> None:
    made = model(family)
    tokens = torch.arange(24).view(2, 12) % 128
    results: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for way in ("eager", "grouped_mm", "tunegemm"):
        made.set_experts_implementation(way)
        made.zero_grad()
        logits = made(tokens).logits
        logits.square().mean().backward()
        grads = [p.grad for name, p in made.named_parameters() if "experts" in name]
        with torch.no_grad():
            torch.testing.assert_close(made(tokens).logits, logits, rtol=1e-4, atol=1e-5)
        results[way] = (logits.detach(), [grad.clone() for grad in grads])
    for way in ("eager", "grouped_mm"):
        torch.testing.assert_close(results["tunegemm"][0], results[way][0], rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(results["tunegemm"][1], results[way][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_generation_decodes_by_our_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("Qwen3Moe")
    prompt = torch.arange(5)[None] + 3
    made.set_experts_implementation("eager")
    expected = made.generate(prompt, max_new_tokens=6, do_sample=False)
    made.set_experts_implementation("tunegemm")
    assert torch.equal(made.generate(prompt, max_new_tokens=6, do_sample=False), expected)


def test_a_gate_of_a_models_own_is_called() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations import moe

    from tunegemm.engines import transformers as ours

    default = moe._default_apply_gate
    for family, expected in (("Mixtral", "silu"), ("GptOss", Gate())):
        module = next(m for m in model(family).modules() if type(m).__name__ == f"{family}Experts")
        assert ours.activation_of(module, default) == expected
    other = type("Other", (type(module),), {"_apply_gate": lambda self, both: both[..., ::2].clamp(max=7.0)})
    module.__class__ = other
    assert ours.activation_of(module, default) == module._apply_gate


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_code_leaves_out_experts_of_other_processes(grad: bool) -> None:
    given = layer(dtype=torch.bfloat16)
    given["index"][::3, 0] = -1
    given["index"][1] = EXPERTS
    expected = by_loops(**given)
    given["x"].requires_grad_(grad)
    torch._dynamo.reset()
    compiled = torch.compile(tunegemm.experts, backend="aot_eager", fullgraph=True)
    result = compiled(**given, elsewhere=True)
    torch.testing.assert_close(result.float(), expected, rtol=5e-2, atol=3e-2)
