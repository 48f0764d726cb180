"""The user's settings for dispatch: a `Policy` and a `Mode`.

A policy says what dispatch prefers among candidates, such as speed or the same bits in each run. The mode,
set by the environment, says how far dispatch goes to serve a product.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, cast, get_args

from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import PolicyError
from tunegemm.generate.launching import tma_takes
from tunegemm.untrusted import digits, shown

Preference = Literal["fastest", "deterministic", "batch_invariant", "no_workspace", "min_energy"]


@dataclass(frozen=True)
class Policy:
    """Decides which candidates may be launched, and which of them is best."""

    prefer: Preference = "fastest"
    """See docs/guide/policies.md."""
    max_sms: int | None = None
    """How many multiprocessors a launch may fill; None for all."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefer, str) or self.prefer not in get_args(Preference):
            raise PolicyError(
                f"policy {self.prefer!r} is not known; use one of {', '.join(get_args(Preference))}"
            )
        if self.max_sms is not None:
            is_whole = isinstance(self.max_sms, Integral) and not isinstance(self.max_sms, bool)
            if not is_whole or self.max_sms < 1:
                raise PolicyError(f"max_sms {shown(self.max_sms)}: give 1 or more multiprocessors, or None")
            object.__setattr__(self, "max_sms", int(self.max_sms))  # also NumPy's integers

    def __str__(self) -> str:
        return self.prefer + (f" on {self.max_sms} multiprocessors" if self.max_sms else "")

    @property
    def replaces_torch(self) -> bool:
        """Whether torch cannot fulfil the policy, so that a slower kernel may serve.

        Torch leaves no multiprocessors free, and its library chooses again for each number of rows.
        """
        return self.max_sms is not None or self.is_batch_invariant

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits may not depend on how many rows there are."""
        return self.prefer == "batch_invariant"

    def refusal(self, problem: Problem, candidate: Candidate) -> str:
        """Why the candidate must not be launched under this policy; empty if it may be."""
        if self.max_sms is not None and (reason := _grid_refusal(candidate)):
            return reason
        judge = _JUDGES.get(self.prefer)
        return judge(problem, candidate) if judge is not None else ""

    def device(self, device: Device) -> Device:
        """The device as launches see it: with only as many multiprocessors as they may fill."""
        if self.max_sms is None or self.max_sms >= device.sm_count:
            return device
        return device.with_sm_budget(self.max_sms)


FASTEST = Policy()


def parse_policy(text: str) -> Policy:
    """Parse text such as ``deterministic`` or ``fastest,max_sms=120``, as in the environment.

    Raises PolicyError if the text is not a policy.
    """
    name, *options = (word.strip() for word in text.split(","))
    policy = Policy(name or "fastest")  # type: ignore[arg-type]  # checked there
    for option in options:
        key, _, value = option.partition("=")
        max_sms = digits(value)
        if key != "max_sms" or max_sms is None:
            raise PolicyError(f"policy {shown(text)}: {shown(option)} is not max_sms=NUMBER")
        policy = replace(policy, max_sms=max_sms)
    return policy


def _deterministic(problem: Problem, candidate: Candidate) -> str:
    """Why a candidate may give other bits in another run; empty if it cannot.

    All our kernels are deterministic: split-K adds its splits in order, whichever block finishes last. A
    library algorithm qualifies if it neither splits k nor reduces: NVIDIA promises equal bits except for some
    kernels on several streams, without naming them. For torch.mm, `torch.use_deterministic_algorithms`
    decides.
    """
    if candidate.params.get("algorithm") != "cublaslt":
        return ""
    if _splits(candidate) or candidate.params.get("reduction_scheme", "NONE") not in ("NONE", 0):
        return "a library algorithm that splits k in an unknown order"
    return ""


def _batch_invariant(problem: Problem, candidate: Candidate) -> str:
    """Why a candidate is not of the reduction class that the policy admits; empty if it is.

    Measurements showed that the class does not depend on m, and it has the most kernels.
    """
    from tunegemm.generate import families
    from tunegemm.generate.tiles import ORDERED

    if "tile_m" not in candidate.params:
        return "a library's product, whose order of sums may change with m"
    if families.reduction_class(problem, candidate) != ORDERED:
        return f"its order of sums may differ from the class {ORDERED!r}"
    return ""


def _no_workspace(problem: Problem, candidate: Candidate) -> str:
    if num_bytes := int(candidate.params.get("workspace_bytes", 0)):
        return f"it needs {num_bytes} B of workspace"
    if candidate.params.get("algorithm") is not None:
        return ""
    if _splits(candidate):
        return "k splits keep their sums in a workspace"
    from tunegemm.generate import families

    if families.get(candidate.family).tma and not tma_takes(problem):
        return "it multiplies aligned copies of these operands"
    return ""


def _splits(candidate: Candidate) -> bool:
    params = candidate.params
    return int(params.get("split_k", 1)) > 1 or params.get("tile_scheduler") == "stream_k"


def _grid_refusal(candidate: Candidate) -> str:
    """Why a candidate's grid does not leave multiprocessors free; empty if it does.

    Only a persistent grid of one block per multiprocessor leaves the others free.
    The hardware gives every multiprocessor a first block before any gets a second.
    """
    if "tile_m" not in candidate.params:
        return "a library's kernel uses any number of multiprocessors"
    per_sm = int(candidate.params.get("ctas_per_sm", candidate.params.get("occupancy", 1)))
    if candidate.params.get("ctas") not in ("all", "balanced") or per_sm != 1:
        return "its grid is not one block per multiprocessor"
    if candidate.params.get("reduction") == "second_kernel" and _splits(candidate):
        return "its second kernel fills all multiprocessors"
    return ""


_JUDGES: dict[str, Callable[[Problem, Candidate], str]] = {
    "deterministic": _deterministic,
    "batch_invariant": _batch_invariant,
    "no_workspace": _no_workspace,
}


#: ``TUNEGEMM_MODE``. ``off``: torch computes every product. ``exact``: kernels serve recorded problems only.
#: ``predict``: kernels also serve problems for which measurements of other problems promise a gain.
#: ``online``: as ``predict``, and problems without a record are measured or tuned when the GPU is idle
#: (`dispatch.background`).
Mode = Literal["off", "exact", "predict", "online"]
DEFAULT: Mode = "predict"


def read_mode(warn: Callable[[str], None]) -> Mode:
    """The mode that the environment asks for; for an unknown mode, warn and return the default."""
    mode = os.environ.get("TUNEGEMM_MODE", "") or DEFAULT
    if mode not in get_args(Mode):
        remedy = f"use one of {', '.join(get_args(Mode))} or unset it"
        warn(f"TUNEGEMM_MODE={mode!r} is not known and has no effect; {remedy}")
        return DEFAULT
    return cast(Mode, mode)


#: Variables that are 0 or 1, and their defaults.
SWITCHES = {
    "TUNEGEMM_CHECK_GROUPS": False,  # whether the ends of groups and experts' numbers are checked
    "TUNEGEMM_COMPILE": True,  # whether missing kernels are compiled in the background
    "TUNEGEMM_ENABLE": False,  # whether a program that nobody edited is served
    "TUNEGEMM_SGLANG": True,  # whether SGLang is served
    "TUNEGEMM_VLLM": True,  # whether vLLM is served
    "TUNEGEMM_VLLM_GATES": True,  # whether vLLM's gates are fused with the product of gate and up
}


def read_switch(name: str, warn: Callable[[str], None]) -> bool:
    """A variable of `SWITCHES`; for any other value than 0 and 1, warn and return the default."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        warn(f"{name}={text!r} is not known and has no effect; use 0 or 1 or unset it")
    return text == "1" if text in ("0", "1") else SWITCHES[name]


def read_sample(warn: Callable[[str], None]) -> int:
    """``TUNEGEMM_TEST_SAMPLE``; for anything else than a number from 1, warn and return 1."""
    text = os.environ.get("TUNEGEMM_TEST_SAMPLE") or "1"
    if not (sample := digits(text)):
        warn(f"TUNEGEMM_TEST_SAMPLE={shown(text)} is not a number from 1 and has no effect; correct it")
    return sample or 1


def read_policy(warn: Callable[[str], None]) -> Policy:
    """``TUNEGEMM_POLICY``, such as ``deterministic`` or ``fastest,max_sms=120``; warn about a mistake."""
    try:
        return parse_policy(os.environ.get("TUNEGEMM_POLICY", ""))
    except PolicyError as error:
        warn(f"TUNEGEMM_POLICY: {error}; it has no effect")
        return FASTEST
