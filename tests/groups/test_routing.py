"""What lies around a layer's products, by kernels for CPU tensors: `experts` beside itself without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import tunegemm
from tests.groups.test_experts import EXPERTS, HIDDEN, INNER, by_loops, layer
from tests.support.grouped import Loops
from tests.support.processes import run_interpreted
from tunegemm.errors import ArtifactError, ProblemError
from tunegemm.generate import routing as kernels
from tunegemm.generate.takes import UNIT_BYTES, NotTaken
from tunegemm.groups import routing
from tunegemm.groups.routing import Gate, Routing
from tunegemm.model.grouped import configs

BF16 = torch.bfloat16


class Steps:
    """Kernels for CPU tensors, in torch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.found = True
        self.error: Exception | None = None

    def load(self, name: str, index: int) -> Any:
        if not self.found:
            return None

        def bind(ctas: int, **numbers: int) -> Callable[..., None]:
            def launch(*tensors: torch.Tensor) -> None:
                if self.error is not None:
                    raise self.error
                self.calls.append(name)
                getattr(self, name.split()[0])(name, numbers, *tensors)

            return launch

        return bind

    def route(self, name: str, numbers: Any, index: Any, x: Any, place: Any, ends: Any, rows: Any) -> None:
        flat = index.reshape(-1).long()
        flat = torch.where((flat < 0) | (flat >= numbers["count"]), numbers["count"], flat)
        ids, order = flat.sort(stable=True)
        ends.copy_(torch.searchsorted(ids, torch.arange(numbers["count"]), right=True))
        place[order] = torch.arange(len(order), dtype=torch.int32)
        rows.copy_(x[order // numbers["chosen"]])

    def tally(self, name: str, numbers: Any, index: Any, counts: Any) -> None:
        assert counts.numel() == -(-index.numel() // kernels.SPREAD_ROWS) * kernels.BINS

    def spread(self, name: str, numbers: Any, index: Any, x: Any, counts: Any, *others: Any) -> None:
        self.route(name, numbers, index, x, *others)

    def few_up(self, name: str, numbers: Any, index: Any, x: Any, gate_up: Any, bias: Any, rows: Any) -> None:
        flat, chosen = index.reshape(-1).long(), numbers["chosen"]
        inside = torch.where((flat >= 0) & (flat < numbers["count"]), flat, 0)
        both = torch.einsum("rk,rnk->rn", x.repeat_interleave(chosen, 0).float(), gate_up[inside].float())
        both += bias[inside].float() if numbers["has_bias"] else 0.0
        self.gate(f"gate {numbers['turns'] == 2}", numbers, both, rows)

    def few_down(
        self, name: str, numbers: Any, index: Any, rows: Any, down: Any, bias: Any, weights: Any, out: Any
    ) -> None:
        here = (index >= 0) & (index < numbers["count"])
        inside = torch.where(here, index.long(), 0)
        each = torch.einsum("tjk,tjnk->tjn", rows.view(*index.shape, -1).float(), down[inside].float())
        each += bias[inside].float() if numbers["has_bias"] else 0.0
        out.copy_(torch.where(here[..., None], each * weights.float()[..., None], 0.0).sum(1))

    def combine(
        self, name: str, numbers: Any, rows: Any, place: Any, ends: Any, weights: Any, out: Any
    ) -> None:
        place = place.long().view(weights.shape)
        each = torch.where((place < ends[-1])[..., None], rows[place].float(), 0.0)
        out.copy_((each * weights.float()[..., None]).sum(1))

    def gate(self, name: str, numbers: Any, both: Any, out: Any) -> None:
        slope, limit, offset = (
            float(torch.tensor(numbers[each], dtype=torch.int32).view(torch.float32))
            for each in ("slope", "limit", "offset")
        )
        out.copy_(Gate(slope, limit, offset, name.endswith("True"))(both.float()))


@pytest.fixture
def steps(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> Steps:
    found = Steps()
    monkeypatch.setattr(routing, "routing", Routing(found.load))
    return found


def test_weights_on_another_device_are_named(steps: Steps) -> None:
    given = layer(11, BF16)
    with pytest.raises(ProblemError, match="x is on cpu, weights on meta; give all on one device"):
        tunegemm.experts(**given | {"weights": given["weights"].to("meta")})
    assert steps.calls[0].startswith("route")


BOUND = {"rtol": 5e-2, "atol": 3e-2}


@pytest.mark.parametrize("tokens", [1, 11, 800])  # between the last two down's product is torch's
@pytest.mark.parametrize(
    ("weights_dtype", "index_dtype"), [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)]
)
def test_a_layer_is_four_launches_and_of_one_token_two(
    steps: Steps, loops: Loops, tokens: int, weights_dtype: Any, index_dtype: Any
) -> None:
    given = layer(tokens, torch.bfloat16)
    given |= {"weights": given["weights"].to(weights_dtype), "index": given["index"].to(index_dtype)}
    of_weights = "fp32" if weights_dtype is torch.float32 else "bf16"
    torch._dynamo.reset()
    for call in (tunegemm.experts, torch.compile(tunegemm.experts, backend="aot_eager", fullgraph=True)):
        steps.calls.clear()
        loops.calls.clear()
        result = call(**given)
        if tokens == 1:
            assert steps.calls == ["few_up bf16", f"few_down bf16 {of_weights} 1"] and not loops.calls
        else:
            assert steps.calls == [f"route {1 if tokens < 256 else 8}", f"combine bf16 {of_weights}"]
            assert len(loops.calls) == 2
        torch.testing.assert_close(result.float(), by_loops(**given), **BOUND)


def test_a_layer_asks_torch_for_memory_alone(steps: Steps, loops: Loops) -> None:
    given = layer(dtype=torch.bfloat16)
    tunegemm.experts(**given)
    loops.quiet = True
    steps.route = steps.combine = lambda *_: None  # type: ignore[method-assign,assignment]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        tunegemm.experts(**given)
    asked = [
        event.name.removeprefix("aten::") for event in profile.events()
        if event.name.startswith("aten::") and not (event.cpu_parent and "aten::" in event.cpu_parent.name)
    ]  # fmt: skip
    of_numbers = {"aminmax", "item"}  # a look at numbers of experts, on a CPU alone
    assert set(asked) <= {"new_empty", "mT", "to"} | of_numbers, asked


def test_many_choices_take_two_launches_and_more_are_sorted_by_torch(steps: Steps) -> None:
    given = layer(8, torch.bfloat16)
    expected = by_loops(**given)
    for tokens, calls in (
        (kernels.MOST_CHOICES // 2 + 1, ["tally", "spread", "combine bf16 bf16"]),
        (kernels.MOST_SPREAD // 2 + 1, ["combine bf16 bf16"]),
    ):
        steps.calls.clear()
        again = torch.arange(tokens) % 8
        many = given | {name: given[name][again].contiguous() for name in ("x", "index", "weights")}
        result = tunegemm.experts(**many)
        assert steps.calls == calls
        torch.testing.assert_close(result.float(), expected[again], **BOUND)


def test_numbers_of_no_expert_add_nothing(steps: Steps) -> None:
    given = layer(dtype=torch.bfloat16)
    given["index"][::3, 0] = EXPERTS
    given["index"][5] = EXPERTS + 7
    expected = by_loops(**given)
    for steps.found in (True, False):
        routing.routing.launches.clear()
        result = tunegemm.experts(**given, elsewhere=True)
        torch.testing.assert_close(result.float(), expected, **BOUND)
        assert not bool(result[5].any())
    given["index"][5] = -1
    steps.found = True
    routing.routing.launches.clear()
    assert torch.equal(tunegemm.experts(**given, elsewhere=True)[:5].isfinite().all(), torch.tensor(True))


def test_a_gate_with_limits_has_a_kernel(steps: Steps) -> None:
    given = layer(dtype=torch.bfloat16)
    given["gate_up"] = (given["gate_up"] * 20).mT.contiguous().mT  # n contiguous, as gpt-oss has it
    for gate in (Gate(), Gate(1.0, 2.0, 0.0, interleaved=False)):
        steps.calls.clear()
        result = tunegemm.experts(**given, activation=gate)
        assert steps.calls[1] == f"gate bf16 {gate.interleaved}"
        expected = tunegemm.experts(**given, activation=lambda both, gate=gate: gate(both))
        torch.testing.assert_close(result, expected, rtol=5e-2, atol=0.3)
    steps.calls.clear()
    tunegemm.experts(**given)  # silu of n-major weights
    assert steps.calls[1] == "gate bf16 False"


@pytest.mark.parametrize("tokens", [1, 11])
def test_a_class_made_of_a_gate_computes_its_own(steps: Steps, tokens: int) -> None:
    class Doubled(Gate):
        def __call__(self, both: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(both)

    given = layer(tokens, BF16)
    with torch.no_grad():
        once, twice = (tunegemm.experts(**given, activation=gate()) for gate in (Gate, Doubled))
    torch.testing.assert_close(twice, 2 * once, **BOUND)


@pytest.mark.parametrize("trained", [False, True])
def test_a_function_with_gradients_on_takes_the_kernels_until_a_parameter_needs_one(
    steps: Steps, loops: Loops, trained: bool
) -> None:
    given, found = layer(dtype=torch.bfloat16), []
    for call in (tunegemm.experts, by_loops):
        scale = torch.full((INNER,), 2.0, dtype=BF16, requires_grad=trained)
        act = lambda gate: functional.silu(gate) * scale  # noqa: B023, E731
        own = {"activation": lambda both: act(both[:, :INNER]) * both[:, INNER:]}  # noqa: B023
        result = call(**given, **({"act": act} if call is by_loops else own))
        if trained:
            result.float().square().sum().backward()
        found.append((result.detach().float(), scale.grad))
    assert [name.split()[0] for name in steps.calls] == ["route"] + ["combine"] * (not trained)
    torch.testing.assert_close(*(result for result, _ in found), **BOUND)
    if trained:
        torch.testing.assert_close(*(grad for _, grad in found), rtol=5e-2, atol=5e-1)


def test_what_kernels_do_not_take_is_torchs(steps: Steps) -> None:
    given = layer(dtype=torch.bfloat16)
    wrong: tuple[dict[str, Any], ...] = (
        {"x": given["x"].mT.contiguous().mT},
        {"index": given["index"].mT.contiguous().mT},
        {"weights": given["weights"].requires_grad_()},
    )
    for changes in wrong:
        steps.calls.clear()
        result = tunegemm.experts(**given | changes)
        torch.testing.assert_close(result.float(), by_loops(**given), **BOUND)
        assert "route 1" not in steps.calls
    given["weights"].requires_grad_(False)
    steps.calls.clear()
    tunegemm.experts(**layer(dtype=torch.float32))
    half = given | {"weights": given["weights"].half()}  # another 16 bits than the rows
    torch.testing.assert_close(tunegemm.experts(**half).float(), by_loops(**given), **BOUND)
    assert steps.calls == ["route 1"]


def test_a_device_without_kernels_is_no_news(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def load(name: str, index: int) -> None:
        raise ArtifactError("it is no Hopper GPU")

    monkeypatch.setattr(routing, "routing", Routing(load))
    given = layer(dtype=torch.bfloat16)
    torch.testing.assert_close(tunegemm.experts(**given).float(), by_loops(**given), **BOUND)
    assert not recwarn.list


def test_a_launch_that_fails_costs_the_kernels(steps: Steps) -> None:
    given = layer(dtype=torch.bfloat16)
    steps.error = RuntimeError("cuLaunchKernel: refused")
    with pytest.warns(UserWarning, match="falls back to torch"):
        result = tunegemm.experts(**given)
    torch.testing.assert_close(result.float(), by_loops(**given), **BOUND)
    steps.error = None
    tunegemm.experts(**given)
    assert steps.calls == []


#: The same by the kernels themselves, which Triton interprets.
SCRIPT = """
import torch, tunegemm
from functools import partial
from tests.groups.test_experts import by_loops, layer
from tests.support.grouped import Loops, groups_of
from tests.support.serving import Row
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import find_device
from tunegemm.errors import ArtifactError
from tunegemm.generate import routing as kernels
from tunegemm.generate.takes import UNIT_BYTES
from tunegemm.model.grouped import configs
from tunegemm.generate.routing import kernel
from tunegemm.model.grouped import choose
from tunegemm.dispatch import api
from tunegemm.groups import grouped, routing
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner

WORDS = {"index": torch.int32, "x": torch.int64, "rows": torch.int64, "place": torch.int32}

def load(name, index):
    kind, *words = name.split()
    if kind not in ("route", "combine", "gate"):
        raise ArtifactError("only these are interpreted")
    constants = {
        "route": lambda rows: {"own_rows": int(rows), "others": 256, "experts": 32, "words": 512},
        "combine": lambda *_: {"columns": kernels.COLUMNS, "together": 4},
        "gate": lambda dtype, alternate: {"columns": kernels.GATE_COLUMNS, "alternate": alternate == "True"},
    }[kind](*words)
    function = getattr(kernel, kind)
    def bind(ctas, **numbers):
        def launch(*tensors):
            given = [
                tensor.view(WORDS[one]) if one in WORDS and (kind == "route" or one == "place") else tensor
                for one, tensor in zip(function.arg_names, tensors)]
            function[(ctas,)](*given, **numbers, **constants)
        return launch
    return bind

device = find_device("model:h200")
grouped.groups = groups_of(Loops().load)
routing.routing = routing.Routing(load)
api.serve_by(Dispatcher(Planner(device_type="cpu", read=lambda: Snapshot([]), find=lambda spec: device)))
gate = {"activation": routing.Gate()}
for tokens, more in ((1, {}), (2, {}), (7, {"elsewhere": True}), (300, {}), (5, gate)):
    given = layer(tokens, torch.bfloat16)
    if more.get("elsewhere"):
        given["index"][2] = 99
    result = tunegemm.experts(**given, **more)
    expected = by_loops(**given) if "activation" not in more else tunegemm.experts(
        **given, activation=lambda both: routing.Gate()(both))
    torch.testing.assert_close(result.float(), expected.float(), rtol=5e-2, atol=3e-2)
    assert len(api.dispatcher.planner.state.launches[routing.routing.launches]) >= 2
"""


@pytest.mark.slow
def test_layers_by_the_kernels_themselves() -> None:
    run_interpreted(SCRIPT)


def test_one_order_of_sums_has_the_same_steps_at_any_number_of_tokens(steps: Steps, loops: Loops) -> None:
    """Also where `route` does not take what the router gives."""
    with tunegemm.policy("batch_invariant"):
        for tokens in (1, 11, 300):
            steps.calls.clear()
            given = layer(tokens, torch.bfloat16)
            given["index"] = torch.stack((given["index"], given["index"]), -1)[..., 0]
            tunegemm.experts(**given)
            assert steps.calls == ["combine bf16 bf16"]
    assert len(loops.calls) == 6


def test_sizes_of_the_layer_are_such_that_kernels_take_them() -> None:
    assert HIDDEN * 2 % UNIT_BYTES == INNER * 2 % UNIT_BYTES == 0


def test_few_rows_are_launched_with_their_strides(steps: Steps) -> None:
    seen: list[dict[str, Any]] = []
    steps.few = lambda name, numbers, *tensors: seen.append(numbers | {"bias": tensors[3]})  # type: ignore[attr-defined]
    config = configs("bf16")["co64x32"]
    few = routing.few(config, 0, steps.load)
    gated = routing.few(configs("gated")["co64x32"], 0, steps.load)
    assert few is not None and gated is not None
    a, weights = torch.randn(2, 40).bfloat16()[:, :32], torch.randn(5, 16, 48).bfloat16()[..., :32]
    ends, bias = torch.zeros(5, dtype=torch.int32), torch.randn(16).bfloat16().expand(5, 16)
    for of, n, words in ((few, 16, (None,)), (gated, 8, (bias,))):
        out = torch.empty(2, n, dtype=a.dtype)
        launch = of(a, weights, out, ends, *words, interleaved=of is gated)
        launch(a, weights, ends, *filter(lambda each: each is not None, words), out)
    assert steps.calls == ["few bf16 False", "few bf16 True"]
    plain, of_gate = seen
    assert plain["bias"] is a and of_gate["bias"] is bias
    both = {"total": 2, "count": 5, "units": 4, "row_units": 5, "group_units": 96, "line_units": 6}
    assert plain.items() >= (both | {"n": 16, "has_bias": 0, "turns": 1, "apart": 0}).items()
    assert of_gate.items() >= (both | {"n": 8, "has_bias": 1, "turns": 2, "apart": 1}).items()
    out = torch.empty(2, 16, dtype=a.dtype)
    for wrong in ((a.float(), weights, out, ends), (a, weights, out.float(), ends)):
        with pytest.raises(NotTaken):
            few(*wrong, None)
    steps.found = False
    assert routing.few(config, 0, steps.load) is None


def test_what_route_takes_at_its_borders() -> None:
    def plan(tokens: int, chosen: int = 1, count: int = 8, hidden: int = 16, **changes: Any) -> str:
        x = torch.empty(max(tokens, 1), hidden, dtype=changes.get("dtype", BF16))
        index = torch.zeros(tokens, chosen, dtype=torch.int64)
        planned = routing.plan_route(changes.get("x", x), changes.get("index", index), count)
        return " ".join(f"{each.name} {each.ctas}" for each in planned)

    many, most = kernels.MOST_CHOICES, kernels.MOST_SPREAD
    assert [plan(tokens) for tokens in (0, 1, 512, 513, many)] == [
        "", "route 1 2", "route 1 513", "route 8 66", f"route 8 {many // 8 + 1}"
    ]  # fmt: skip
    assert plan(many + 1) == "tally 33 spread 33" and plan(most + 1) == ""
    assert plan(most) == f"tally {most // 256} spread {most // 256}"
    assert plan(64, 8) == "route 1 513" and plan(64, 9) == "route 8 73"
    bins = kernels.BINS
    assert plan(many + 1, count=bins - 2) and not plan(many + 1, count=bins - 1)
    assert plan(many, count=bins - 1) and not plan(many, count=0)
    x = torch.empty(8, 32, dtype=BF16)
    for wrong in (x[:, 4:12], x[:, :12], x[:, ::2], x.t()[:8, :8], torch.empty(8, 20, dtype=BF16)[:, :16]):
        assert plan(8, x=wrong) == ""
    assert plan(8, x=x[:, 8:24]) and plan(8, dtype=torch.float16) and not plan(8, dtype=torch.float32)
    assert not plan(8, index=torch.zeros(2, 8, dtype=torch.int64).t())
    (planned,) = routing.plan_route(x[:, 8:24], torch.zeros(4, 2, dtype=torch.int64), 5)
    assert planned.numbers == {
        "step": 2, "total": 8, "chosen": 2, "count": 5, "units": 2, "x_units": 4
    }  # fmt: skip


def test_what_combine_and_gate_take_at_their_borders() -> None:
    rows, place = torch.empty(8, 16, dtype=BF16), torch.zeros(8, dtype=torch.int32)
    ends, weights = torch.zeros(3, dtype=torch.int32), torch.empty(4, 2)
    good = {"rows": rows, "place": place, "ends": ends, "weights": weights}

    def name(**changes: Any) -> str:
        return "".join(each.name for each in routing.plan_combine(**good | changes))

    assert name() == "combine bf16 fp32" and name(weights=weights.to(BF16)) == "combine bf16 bf16"
    assert name(rows=rows.half()) == "combine fp16 fp32" and name(place=place.long())
    strided = torch.empty(4, 5)[:, :2]
    (planned,) = routing.plan_combine(rows, place.long(), ends, strided)
    assert planned.ctas == 4 and planned.numbers == {
        "step": 2, "count": 3, "chosen": 2, "units": 2, "blocks": 1, "weights_stride": 5
    }  # fmt: skip
    for changes in (
        {"rows": rows.float()}, {"weights": weights.half()}, {"weights": weights.double()},
        {"rows": torch.empty(8, 32, dtype=BF16)[:, :16]}, {"rows": torch.empty(8, 12, dtype=BF16)},
        {"rows": torch.empty(8 * 16 + 4, dtype=BF16)[4:].view(8, 16)}, {"place": place.short()},
        {"place": torch.zeros(8, 2, dtype=torch.int32)[:, 0]}, {"ends": ends.long()}, {"ends": ends[:0]},
        {"ends": torch.zeros(3, 2, dtype=torch.int32)[:, 0]}, {"weights": torch.empty(2, 4).t()},
        {"weights": weights[:0]}, {"weights": weights[:, :0]}, {"weights": weights.to("meta")},
        {"place": place.to("meta")}, {"ends": ends.to("meta")},
    ):  # fmt: skip
        assert name(**changes) == "", changes
    gate = Gate(1.5, 2.0, 1.0)

    def gated(both: torch.Tensor) -> bool:
        return bool(routing.plan_gate(both, gate))

    assert gated(torch.empty(4, 16, dtype=BF16)) and gated(torch.empty(4, 48, dtype=torch.float16))
    for both in (
        torch.empty(4, 24, dtype=BF16), torch.empty(4, 16), torch.empty(0, 16, dtype=BF16),
        torch.empty(4, 32, dtype=BF16)[:, :16], torch.empty(4 * 16 + 4, dtype=BF16)[4:].view(4, 16),
    ):  # fmt: skip
        assert not gated(both)
    (planned,) = routing.plan_gate(torch.empty(4, 48, dtype=BF16), gate)
    assert (planned.ctas, planned.numbers["units"]) == (4, 3)


def test_what_two_launches_take_at_their_borders(steps: Steps) -> None:
    """Of one token any, of more only where they rarely choose the same experts."""
    up, down = torch.empty(48, 32, 16, dtype=BF16), torch.empty(48, 16, 16, dtype=BF16)
    gate = Gate(1.5, 2.0, 1.0)

    def names(tokens: int = 1, chosen: int = 2, **changes: Any) -> list[str]:
        given = {
            "x": torch.empty(tokens, 16, dtype=BF16), "gate_up": up, "down": down,
            "index": torch.zeros(tokens, chosen, dtype=torch.int64),
            "weights": torch.empty(tokens, chosen, dtype=BF16), "biases": (None, None), "gate": gate,
        }  # fmt: skip
        return [each.name for each in routing.plan_layer(*(given | changes).values())]

    assert names() == ["few_up bf16", "few_down bf16 bf16 1"]
    with tunegemm.policy(max_sms=9):
        assert not names(), "they fill the GPU"
    assert [bool(names(tokens, chosen)) for tokens, chosen in ((3, 2), (2, 3), (3, 3), (4, 1), (1, 24))] == [
        True, True, False, False, True
    ]  # fmt: skip
    assert [names(1, chosen)[1][-1] for chosen in (5, 6)] == ["1", "8"]
    assert names(weights=torch.empty(1, 2))[1] == "few_down bf16 fp32 1"
    bias = torch.empty(48, 33, dtype=BF16)[:, :32]
    planned = routing.plan_layer(
        torch.empty(2, 24, dtype=BF16)[:, :16], up, down, torch.zeros(2, 3, dtype=torch.int32),
        torch.empty(2, 4)[:, :3], (bias, None), gate,
    )  # fmt: skip
    common = {"step": 1, "chosen": 3, "count": 48, "units": 2, "group_units": 64, "line_units": 2}
    first, last = (each.numbers for each in planned)
    assert first.items() >= (common | {"total": 6, "n": 16, "x_units": 3, "turns": 2, "apart": 1}).items()
    assert first.items() >= {"has_bias": 1, "bias_stride": 33}.items()
    common |= {"group_units": 32}
    assert last.items() >= (common | {"tokens": 2, "n": 16, "has_bias": 0, "factors_stride": 4}).items()
    assert [each.ctas for each in planned] == [6 * 16, 2 * 16]
    apart = torch.empty(48, 32, 20, dtype=BF16)[..., :16]
    for changes in (
        {"x": torch.empty(1, 16)}, {"x": torch.empty(1, 32, dtype=BF16)[:, ::2]}, {"gate_up": apart},
        {"gate_up": up.half()}, {"down": down.mT},
        {"down": torch.empty(48 * 256 + 4, dtype=BF16)[4:].view(48, 16, 16)},
        {"index": torch.zeros(1, 4, dtype=torch.int64)[:, ::2]}, {"weights": torch.empty(1, 2).half()},
        {"weights": torch.empty(1, 4, dtype=BF16)[:, ::2]}, {"index": torch.zeros(1, 0, dtype=torch.int64)},
        {"biases": (bias.float(), None)}, {"biases": (None, bias)},
        {"gate_up": up[:, :0], "down": down[..., :0]},
    ):  # fmt: skip
        assert not names(**changes), changes


def test_many_tokens_are_not_asked_about(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up of a layer's tensors takes 2 us of each call, and each number of tokens a place."""
    asked: list[Any] = []
    monkeypatch.setattr(routing.routing.launches, "find", lambda key, *_: asked.append(key[0]))
    for tokens in (3, 4):
        given = layer(tokens, BF16)
        routing.routing.layer(*given.values(), (None, None), routing.SILU)
    assert asked == ["few_up"]
