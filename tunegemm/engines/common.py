"""Code shared by the engines: operators that fall back to an engine's own function, and the startup line.

The operators are opaque to torch.compile: the number of rows, which chooses the kernel, is known only at run
time.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

import tunegemm
from tunegemm.choose.policies import read_switch
from tunegemm.describe.problem import normalize_dtype
from tunegemm.dispatch import api, extension
from tunegemm.dispatch.autograd import DTYPES
from tunegemm.dispatch.extension import LaunchCache
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, Form, form_of
from tunegemm.dispatch.guards import PLAIN
from tunegemm.dispatch.library import scale_steps
from tunegemm.errors import one_line
from tunegemm.generate.blocks import BLOCK
from tunegemm.torch import blocks, functions, ops
from tunegemm.torch.lowering import lower_to_function

#: Numbers of rows for which the startup line counts served weights: rows of decode, and of prompts.
_ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: The most weights that the startup line names.
MOST_NAMED = 8
#: The engines' name for gate and up of a layer of experts: (experts, 2 inner, hidden).
_EXPERTS = "w13_weight"

#: The most rows of block-scaled products that are served. By blocks.json our kernels are faster than
#: DeepGEMM's up to 257 rows in the mean, but single ones lose up to 8 % from 192 rows on.
BLOCK_ROWS = 127
#: What a layer has whose products with block scales are served.
IN_BLOCKS = "tunegemm_in_blocks"

#: A request to the dispatcher: a form, with a, b and the epilogue's operands.
_Asked: TypeAlias = tuple[Form, tuple[torch.Tensor, ...]]

#: The engines' own functions, by the names under which graphs call them.
own: dict[str, Callable[..., torch.Tensor]] = {}
#: What quantises rows to fp8, with scales of 1x128 blocks, for those of them that take 16-bit rows.
quantisers: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {}


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str, site: str = ""
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``.

    The engine's own function takes (x, weight, bias). site: see `_torchs`.
    """
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
    """Compute ``(a * scale_a) @ (b * scale_b) + bias``.

    Scales are for a whole operand, or for each row of a, (m, 1), and each column of b, in any shape. The
    engine's own function takes the first six arguments. site: see `_torchs`.
    """
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


def _block_scaled_mm(
    a: torch.Tensor,
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype,
    name: str,
    site: str = "",
) -> torch.Tensor:
    """Compute ``(a * scale_a) @ (weight * scale).T``.

    Scales are for 1x128 blocks of a and 128x128 blocks of weight, (n, k). The engine's own function takes the
    first four arguments; where it quantises a itself, scale_a means nothing.
    """
    if a.size(0) <= BLOCK_ROWS:
        left, scales = quantisers[name](a) if name in quantisers else (a, scale_a)
        operands = left, plain(weight).t(), scales, plain(scale).t()
        result = blocks.product(*operands, out_dtype) if blocks.scale_k_of(*operands) == BLOCK else None
        if result is not None:
            return result
    return own[name](a, weight, scale_a, scale)


#: Sites of compiled code, each with a number of rows, at which nothing served the product. A site is
#: everything that the code promises about its operands except their rows, as for `Dispatcher.compiled`.
_torchs = LaunchCache(of_products=True)


def _remember(site: str, a: torch.Tensor, asked: Sequence[_Asked]) -> None:
    """Note in `_torchs` that nothing served the site, unless an address or a mode of this call was why."""
    for form, operands in asked:
        recent = api.dispatcher.known(form, *operands)
        if recent is None or recent.plan is not None:
            return
    _torchs.keep((site, a.size(0)), None)


extension.define(
    "engine_linear(Tensor x, Tensor weight, Tensor? bias, str name) -> Tensor",
    _linear,
    lambda x, weight, bias, name: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
extension.define(
    "engine_scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, "
    "ScalarType out_dtype, str name) -> Tensor",
    _scaled_mm,
    lambda a, b, _, __, bias, dtype, name: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
)
extension.define(
    "engine_block_scaled_mm(Tensor a, Tensor weight, Tensor scale_a, Tensor scale, ScalarType out_dtype, "
    "str name) -> Tensor",
    _block_scaled_mm,
    lambda a, weight, _, __, dtype, name: a.new_empty((a.shape[0], weight.shape[0]), dtype=dtype),
)


def scaled_form(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Form | None, tuple[torch.Tensor, ...]]:
    """The form of a scaled product, and its scales as kernels read them; None for other kinds of scales.

    One scale for all rows together with one per column is another kind whatever the number of rows. A single
    row could be served, but a row's bits must not depend on the number of rows.
    """
    scale_a, scale_b = plain(scale_a), plain(scale_b)
    if scale_b.numel() > 1:
        if scale_a.ndim != 2:
            return None, ()
        scale_b = scale_b.reshape(1, -1)
    elif scale_a.numel() > 1:
        return None, ()
    # The engines' own kernels accumulate in the tensor cores, too.
    text = scale_steps(a, b, scale_a, scale_b, bias is not None)
    return (form_of(BELOW_AUTOGRAD, text, out_dtype, "fast") if text else None), (scale_a, scale_b)


def lower() -> None:
    """Make Inductor's code call the operators' functions. Call this before code is generated or loaded."""
    operators = torch.ops.tunegemm
    block_scaled_mm = operators.engine_block_scaled_mm.default
    lower_to_function(block_scaled_mm, _block_scaled_mm, "tunegemm_engine_block_scaled_mm")
    lower_to_function(operators.engine_scaled_mm.default, _scaled_mm, "tunegemm_engine_scaled_mm")
    lower_to_function(operators.engine_linear.default, _linear, "tunegemm_engine_linear")


def is_served_kind(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether plain products have kernels for the operands of this linear layer."""
    return (
        x.device.type == ops.DEVICE_TYPE
        and weight.ndim == 2
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the subclass of an engine, which dispatch would leave to torch."""
    return tensor if type(tensor) in PLAIN or torch.compiler.is_compiling() else tensor.detach()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`tunegemm.linear` of a weight of an engine's subclass."""
    if torch.compiler.is_compiling():
        return ops.traced_linear(x, weight, bias, of_any_class=True)
    return functions.linear(x, plain(weight), bias)


class Misfit(Exception):
    """The engine is of a version without the parts that we know."""


def of_engine(path: str, parameters: Sequence[str] = ()) -> tuple[Any, Any]:
    """Look up an engine's object by its dotted path; returns the object that holds it, and the object.

    Raises Misfit if it is missing, or if its first parameters are not these.
    """
    holder, _, name = path.rpartition(".")
    try:
        try:
            place = importlib.import_module(holder)
        except ModuleNotFoundError:
            module, _, kind = holder.rpartition(".")
            place = getattr(importlib.import_module(module), kind)
        result = getattr(place, name)
    except (ImportError, AttributeError):
        raise Misfit(f"there is no {path}") from None
    if parameters and [*inspect.signature(result).parameters][: len(parameters)] != [*parameters]:
        raise Misfit(f"{path} does not take {', '.join(parameters)}")
    return place, result


def replace(path: str, parameters: Sequence[str], make: Callable[[Any], Any]) -> None:
    """Replace an engine's function by `make`'s wrapper of it, once. Raises Misfit as `of_engine` does."""
    place, result = of_engine(path, parameters)
    if not hasattr(result, "tunegemm_own"):
        made = make(result)
        made.tunegemm_own = result
        setattr(place, path.rpartition(".")[2], made)


def install(engine: str, log: logging.Logger, parts: dict[str, Callable[[], None]]) -> None:
    """Install each part in an engine, unless the engine's variable or mode ``off`` forbids it.

    parts: functions that install, by the name of the served layers. An exception costs only its part: one
    line names the part, and the engine continues with its own code.
    """
    try:
        if not read_switch(f"TUNEGEMM_{engine.upper()}", log.warning) or extension.is_off():
            return
    except Exception as error:
        log.warning("tunegemm serves nothing: %s", one_line(error))
        return
    failed = []
    for part, put in parts.items():
        try:
            put()
        except Exception as error:
            log.debug("tunegemm: %s", part, exc_info=error)
            failed.append(f"{part} ({one_line(error)})")
    if failed:
        log.warning("this version of %s is unknown to tunegemm, so it keeps: %s", engine, "; ".join(failed))


def attempt(log: logging.Logger, step: Callable[[], object]) -> None:
    """Run a step; a failure becomes a warning, because it must not end the engine."""
    try:
        step()
    except Exception as error:
        log.warning("tunegemm: %s: %s", type(error).__name__, one_line(error))


def said(engine: str, text: str) -> str:
    """The startup line. engine: name and version. text: the text about served weights."""
    now = f"policy {extension.policy()}, records {extension.fingerprint(anywhere=True)}"
    return f"tunegemm {tunegemm.__version__} in {engine}: {text}; {now}"


def compared(theirs: object) -> str:
    """Why this process may serve differently from the one that started the engine; empty if it does not.

    theirs: the fingerprint there, as on any host. Ranks do not exchange messages for this: they would wait
    for a rank without tunegemm.
    """
    mine = extension.fingerprint(anywhere=True)
    if theirs == mine:
        return ""
    return (
        f"records, policy or mode ({mine}) differ from those of the process that started the engine "
        f"({theirs or 'none'}): ranks may run different kernels; give all of them the same TUNEGEMM_* "
        "variables, database and packs"
    )


def served(
    model: torch.nn.Module, most: int, left_out: Sequence[str] = ("VocabParallelEmbedding",),
    all_blocks: bool = False,
) -> str:  # fmt: skip
    """Summarize on one line which of a model's weights have kernels.

    The line counts the kinds of weights with kernels at numbers of rows up to `most`, lists the kernels'
    families, and names the weights without kernels. The function makes no plans, but learns which products
    nothing serves; else the first steps would wait for that.

    left_out: classes that have a method of linear layers, but compute no served product. all_blocks: whether
    layers with blocks of 128 are served without `IN_BLOCKS`.
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
        if is_grouped:  # the engines compute these with their own kernels
            count, columns, k = weight.shape
            at.setdefault(f"{normalize_dtype(weight.dtype)} {columns}x{k} of {count} experts", set())
            continue
        own = getattr(layer, "weight_block_size", None)
        if block := own or getattr(layer.quant_method, "weight_block_size", None):
            is_served = hasattr(layer, IN_BLOCKS) or (all_blocks and [*block] == [BLOCK, BLOCK])
            name = f"{normalize_dtype(weight.dtype)} {weight.shape[0]}x{weight.shape[1]} in blocks"
            at[name] = {rows for rows in shown if rows <= BLOCK_ROWS and is_served}
            families |= dict.fromkeys(["blocks"] if at[name] else [])
            continue
        # The engines store fp8 weights as (k, n), others as (n, k).
        right = (weight if is_fp8 else weight.mT).detach()
        name = f"{normalize_dtype(weight.dtype)} {right.shape[-1]}x{right.shape[-2]}"
        if name in at:
            continue
        form = _form_of(layer, is_fp8)
        result = {rows: extension.serves_by(form, rows, right) for rows in sorted({*shown, *ends(most)})}
        at[name] = {rows for rows in shown if result[rows]}
        families |= dict.fromkeys(result[rows] for rows in shown if rows in at[name])
    counts = ", ".join(f"{sum(rows in result for result in at.values())} at {rows}" for rows in shown)
    line = f"kernels for {counts} rows of {len(at)} kinds of weights"
    line += f", by {', '.join(families)}" if families else ""
    if lacking := [name for name, result in at.items() if not result]:
        more = len(lacking) - MOST_NAMED
        line += f"; at none of these {', '.join(lacking[:MOST_NAMED])}" + (
            f" and {more} more" if more > 0 else ""
        )
    return line


def _form_of(layer: torch.nn.Module, is_fp8: bool) -> Form:
    """The form by which a layer's product is served."""
    steps = []
    if is_fp8:
        scale = getattr(layer, "weight_scale", None)
        per_row = isinstance(scale, torch.Tensor) and scale.numel() > 1
        steps.append("scale_rowwise" if per_row else "scale_tensor")
    if getattr(layer, "bias", None) is not None:
        steps.append("bias_n")
    out_dtype = getattr(layer, "orig_dtype", torch.bfloat16) if is_fp8 else None
    return form_of(BELOW_AUTOGRAD, "+".join(steps), out_dtype)
