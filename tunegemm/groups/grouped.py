"""`grouped_mm`: multiplies each group of rows by its own weights, as layers of experts do.

The kernel reads the groups' ends on the device, so a launch, and a CUDA graph of it, is valid for every
division of the rows. A record chooses the kernel (`tunegemm tune --groups`), or else the table that ships.
Torch computes products for which no kernel is known to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from tunegemm.choose.policies import read_switch
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import ALIGNMENT
from tunegemm.dispatch.guards import (
    are_plain,
    are_torchs,
    check_devices,
    deterministic,
    grad_enabled,
    has_gradient,
    has_values,
    is_transformed,
    rank,
)
from tunegemm.errors import ArtifactError, ProblemError, TunegemmError
from tunegemm.generate import along_k
from tunegemm.generate import grouped as kernels
from tunegemm.generate.cublaslt import is_torch
from tunegemm.generate.grouped.operands import objection
from tunegemm.groups import routing
from tunegemm.model.grouped import FP8, AlongKChoice, GroupedChoice, choose, choose_along_k, maker_of
from tunegemm.store.checks import record_objection

#: The dtypes that kernels multiply, with their names in the table.
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: FP8}
#: What torch (2.13) multiplies in groups but does not trace.
_UNTRACED = torch.float16, torch.float32
#: Returns the launch for operands with this layout: a, the weights as (groups, N, K), the output, the groups'
#: ends, the bias or None, and the scales of a's rows or None; fp8 products pass the scales of b's columns in
#: place of the bias. For groups along k they are a's transpose, b, the output and the groups' ends. A launch
#: takes a, the weights or b, the groups' ends, the bias and the scales if there are any, and the output.
Kernel = Callable[..., Callable[..., None]]


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups of rows, as ``torch.nn.functional.grouped_mm`` does.

    For a (rows, k) and b (groups, k, n), row r of the result is ``a[r] @ b[g]``, where g is the group of row
    r. ``offs``, int32 (groups) on the same device, holds the end of each group: the index after its last row.
    Groups may have any size, including 0. Rows after the last group are not written. `bias`, which torch does
    not support, is (n), or (groups, n) with a line for each group.

    For a (m, rows) and b (rows, n), groups lie along k, as in the gradient of weights: the result is
    (groups, m, n), ``a[:, r] @ b[r]`` for the rows r of each group, and zeros for an empty group.

    On Hopper our kernels serve bf16 where measurements show that they are faster, and fp16 in the same cases
    except along k. k or n of b must be contiguous (along k: m of a and n of b), n must be a multiple of 8,
    and addresses and strides multiples of 16 bytes. You need not tune. `refresh`, ``TUNEGEMM_MODE=off`` and
    policy `max_sms` work as for `matmul`. Torch computes everything else with your arguments: two operands of
    three dimensions, another `out_dtype`, other devices, subclasses, modes, transforms, deterministic mode.
    Our kernels also compute the gradients of a and b, but not those of products along k. A CUDA graph stays
    valid for other divisions of the same number of rows, and contains our kernel if the call ran once before.
    torch.compile traces the call as the operator `tunegemm::grouped_mm`.

    Raises torch's errors, or a ProblemError that names what is wrong with the groups or the bias. `offs` is
    on the device and is checked only with ``TUNEGEMM_CHECK_GROUPS=1``; kernels stay within the rows even if
    it is wrong.
    """
    try:
        if torch.compiler.is_compiling():
            if are_torchs(a, b, offs, bias) or a.dtype in _UNTRACED:
                return traced(a, b, offs, bias, out_dtype)
        elif offs is not None:
            rank(a)
            rank(b)
            if out_dtype in (None, a.dtype):
                result = groups(a, b, offs, bias)
                if result is not None:
                    return result
    except (RuntimeError, TypeError):  # without memory, or not tensors: torch raises the error for them
        pass
    return by_torch(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


class Groups(extension.Family):
    """Computes grouped products with kernels. The process's instance is `groups`."""

    of_tensors = True

    def __init__(self) -> None:
        super().__init__(kernels.FAMILY, "groups", "tunegemm.grouped_mm falls back to torch")

    def __call__(
        self, a: Any, b: Any, offs: Any, bias: Any, gate: str = "", interleaved: bool = False
    ) -> torch.Tensor | None:
        """Compute the product with a kernel; None if torch should compute it.

        gate: a gated step such as ``swiglu``; b then holds the columns of gate and up, as halves or
        `interleaved`.
        """
        if not are_plain(a, b, offs, bias):
            return None
        if has_gradient(a, b, bias):
            return None if gate else traced(a, b, offs, bias)
        return self.below_autograd(a, b, offs, bias, gate, interleaved)

    def are_checked(self) -> bool:
        """Whether to check values on the device, which makes the host wait: ``TUNEGEMM_CHECK_GROUPS``."""
        known = self.launches.find("are checked")
        if known is None:
            known = self.launches.keep("are checked", read_switch("TUNEGEMM_CHECK_GROUPS", extension.warn))
        return bool(known.launch)

    def below_autograd(
        self,
        a: Any,
        b: Any,
        offs: Any,
        bias: Any,
        gate: str = "",
        interleaved: bool = False,
        scales: Any = None,
    ) -> torch.Tensor | None:
        """Compute the product as `__call__` does, but below autograd: nothing checks for gradients.

        scales: the scales of a's rows, for fp8; `bias` then holds the scales of b's columns.
        """
        if self.are_checked():
            check_ends(offs, a.shape[b.ndim == 2])
        if a.is_nested or b.is_nested:  # torch's check of tensors would abort the process
            return None
        tensors: tuple[Any, ...] = (a, b, offs)
        beside = 0
        if bias is not None:
            tensors, beside = (*tensors, bias), bias.data_ptr()
        if scales is not None:
            tensors, beside = (*tensors, scales), beside | scales.data_ptr()
        key = (
            a.numel(), b.numel(), len(tensors), gate, interleaved,
            (a.data_ptr() | b.data_ptr()) % ALIGNMENT == 0, beside % ALIGNMENT == 0,
        )  # fmt: skip
        kind = gate, interleaved, scales is not None
        results = self.launch(key, tensors, _allocate, self._choose, kind)
        return None if results is None else results[0]

    def _choose(self, a: Any, b: Any, offs: Any, *others: Any) -> Any:
        """See `Family.launch`."""
        if not offs.is_contiguous():  # kernels read no stride
            choice = self._choose(a, b, offs.contiguous(), *others)
            return choice and (choice[0], partial(_with_copied_ends, choice[1]))
        *beside, out, (gate, interleaved, _) = others
        bias, scales = (*beside, None, None)[:2]
        if not fits(a, b, offs, bias, gated=bool(gate), scales=scales):
            return None
        try:
            choice = _choice_for(a, b, offs, gate)
        except (TunegemmError, OSError, RuntimeError) as error:
            self.missing(a.device, error)
            return None
        if choice is None:
            return None
        if b.ndim == 2:
            return choice, lambda kernel: kernel(a.mT, b, out, offs)
        weights = b.mT
        if bias is not None and bias.ndim == 1:
            bias = bias.expand(weights.shape[:2])
        return choice, lambda kernel: kernel(a, weights, out, offs, bias, scales, interleaved=interleaved)

    def falls_back(self, tensors: Sequence[torch.Tensor], why: str) -> None:
        """Warn that a grouped product breaks the policy's promise of one order of sums."""
        a, b, *_ = tensors
        policy = extension.policy()
        if policy.is_batch_invariant and b.ndim == 3:
            extension.warn(
                f"a product of {tuple(a.shape)} and {tuple(b.shape)} in groups {why}, and falls back to "
                f"torch: {policy} does not hold",
                about=("order of groups", why, tuple(b.shape), b.dtype),
            )

    def load(self, config: GroupedChoice | AlongKChoice, device: torch.device) -> Kernel | None:
        seen = extension.device_of(device)
        is_whole = seen.sm_count == seen.fingerprint.sm_count  # the kernel for few rows fills the GPU
        if isinstance(config, GroupedChoice) and config.is_few and is_whole:
            return routing.few(config.config, device.index or 0)
        words: dict[str, Any] = {"blocks": seen.sm_count, "swizzle_size": config.swizzle_size}
        if isinstance(config, GroupedChoice):
            maker = maker_of(config.config)
            words["l2_hint"] = config.l2_hint
        else:
            maker = along_k.FAMILY
        kernel = extension.loaded(maker, config.config, device)
        return None if kernel is None else partial(kernel.of, **words)


def _with_copied_ends(bind: Callable[[Kernel], Callable[..., None]], kernel: Kernel) -> Callable[..., None]:
    launch = bind(kernel)
    return lambda a, b, offs, *others: launch(a, b, offs.contiguous(), *others)


def _allocate(a: Any, b: Any, offs: Any, *others: Any) -> tuple[torch.Tensor]:
    """The output; see `Family.launch`."""
    if b.ndim == 2:
        return (a.new_empty((offs.shape[0], a.shape[0], b.shape[1])),)
    gate, _, scaled = others[-1]
    shape = a.shape[0], b.shape[2] // (2 if gate else 1)
    return (a.new_empty(shape, dtype=torch.bfloat16) if scaled else a.new_empty(shape),)


def _choice_for(a: Any, b: Any, offs: Any, gate: str) -> GroupedChoice | AlongKChoice | None:
    """The kernel for operands that fit, by their record or the table; None if torch's is the fastest.

    Raises ArtifactError if the record's kernel cannot run here.
    """
    gpu = extension.gpu_of(a.device)
    if b.ndim == 2:
        return choose_along_k(offs.shape[0], a.shape[0], b.shape[1], b.shape[0], gpu=gpu)
    groups, k, n = b.shape
    dtype, major, rows = _DTYPES[a.dtype], "k" if b.stride(1) == 1 else "n", a.shape[0]
    try:
        problem = Problem.of_groups(rows, n, k, groups, dtype=dtype, gate=gate, b_major=major)
    except ProblemError:  # never tuned: one group, or packed lines that TMA cannot read
        record = None
    else:
        record = extension.recorded(problem, a.device)
    ordered = extension.policy().is_batch_invariant
    if record is None or (ordered and is_torch(record.candidate)):
        return choose(groups, n, k, rows, gpu=gpu, dtype=dtype, gate=gate, major=major, ordered=ordered)
    if is_torch(record.candidate):
        return None
    if wrong := record_objection(record):
        raise ArtifactError(f"the record of {record.problem} cannot run here: {wrong}")
    config = kernels.config_of(record.problem, record.candidate)
    return GroupedChoice(config, *kernels.launch_arguments(record.candidate))


def fits(a: Any, b: Any, offs: Any, bias: Any, *, gated: bool = False, scales: Any = None) -> bool:
    """Whether kernels can read these operands in place. Groups lie along k if b has 2 dimensions."""
    if (a.data_ptr() | b.data_ptr()) % ALIGNMENT:
        return False
    if b.ndim == 2:
        return bias is None and a.ndim == 2 and not along_k.objection(a.mT, b, offs)
    if b.ndim != 3 or a.dtype not in _DTYPES:
        return False
    if bias is not None and bias.ndim == 1 and scales is None:
        bias = bias.expand(b.shape[0], -1)
    if scales is not None and b.shape[2] % 16:  # torch refuses these
        return False
    kind: dict[str, Any] = {"dtype": _DTYPES[a.dtype], "gated": gated, "n_major": b.stride(1) != 1}
    return not objection(a, b.mT, offs, bias, scales, **kind)


#: Serves the process.
groups = Groups()


def by_torch(
    a: Any, b: Any, *, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute the product with torch, and add the bias, which torch does not support."""
    # Else torch names what is no tensor.
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and isinstance(offs, torch.Tensor):
        if bias is not None:
            if wrong := wrong_bias(a, b, bias):
                raise ProblemError(wrong)
            return _added(by_torch(a, b, offs=offs, out_dtype=out_dtype), offs, bias)
        if b.ndim == 3 and not b.shape[0]:  # torch leaves the rows undefined
            raise ProblemError(
                f"b has shape {tuple(b.shape)}, without groups; give weights for at least one group"
            )
        if not a.device == b.device == offs.device:  # torch would read memory that is not there
            check_devices(a=a, b=b, offs=offs)
        offs = offs.contiguous()  # torch's kernel ignores its stride
    try:
        return torch._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    except RuntimeError as error:
        if wrong := wrong_groups(a, b, offs):
            raise ProblemError(wrong) from error
        raise


def check_ends(offs: torch.Tensor, rows: int) -> None:
    """Check that the groups' ends ascend from 0 to at most `rows`. Waits for the device.

    Checks nothing while values are unknown (`has_values`). Raises ProblemError if the ends do not ascend.
    """
    if not has_values(offs):
        return
    before = 0
    for group, end in enumerate(offs.reshape(-1).tolist()):
        if not before <= end <= rows:
            raise ProblemError(
                f"offs[{group}] is {end}, after {before} and with {rows} rows; give ascending ends: "
                "sizes.cumsum(0)"
            )
        before = end


def wrong_groups(a: Any, b: Any, offs: Any) -> str:
    """What is wrong with the groups of a product that torch refused; empty if they are not the cause."""
    if not isinstance(offs, torch.Tensor) or b.ndim != 3:
        return ""
    if a.ndim != 2:
        return "" if a.ndim == 3 else f"a has shape {tuple(a.shape)}; give (rows, k)"
    if offs.dtype is not torch.int32:
        return f"offs are {offs.dtype}; give int32: offs.to(torch.int32)"
    if offs.shape != b.shape[:1]:
        return f"offs have shape {tuple(offs.shape)}, b has {b.shape[0]} groups; give the end of each group"
    if offs.device != a.device or b.device != a.device:
        return f"a is on {a.device}, b on {b.device}, offs on {offs.device}; give all on one device"
    if a.shape[1] != b.shape[1]:
        return f"a has k {a.shape[1]} and b {b.shape[1]}; give a (rows, k) and b (groups, k, n)"
    if a.dtype is not b.dtype:
        return f"a is {a.dtype}, b {b.dtype}; give both the same dtype"
    return wrong_layout("a", a) or wrong_layout("b", b)


def wrong_layout(name: str, tensor: Any) -> str:
    """Why torch refuses the layout of an operand of a product of groups; empty if it does not."""
    if (address := _address(tensor)) % ALIGNMENT:
        return f"{name} begins at {address:#x}, not a multiple of {ALIGNMENT} bytes; clone() it"
    (lines, width), (across, along) = tensor.shape[-2:], tensor.stride()[-2:]
    if (along != 1 or across < max(1, width)) and (across != 1 or along < max(1, lines)):
        return (
            f"{name} has strides {tensor.stride()}; give one with k or n contiguous, and lines of their own: "
            f"{name}.contiguous()"
        )
    if any(stride * tensor.element_size() % ALIGNMENT for stride in tensor.stride() if stride != 1):
        return (
            f"{name} has strides {tensor.stride()}, of {tensor.element_size()} bytes; give multiples of "
            f"{ALIGNMENT} bytes: {name}.contiguous(), of n and k that are multiples"
        )
    return ""


def _address(tensor: Any) -> int:
    """A tensor's address; 0 if it has no memory."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def wrong_bias(a: Any, b: Any, bias: Any) -> str:
    """Why a bias cannot be added to a product of rows in groups; empty if it can."""
    if not isinstance(bias, torch.Tensor) or a.ndim != 2 or b.ndim != 3:
        return "bias is for a (rows, k) and b (groups, k, n); add it to other products"
    if bias.shape not in ((b.shape[2],), (b.shape[0], b.shape[2])):
        return f"bias has shape {tuple(bias.shape)}; give ({b.shape[2]},) or {(b.shape[0], b.shape[2])}"
    if bias.device != a.device:
        return f"bias is on {bias.device}, a on {a.device}; give both on one device"
    return ""


def _added(product: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add each group's bias to its rows of a product. Rows after the last group have no meaning."""
    if bias is None:
        return product
    if bias.ndim == 2:
        rows = torch.arange(product.shape[0], device=product.device, dtype=offs.dtype)
        bias = bias[torch.searchsorted(offs, rows, right=True).clamp_(max=bias.shape[0] - 1)]
    return product + bias.to(product.dtype)


# ---- traced code, and gradients ---------------------------------------------------------------------


def is_traced_well(a: Any, b: Any, offs: Any) -> bool:
    """Whether the operator takes these operands. Torch refuses the others itself, and multiplies fp16 and
    fp32 but does not trace them (2.13), on any device."""
    is_traced_other = a.dtype in _UNTRACED and (torch.compiler.is_compiling() or is_fake(a))
    return (
        a.device.type == b.device.type == offs.device.type
        and (is_traced_other or (a.dtype is torch.bfloat16 and a.device.type == extension.device_type()))
        and a.ndim == 2
        and b.ndim == 3
        and a.dtype is b.dtype
        and offs.dtype is torch.int32
    )


def traced(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `grouped_mm` while a graph is traced."""
    if offs is None or out_dtype not in (None, a.dtype) or not is_traced_well(a, b, offs):
        return by_torch(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        return _added(torch.ops.tunegemm.grouped_mm(a, b, offs, None), offs, bias)
    return torch.ops.tunegemm.grouped_mm(a, b, offs, bias)


def _compute(a: Any, b: Any, offs: Any, bias: Any = None) -> torch.Tensor:
    result = None if deterministic() else groups.below_autograd(a, b, offs, bias)
    return by_torch(a, b, offs=offs, bias=bias) if result is None else result


class _Differentiable(torch.autograd.Function):
    """The operator `tunegemm::grouped_mm` with the gradients of a and b."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, offs: Any, bias: Any) -> torch.Tensor:
        of_a, of_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if of_b else None, b if of_a else None, offs)
        ctx.k_major = b.stride(1) == 1
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = torch.ops.tunegemm.grouped_mm(a, b, offs, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients, which are grouped products too: b's is along k."""
        if grad is None:
            return (None,) * 4
        a, b, offs = ctx.saved_tensors
        if 0 in grad.stride():  # such as a sum's gradient: torch's product rejects its strides
            grad = grad.contiguous()
        of_a = None if b is None else torch.ops.tunegemm.grouped_mm(grad, b.mT, offs)
        of_b = None
        if a is not None:
            # Torch's operator can differentiate the gradient again.
            along = torch._grouped_mm if grad_enabled() else torch.ops.tunegemm.grouped_along_k
            # It has the weight's layout, as torch's: else autograd would copy it into `grad`.
            of_b = along(grad.t(), a, offs).mT if ctx.k_major else along(a.t(), grad, offs)
        return of_a, of_b, None, None


def _fake(a: Any, b: Any, offs: Any, bias: Any = None) -> torch.Tensor:
    if a.dtype is b.dtype is torch.float32:
        torch._check(a.shape[-1] == b.shape[-2], lambda: "contraction dimension of a and b must match")
        return a.new_empty((a.shape[0], b.shape[2]) if b.ndim == 3 else (len(offs), len(a), b.shape[1]))
    if a.dtype is b.dtype is torch.float16:  # torch checks bf16 and lays it out, of the same size
        return _fake(a.view(torch.bfloat16), b.view(torch.bfloat16), offs).view(torch.float16)
    return torch._grouped_mm(a, b, offs=offs)


def _above_autograd(keyset: Any, a: Any, b: Any, offs: Any, bias: Any = None) -> torch.Tensor:
    if is_transformed():
        return by_torch(a, b, offs=offs, bias=bias)
    if has_gradient(a, b):
        return _Differentiable.apply(a, b, offs, bias)
    operator = torch.ops.tunegemm.grouped_mm.default
    return extension.without_derivative(operator, _compute, keyset, a, b, offs, bias)


#: Of operators of groups: Inductor keeps the strides of their operands.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
for _schema, _autograd in (
    ("grouped_mm(Tensor a, Tensor b, Tensor offs, Tensor? bias=None) -> Tensor", _above_autograd),
    ("grouped_along_k(Tensor a, Tensor b, Tensor offs) -> Tensor", None),
):
    extension.define(_schema, _compute, _fake, TAGS, _autograd)


def _below_aten(
    a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """ATen's ``_grouped_mm``, which torch.nn.functional.grouped_mm calls; None if torch computes it."""
    if offs is None or bias is not None or out_dtype not in (None, a.dtype) or deterministic():
        return None
    return groups.below_autograd(a, b, offs, None)


extension.take_over("_grouped_mm", _below_aten)
