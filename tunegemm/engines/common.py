"""What engines share: operators that fall back to an engine's own function, and what is said at the start.

The operators are opaque to torch.compile: which kernel multiplies is known when the number of rows is.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

import tunegemm
from tunegemm.choose.policies import read_engine
from tunegemm.describe.problem import normalize_dtype
from tunegemm.dispatch import api, extension
from tunegemm.dispatch.autograd import DTYPES, PLAIN
from tunegemm.dispatch.extension import LaunchCache
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, Form, form_of
from tunegemm.dispatch.library import scale_steps
from tunegemm.errors import one_line
from tunegemm.torch import ops
from tunegemm.torch.lowering import lower_to_function

#: Numbers of rows at which the line of the start counts what is served: of decode, and of prompts.
_ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Weights that a line names.
_MOST_NAMED = 8
#: What the engines call gate and up of a layer of experts: (experts, 2 inner, hidden).
_EXPERTS = "w13_weight"

#: What the dispatcher was asked for: a form, and a, b and what its epilogue takes.
_Asked: TypeAlias = tuple[Form, tuple[torch.Tensor, ...]]

#: The engines' own functions, by the names that graphs call them by.
own: dict[str, Callable[..., torch.Tensor]] = {}

_library = torch.library.Library("tunegemm", "FRAGMENT")
_library.define("engine_linear(Tensor x, Tensor weight, Tensor? bias, str name) -> Tensor")
_library.define(
    "engine_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "ScalarType out_dtype, str name) -> Tensor"
)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str, site: str = ""
) -> torch.Tensor:
    """``x @ weight.T + bias``; own: of (x, weight, bias). site: see `_torchs`."""
    if site and _torchs.find((site, x.size(0))) is not None:
        return own[name](x, weight, bias)
    rows, right = x.reshape(-1, x.shape[-1]), plain(weight).t()
    result = None
    asked: list[_Asked] = [(form_of(BELOW_AUTOGRAD, ""), (rows, right))]
    if bias is not None:
        form, added = form_of(BELOW_AUTOGRAD, "bias_n"), plain(bias)
        asked.append((form, (rows, right, added)))
        result = api.dispatcher.fused(form, rows, right, (added,))
    if result is None:
        result = api.dispatcher.below_autograd(rows, right)
        if result is not None and bias is not None:
            result = result + bias
    if result is None:
        if site:
            _remember(site, x, asked)
        return own[name](x, weight, bias)
    return result.view(*x.shape[:-1], weight.shape[0])


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    name: str,
    site: str = "",
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b) + bias`` of scales for a whole operand, or for each row of a, (m, 1),
    and each column of b, in any shape; own: of these six. site: see `_torchs`."""
    if site and _torchs.find((site, a.size(0))) is not None:
        return own[name](a, b, scale_a, scale_b, bias, out_dtype)
    form, scales = scaled_form(a, b, scale_a, scale_b, bias, out_dtype)
    asked: list[_Asked] = []
    if form is not None:
        right, tensors = plain(b), scales if bias is None else (*scales, plain(bias))
        result = api.dispatcher.fused(form, a, right, tensors)
        if result is not None:
            return result
        asked.append((form, (a, right, *tensors)))
    if site:
        _remember(site, a, asked)
    return own[name](a, b, scale_a, scale_b, bias, out_dtype)


#: Where nothing served a site of compiled code with so many rows. A site is what the code promises of its
#: operands but for their rows, as for `Dispatcher.compiled`.
_torchs = LaunchCache(of_products=True)


def _remember(site: str, a: torch.Tensor, asked: Sequence[_Asked]) -> None:
    """For `_torchs`, unless an address or a mode of this call was why nothing served what was asked for."""
    for form, operands in asked:
        recent = api.dispatcher.known(form, *operands)
        if recent is None or recent.plan is not None:
            return
    _torchs.keep((site, a.size(0)), None)


_library.impl("engine_linear", _linear, "CompositeExplicitAutograd")
_library.impl("engine_scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
torch.library.register_fake(
    "tunegemm::engine_linear",
    lambda x, weight, bias, name: x.new_empty((*x.shape[:-1], weight.shape[0])),
    lib=_library,
)
torch.library.register_fake(
    "tunegemm::engine_scaled_mm",
    lambda a, b, scale_a, scale_b, bias, out_dtype, name: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    ),
    lib=_library,
)


def scaled_form(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Form | None, tuple[torch.Tensor, ...]]:
    """What is asked for, and its scales as kernels read them; None for scales of another kind.

    One scale for all rows beside one per column is another kind whatever the number of rows: of a single row
    it would be served, and a row's bits may not depend on how many there are.
    """
    scale_a, scale_b = plain(scale_a), plain(scale_b)
    if scale_b.numel() > 1:
        if scale_a.ndim != 2:
            return None, ()
        scale_b = scale_b.reshape(1, -1)
    elif scale_a.numel() > 1:
        return None, ()
    # The engines' own kernels keep their sums where the tensor cores do.
    text = scale_steps(a, b, scale_a, scale_b, bias is not None)
    return (form_of(BELOW_AUTOGRAD, text, out_dtype, "fast") if text else None), (scale_a, scale_b)


def lower() -> None:
    """Has Inductor's code call the operators' functions; before it is made, and before it is loaded."""
    scaled, linear = torch.ops.tunegemm.engine_scaled_mm.default, torch.ops.tunegemm.engine_linear.default
    lower_to_function(
        scaled, _scaled_mm, "tunegemm_engine_scaled_mm",
        lambda a, b, *others: [a.get_size()[0], b.get_size()[1]],
    )  # fmt: skip
    lower_to_function(
        linear, _linear, "tunegemm_engine_linear",
        lambda x, weight, *others: [*x.get_size()[:-1], weight.get_size()[0]],
    )  # fmt: skip


def is_served_kind(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a linear layer's operands are such as plain products have kernels for."""
    return (
        x.device.type == ops.DEVICE_TYPE
        and weight.ndim == 2
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the class that an engine gave it, which dispatch would leave to torch."""
    return tensor if type(tensor) in PLAIN or torch.compiler.is_compiling() else tensor.detach()


class Misfit(Exception):
    """An engine that is not as it is known: of another version."""


def of_engine(path: str, parameters: Sequence[str] = ()) -> tuple[Any, Any]:
    """What an engine has by a dotted path, after what it is in. Raises Misfit where it is not there, or does
    not take these parameters first."""
    holder, _, name = path.rpartition(".")
    try:
        try:
            place = importlib.import_module(holder)
        except ModuleNotFoundError:
            module, _, kind = holder.rpartition(".")
            place = getattr(importlib.import_module(module), kind)
        found = getattr(place, name)
    except (ImportError, AttributeError):
        raise Misfit(f"there is no {path}") from None
    if parameters and [*inspect.signature(found).parameters][: len(parameters)] != [*parameters]:
        raise Misfit(f"{path} does not take {', '.join(parameters)}")
    return place, found


def replace(path: str, parameters: Sequence[str], make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of an engine's function in its place, once. Raises Misfit as `of_engine`."""
    place, found = of_engine(path, parameters)
    if not hasattr(found, "tunegemm_own"):
        made = make(found)
        made.tunegemm_own = found
        setattr(place, path.rpartition(".")[2], made)


def install(engine: str, log: logging.Logger, parts: dict[str, Callable[[], None]]) -> None:
    """Puts each part into an engine, by what it serves, unless the engine's variable or mode ``off`` says no.

    Whatever is raised costs a part, and one line says which; the engine goes on by its own.
    """
    try:
        if not read_engine(engine, log.warning) or extension.is_off():
            return
    except Exception as error:
        log.warning("tunegemm serves nothing: %s", one_line(error))
        return
    failed = []
    for what, put in parts.items():
        try:
            put()
        except Exception as error:
            log.debug("tunegemm: %s", what, exc_info=error)
            failed.append(f"{what} ({one_line(error)})")
    if failed:
        log.warning("this version of %s is unknown to tunegemm, so it keeps: %s", engine, "; ".join(failed))


def attempt(log: logging.Logger, step: Callable[[], object]) -> None:
    """Takes a step of which no failure may end the engine."""
    try:
        step()
    except Exception as error:
        log.warning("tunegemm: %s: %s", type(error).__name__, one_line(error))


def records() -> str:
    """Letters that are the same on every host with the same records, policy and mode."""
    return extension.fingerprint(anywhere=True)


def said(engine: str, what: str) -> str:
    """The line at the start. engine: its name and version. what: what is served there."""
    now = f"policy {extension.policy()}, records {records()}"
    return f"tunegemm {tunegemm.__version__} in {engine}: {what}; {now}"


def compared(theirs: object) -> str:
    """Why this process may serve otherwise than the one that started the engine; empty where it does not.

    theirs: the `records` of that process. Nothing is sent for it: a rank without tunegemm would be
    waited for.
    """
    mine = records()
    if theirs == mine:
        return ""
    return (
        f"records, policy or mode ({mine}) differ from those of the process that started the engine "
        f"({theirs or 'none'}): ranks may run different kernels; give all of them the same TUNEGEMM_* "
        "variables, database and packs"
    )


def served(model: torch.nn.Module, most: int, left_out: Sequence[str] = ("VocabParallelEmbedding",)) -> str:
    """How many of a model's kinds of weights have kernels at which rows, up to so many, of which families,
    and which weights have none, on one line.

    It plans nothing, but learns where nothing serves a weight, which else the first steps would wait for.

    left_out: classes that have a method of linear layers, and multiply nothing that is served.
    """
    from tunegemm.choose.predictions import ends

    shown = [rows for rows in _ROWS if rows <= most]
    families: dict[str, None] = {}
    at: dict[str, set[int]] = {}
    for layer in model.modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        if method == "NoneType" or type(layer).__name__ in left_out:
            continue
        weight, experts = (getattr(layer, name, None) for name in ("weight", _EXPERTS))
        is_grouped = isinstance(experts, torch.Tensor) and experts.ndim == 3
        weight = experts if is_grouped else weight
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2 + is_grouped:
            continue
        is_fp8 = weight.dtype.is_floating_point and weight.dtype.itemsize == 1
        if weight.dtype not in DTYPES and not is_fp8:
            at.setdefault(f"{method} {tuple(weight.shape)}", set())
            continue
        if is_grouped:  # the engines multiply these by their own kernels
            count, columns, k = weight.shape
            at.setdefault(f"{normalize_dtype(weight.dtype)} {columns}x{k} of {count} experts", set())
            continue
        # Of fp8 the engines keep (k, n), of others (n, k).
        right = (weight if is_fp8 else weight.mT).detach()
        name = f"{normalize_dtype(weight.dtype)} {right.shape[-1]}x{right.shape[-2]}"
        if name in at:
            continue
        asks = _asker(layer, right, is_fp8)
        found = {rows: asks(rows) for rows in sorted({*shown, *ends(most)})}
        at[name] = {rows for rows in shown if found[rows]}
        families |= dict.fromkeys(found[rows] for rows in shown if rows in at[name])
    counts = ", ".join(f"{sum(rows in found for found in at.values())} at {rows}" for rows in shown)
    line = f"kernels for {counts} rows of {len(at)} kinds of weights"
    line += f", by {', '.join(families)}" if families else ""
    if lacking := [name for name, found in at.items() if not found]:
        more = len(lacking) - _MOST_NAMED
        line += f"; at none of these {', '.join(lacking[:_MOST_NAMED])}" + (
            f" and {more} more" if more > 0 else ""
        )
    return line


def _asker(layer: torch.nn.Module, right: torch.Tensor, is_fp8: bool) -> Callable[[int], str]:
    """Says which family of kernels multiplies a number of rows by a layer's weight (k, n); empty: none."""
    biased = getattr(layer, "bias", None) is not None
    like = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype, device="meta")
    text = "bias_n" if biased else ""
    if is_fp8:
        scale = getattr(layer, "weight_scale", None)
        per_row = isinstance(scale, torch.Tensor) and scale.numel() > 1
        text = ("scale_rowwise" if per_row else "scale_tensor") + ("+bias_n" if biased else "")
    form = form_of(BELOW_AUTOGRAD, text, getattr(layer, "orig_dtype", torch.bfloat16) if is_fp8 else None)

    def family(rows: int) -> str:
        left = torch.empty(rows, right.shape[0], dtype=right.dtype, device="meta")
        return extension.serves_by(form, left, like, right.device)

    return family
