"""The steps that a kernel applies to the accumulators before it stores them: an `Epilogue`.

An epilogue is written as its steps, in this order, joined by ``+``, such as ``bias_n+gelu_tanh``:

    alpha                       times a number
    scale_tensor, scale_rowwise times scale_a and scale_b: one fp32 each, or one for each row and each column
    beta_c                      plus a number times a matrix C
    bias_n, bias_m              plus a vector: a value for each column, or for each row
    relu, gelu, gelu_tanh, silu an activation; gelu is by erf, as torch's default
    reglu, geglu, geglu_tanh, swiglu
                                gated: columns 2j, 2j + 1 of the product give column j of D, act(even) * odd
    residual                    plus a matrix, after the activation
    amax                        the largest |D| before conversion, into an fp32 scalar

or as one user function: ``custom:NAME@HASH``. The text is part of a `Problem`; arithmetic is fp32. A user
function may call the functions below the class. They accept torch tensors, for the reference, and the values
of a CuTe kernel, so that both run the same formula.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from tunegemm.errors import ProblemError

#: Activations and the gated forms of them.
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
GATE_OF = {activation: gate for gate, activation in GATED.items()}

#: The steps in their order; at most one from each group.
_ORDER = (
    ("alpha",),
    ("scale_tensor", "scale_rowwise"),
    ("beta_c",),
    ("bias_n", "bias_m"),
    (*ACTIVATIONS, *GATED),
    ("residual",),
    ("amax",),
)

#: Annotations of a user function, and the operand kind of each: a number given with the call; an fp32 on the
#: device; a vector with a value for each column or row; a matrix of D's shape and major.
KINDS = {"Number": "number", "Scalar": "scalar", "PerColumn": "n", "PerRow": "m", "Matrix": "matrix"}
Number: TypeAlias = Any
Scalar: TypeAlias = Any
PerColumn: TypeAlias = Any
PerRow: TypeAlias = Any
Matrix: TypeAlias = Any

#: 64-bit words that a launch passes for the operands: an address, and of a matrix its two strides as well.
MAX_WORDS = 12

_CUSTOM = re.compile(r"custom:([A-Za-z_]\w*)@([0-9a-f]{16})")


@dataclass(frozen=True)
class Operand:
    """Something an epilogue reads (or, `amax`, writes) besides A and B."""

    name: str
    kind: str
    """One of the values of `KINDS`."""
    fp32: bool = False
    """Whether it is fp32 whatever the output is; else it has the output's dtype (bf16 for an fp8 output)."""

    @property
    def words(self) -> int:
        """64-bit words of a launch: a matrix has an address, a leading dimension and a batch stride."""
        return 3 if self.kind == "matrix" else 1


@dataclass(frozen=True)
class Epilogue:
    """The steps, or the user's function, and the operands they read. Made by `parse` or `custom`."""

    steps: tuple[str, ...] = ()
    function: Custom | None = None

    def __post_init__(self) -> None:
        """Raises ProblemError for a step that is unknown, repeated or out of order."""
        if not isinstance(self.steps, tuple):
            raise ProblemError(f"epilogue steps {self.steps!r:.40} are no tuple; Epilogue.parse reads a text")
        places = []
        for step in self.steps:
            place = next((i for i, group in enumerate(_ORDER) if step in group), None)
            if place is None:
                known = ", ".join(name for group in _ORDER for name in group)
                raise ProblemError(
                    f"epilogue step {step!r} in {str(self)!r} is not known; use some of {known}"
                )
            places.append(place)
        if places != sorted(set(places)):
            order = ", ".join("|".join(group) for group in _ORDER)
            raise ProblemError(f"epilogue {str(self)!r}: use the order {order}, with one step of each group")

    @staticmethod
    def parse(text: str) -> Epilogue:
        """Read an epilogue from its text; the empty text stores the product as it is.

        Raises ProblemError for steps as the class does, and for a user's function that this process has not
        defined.
        """
        if not isinstance(text, str):
            raise ProblemError(f"epilogue {text!r:.40} is not a text; give its steps, such as bias_n+relu")
        return _parse(text)

    @staticmethod
    def custom(function: Callable[..., Any]) -> Epilogue:
        """A user's own epilogue: ``function(acc, operand, ...)``, with each operand annotated by its kind.

        The kinds are `Number`, `Scalar`, `PerColumn`, `PerRow` and `Matrix` from this module, as in::

            @Epilogue.custom
            def capped(acc, bias: PerColumn, cap: Number):
                return cap * tanh((acc + bias) / cap)

        The function is traced into the kernel from its source, element by element. It may use its arguments,
        numbers, and exp, log, sqrt, tanh, erf, sigmoid, absolute, maximum, minimum and where from this
        module. Raises ProblemError if it uses anything else or branches; `where` chooses element by element.
        """
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:  # TypeError: of no function
            remedy = f"{error}; define it in a file" if isinstance(error, OSError) else "give a plain def"
            raise ProblemError(f"epilogue {function!r:.60}: {remedy}") from None
        return Epilogue(function=define(textwrap.dedent(source)))

    def __bool__(self) -> bool:
        return bool(self.steps) or self.function is not None

    def __str__(self) -> str:
        return "+".join(self.steps) if self.function is None else str(self.function)

    @property
    def is_defined(self) -> bool:
        """Whether this process knows the operands: false only for a user's function of another process."""
        return self.function is None or str(self.function) in _definitions

    @property
    def gated(self) -> bool:
        """Whether D has half the columns of the product."""
        return any(step in GATED for step in self.steps)

    @property
    def scales(self) -> bool:
        """Whether fp32 scales multiply the product, or a user's function may do so."""
        return self.function is not None or "scale_tensor" in self.steps or "scale_rowwise" in self.steps

    @property
    def operands(self) -> tuple[Operand, ...]:
        """A launch's arguments after (a, b, out), in order."""
        if self.function is not None:
            return self.function.definition.operands
        return tuple(operand for step in self.steps for operand in _OPERANDS.get(step, ()))

    @property
    def words(self) -> int:
        return sum(operand.words for operand in self.operands)

    def before_gate(self, acc: Any, values: Mapping[str, Any]) -> Any:
        """Apply all steps up to the activation, or up to the gate. values: the operands, by name."""
        if self.function is not None:
            definition = self.function.definition
            return definition.function(acc, *(values[operand.name] for operand in definition.operands))
        for step in self.steps:
            if step in _BEFORE:
                acc = _BEFORE[step](acc, values)
            elif step in ACTIVATIONS:
                acc = activate(step, acc)
        return acc

    def gate(self, even: Any, odd: Any) -> Any:
        """Apply the gate to two neighbouring columns of the product."""
        return activate(next(GATED[step] for step in self.steps if step in GATED), even) * odd

    def after_gate(self, value: Any, values: Mapping[str, Any]) -> Any:
        """Apply the steps after the activation."""
        return value + values["residual"] if "residual" in self.steps else value

    def reference(self, product: Any, values: Mapping[str, Any]) -> Any:
        """D in fp32 from the fp32 product, both torch tensors; vectors, matrices and numbers come by name.
        The caller computes `amax`: the largest magnitude of the result."""
        broadcast = dict(values)
        for operand in self.operands:
            if operand.kind != "number":
                value = values[operand.name].float()
                broadcast[operand.name] = value[:, None] if operand.kind == "m" else value
        value = self.before_gate(product, broadcast)
        if self.gated:
            value = self.gate(value[..., 0::2], value[..., 1::2])
        return self.after_gate(value, broadcast)


@dataclass(frozen=True)
class Custom:
    """A user's function, identified by its name and the hash of its source."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"custom:{self.name}@{self.digest}"

    @property
    def source(self) -> str:
        """The source for a compiling process. Raises ProblemError if this process has not defined the
        function."""
        return self.definition.source

    @property
    def definition(self) -> _Definition:
        """The function here. Raises ProblemError as `source`."""
        try:
            return _definitions[str(self)]
        except KeyError:
            raise ProblemError(
                f"epilogue {self} is not defined here; call Epilogue.custom on the function it was tuned with"
            ) from None


@dataclass(frozen=True)
class _Definition:
    source: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...]


_definitions: dict[str, _Definition] = {}

#: What chooses once for all elements, and so for none in a kernel.
_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Not, ast.Assert, ast.Match)


def define(source: str) -> Custom:
    """Define a user's function from its source, as compiling processes do."""
    lines = source.splitlines()
    while lines and not lines[0].startswith("def "):
        lines.pop(0)  # decorators
    if not lines:
        raise ProblemError(f"epilogue {source.strip()!r} is not a function by name; give a plain def")
    source = "\n".join(lines).rstrip() + "\n"
    known: dict[str, Any] = {name: globals()[name] for name in FUNCTIONS} | KINDS
    scope = dict(known)
    try:
        (tree,) = ast.parse(source).body
        exec(compile(source, "<epilogue>", "exec", dont_inherit=True), scope)
    except (SyntaxError, NameError) as error:
        raise ProblemError(f"epilogue {source.splitlines()[0]!r}: {error}; give a plain def") from None
    name = getattr(tree, "name", "")
    if name in known:
        raise ProblemError(f"epilogue {name!r} has the same name as a built-in function; rename it")
    if any(isinstance(node, _BRANCHES) for node in ast.walk(tree)):
        raise ProblemError(f"epilogue {name!r} branches, but all elements must take one path; use where")
    function = scope[name]
    allowed = {*FUNCTIONS, *function.__code__.co_varnames}
    if foreign := [used for used in function.__code__.co_names if used not in allowed]:
        raise ProblemError(
            f"epilogue {name!r} uses {foreign[0]!r}, which kernels do not have; use {', '.join(FUNCTIONS)}"
        )
    _, *operands = inspect.signature(function).parameters.values()
    for operand in operands:
        if operand.annotation not in KINDS.values():
            raise ProblemError(
                f"operand {operand.name!r} of epilogue {name!r} lacks an annotation of its kind; "
                f"use one of {', '.join(KINDS)}"
            )
    described = tuple(Operand(o.name, o.annotation, fp32=o.annotation == "scalar") for o in operands)
    if (words := sum(operand.words for operand in described)) > MAX_WORDS:
        raise ProblemError(
            f"epilogue {name!r} takes {words} words of operands > {MAX_WORDS}; use fewer matrices"
        )
    custom = Custom(name, hashlib.sha256(source.encode()).hexdigest()[:16])
    _definitions[str(custom)] = _Definition(source, function, described)
    return custom


@lru_cache(maxsize=1024)
def _parse(text: str) -> Epilogue:
    if match := _CUSTOM.fullmatch(text):
        return Epilogue(function=Custom(*match.groups()))
    return Epilogue(tuple(text.split("+")) if text else ())


_OPERANDS: dict[str, tuple[Operand, ...]] = {
    "alpha": (Operand("alpha", "number"),),
    "scale_tensor": (Operand("scale_a", "scalar", fp32=True), Operand("scale_b", "scalar", fp32=True)),
    "scale_rowwise": (Operand("scale_a", "m", fp32=True), Operand("scale_b", "n", fp32=True)),
    "beta_c": (Operand("beta", "number"), Operand("c", "matrix")),
    "bias_n": (Operand("bias", "n"),),
    "bias_m": (Operand("bias", "m"),),
    "residual": (Operand("residual", "matrix"),),
    "amax": (Operand("amax", "scalar", fp32=True),),
}

_BEFORE: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "alpha": lambda acc, arguments: acc * arguments["alpha"],
    "scale_tensor": lambda acc, arguments: acc * (arguments["scale_a"] * arguments["scale_b"]),
    "scale_rowwise": lambda acc, arguments: acc * arguments["scale_a"] * arguments["scale_b"],
    "beta_c": lambda acc, arguments: acc + _weighted(arguments["c"], arguments["beta"]),
    "bias_n": lambda acc, arguments: acc + arguments["bias"],
    "bias_m": lambda acc, arguments: acc + arguments["bias"],
}


def activate(name: str, x: Any) -> Any:
    """relu, gelu, gelu_tanh or silu of fp32 values."""
    if name == "relu":
        return maximum(x, 0.0)
    if name == "silu":
        return x * sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (erf(x * math.sqrt(0.5)) + 1.0)
    # 0.5 (1 + tanh u) = sigmoid(2 u): one exponential and one reciprocal
    return x * sigmoid(x * (x * x * (0.044715 * 2 * math.sqrt(2 / math.pi)) + 2 * math.sqrt(2 / math.pi)))


#: Functions that a user's function may call.
FUNCTIONS = ("exp", "log", "sqrt", "tanh", "erf", "sigmoid", "absolute", "maximum", "minimum", "where")


def _is_torch(*values: Any) -> bool:
    return any(type(value).__module__.startswith("torch") for value in values)


def _unary(name: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if _is_torch(x):
            import torch

            return getattr(torch, name)(x)
        from cutlass.cute import math as cute_math

        return getattr(cute_math, name)(x, fastmath=True)

    function.__name__ = name
    return function


exp = _unary("exp")
log = _unary("log")
sqrt = _unary("sqrt")
tanh = _unary("tanh")
erf = _unary("erf")


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    if _is_torch(x):
        return 1.0 / (exp(x * -1.0) + 1.0)
    from cutlass.cute import math as cute_math

    exp2 = getattr(cute_math, "exp2")  # noqa: B009 - the module defines its functions in a loop
    return _reciprocal(exp2(x * -math.log2(math.e), fastmath=True) + 1.0)


def _reciprocal(x: Any) -> Any:
    """1 / x in one instruction; a division, and the compiler's `rcp`, fast or not, take a dozen."""
    from cutlass import Float32, cute

    if not isinstance(x, cute.TensorSSA):
        return cute.arch.rcp_approx(x)
    values = cute.make_rmem_tensor(x.shape, Float32)
    values.store(x)
    for index in range(cute.size(values)):
        values[index] = cute.arch.rcp_approx(values[index])
    return values.load()


def _weighted(matrix: Any, number: Any) -> Any:
    """The product of both; 0 if the number is 0, whatever the matrix holds, because torch then skips it."""
    if _is_torch(matrix):
        return matrix * number if number else matrix.new_zeros(())
    from cutlass import Float32, cute

    return where(cute.full(matrix.shape, number, Float32) != 0.0, matrix * number, 0.0)


def absolute(x: Any) -> Any:
    """|x|; NaN for NaN."""
    return where(x > x * -1.0, x, x * -1.0)


def maximum(x: Any, y: Any) -> Any:
    """The larger of two values, either of which may be a number; NaN if one is NaN, as in torch.maximum."""
    return _extreme("maximum", x, y, operator.gt)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two values, either of which may be a number; NaN if one is NaN, as in torch.minimum."""
    return _extreme("minimum", x, y, operator.lt)


def _extreme(name: str, x: Any, y: Any, precedes: Callable[[Any, Any], Any]) -> Any:
    """x where it precedes, else y; NaN if either is NaN: then comparisons are false and keep the second."""
    if _is_torch(x, y):
        import torch

        tensor = x if _is_torch(x) else y
        x, y = (value if _is_torch(value) else tensor.new_full((), value) for value in (x, y))
        return getattr(torch, name)(x, y)
    if not hasattr(x, "shape"):  # a number; equal if neither precedes
        x, y = y, x
    if isinstance(y, int | float):
        return where(precedes(y, x), y, x)
    return where(x != x, x, where(precedes(x, y), x, y))


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    if _is_torch(condition):
        import torch

        return torch.where(condition, x, y)
    from cutlass import cute

    return cute.where(condition, x, y)


def operand_dtype(operand: Operand, out_dtype: str) -> str:
    """The short dtype name of an operand, given the output's dtype."""
    if operand.fp32 or operand.kind == "number":
        return "fp32"
    return "bf16" if out_dtype.startswith("fp8") else out_dtype


def check_operands(epilogue: Epilogue, operands: Sequence[Any]) -> None:
    """Raises ProblemError unless as many operands are given as the epilogue takes."""
    names = [operand.name for operand in epilogue.operands]
    if len(operands) != len(names):
        raise ProblemError(
            f"epilogue {epilogue} takes {len(names)} operands "
            f"({', '.join(names) or 'none'}), not {len(operands)}"
        )
