"""Handle products whose kernels cannot be launched here, and products without a kernel: compile the kernel in
the background, or warn once about the missing part and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tunegemm.choose.policies import Mode
from tunegemm.choose.selection import Selection
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.background import Answer, BackgroundCompiler
from tunegemm.dispatch.guards import capturing
from tunegemm.dispatch.notices import Notices, advice, named_error, weight_of, who
from tunegemm.dispatch.states import State
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade


class Wanted(NamedTuple):
    """A product that needs a launcher."""

    problem: Problem
    device: Device
    place: torch.device
    """The torch device of its operands."""
    name: str = ""
    """The name of the called function; empty below torch's own functions."""


def compile_first(
    compiler: BackgroundCompiler, state: State, wanted: Wanted, options: Sequence[Record]
) -> Answer:
    """Compile the first of these records' kernels that can be compiled, in the background."""
    answer = Answer()
    if capturing(wanted.place):
        return answer
    for record in options:
        try:
            answer = compiler.ask(record, wanted.device)
        except Exception as error:  # a foreign record's family may raise anything
            answer = Answer(failure=named_error(error))
        if answer.kernel:
            state.wait(wanted.problem, wanted.place.index or 0, answer.kernel, record)
        if answer.kernel or answer.refusal:
            break
    return answer


def explain_missing(
    notices: Notices,
    answer: Answer,
    state: State,
    snapshot: Snapshot,
    wanted: Wanted,
    selection: Selection,
    mode: Mode,
    why: str,
) -> None:
    """Warn about a product's missing parts. answer: from `compile_first`; why: what the selection's last
    option lacks, or why it has no options."""
    problem, device, _, name = wanted
    weight = device.name, *weight_of(problem)
    if answer.kernel:
        if state.policy.replaces_torch:
            notices.warn(
                f"{problem} on {device.name}: its kernel is compiled in the background, and torch "
                f"computes it meanwhile: {state.policy} does not hold until then",
                about=("compiled", *weight),
            )
        return
    if not selection.options:
        answer = Answer(refusal=_missing_package(snapshot, problem, device))
    if answer.refusal:
        notices.warn(
            f"recorded kernels cannot run on {device.name} and are not compiled: {answer.refusal}; "
            "tunegemm falls back to torch for their products",
        )
        return
    if answer.failure:
        why = f"its kernel does not compile here ({answer.failure})"
    # In mode online the product is tuned later, or a warning says why it could not be.
    if selection.outcome == "predicted":
        notices.warn(
            f"a kernel that is predicted to be faster than torch cannot run on {device.name}: {why}; "
            "products like that fall back to torch",
            about=("predicted", why),
        )
    elif selection.options or (
        selection.advises_tuning and mode != "online" and not snapshot.warnings  # which may have its record
    ):
        notices.untuned(problem)
        notices.warn(
            lambda: (
                f"{problem} on {device.name}: {why}; {who(name)} falls back to torch. "
                + advice(problem, "Tune it with")
            ),
            about=("untuned", *weight),
        )


def _missing_package(snapshot: Snapshot, problem: Problem, device: Device) -> str:
    """The package to install for the problem's record; empty if none is missing."""
    judged = snapshot.judged(problem, device.fingerprint)
    if not judged or judged[0][0].grade is not Grade.SEED:
        return ""
    try:
        return families.get(judged[0][1].candidate.family).unavailable(launching=True) or ""
    except TunegemmError:  # another package's family, which is not installed
        return ""
