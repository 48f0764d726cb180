"""From a problem to a launcher on a device: the first of the kernels chosen for it that can be launched here.

Where there is none, one warning says what is missing and what to do, or the kernel is compiled meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from tunegemm.choose.selection import Selection, select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.background import Answer, BackgroundCompiler
from tunegemm.dispatch.guards import capturing
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.modes import Mode
from tunegemm.dispatch.notices import Notices, advice, named_error, weight_of, who
from tunegemm.dispatch.plans import State
from tunegemm.errors import TunegemmError, TunegemmWarning, one_line, raised
from tunegemm.generate import families
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade

_log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A product that a launcher is wanted for."""

    problem: Problem
    device: Device
    device_index: int
    """torch's number of the device."""
    name: str
    """The function that was called; empty below torch's own functions."""


class Finder:
    """Finds launchers for one planner."""

    def __init__(
        self,
        device_type: str,
        notices: Notices,
        compiler: BackgroundCompiler,
        *,
        find: Callable[[str], Device],
        prepare: Callable[[Record, Device], Prepared],
        rivals: Callable[[Problem], Sequence[Record]],
    ) -> None:
        """find, prepare, rivals: as of `Planner`."""
        self._device_type, self._notices, self._compiler = device_type, notices, compiler
        self._find, self._prepare, self._rivals = find, prepare, rivals
        self._devices: dict[int, Device | None] = {}

    def device(self, index: int, name: str) -> Device | None:
        """The device of an index, or None after a warning. name: the function that was called."""
        if index not in self._devices:
            try:
                self._devices[index] = self._find(f"{self._device_type}:{index}")
            except Exception as error:  # of the driver or NVML, too
                self._devices[index] = None
                self._notices.warn(f"{one_line(error)}; {who(name)} falls back to torch there")
        return self._devices[index]

    def known_device(self, index: int) -> Device | None:
        """The device of an index, where it was looked for."""
        return self._devices.get(index)

    def forget_devices(self) -> None:
        """They are looked for anew."""
        self._devices = {}

    def launcher(
        self, state: State, snapshot: Snapshot, wanted: Wanted, mode: Mode
    ) -> tuple[Prepared | None, Selection]:
        """The launcher, or None after what can be done about that; and what was chosen for the problem."""
        problem, device, index, _ = wanted
        selection = select(
            snapshot,
            problem,
            device,
            near=mode != "exact",
            policy=state.policy,
            # Databases that cannot be read are not waited for again.
            rivals=self._rivals if not snapshot.warnings else lambda problem: (),
        )
        why = selection.why
        for record in selection.options:
            try:
                with torch.cuda.device(index) if self._device_type == "cuda" else nullcontext():
                    found = self._prepare(record, state.policy.device(device))
            except Exception as error:  # what a foreign record's family raises is not known here
                why = named_error(error)
                continue
            return replace(found, ratio=record.ratio, record=record), selection
        self._without_kernel(state, snapshot, wanted, selection, mode, why)
        return None, selection

    def _without_kernel(
        self,
        state: State,
        snapshot: Snapshot,
        wanted: Wanted,
        selection: Selection,
        mode: Mode,
        why: str,
    ) -> None:
        """Has the kernel of a product that none can be launched for compiled, or warns of what is missing.

        why: what the last of the selection's options lacks, or why there are none.
        """
        problem, device, _, name = wanted
        answer = self.compile(state, wanted, selection.options)
        warn, weight = self._notices.warn, (device.name, *weight_of(problem))
        if answer.kernel:
            if state.policy.replaces_torch:
                warn(
                    f"{problem} on {device.name}: its kernel is compiled in the background, and torch "
                    f"computes it meanwhile: {state.policy} does not hold until then",
                    about=("compiled", *weight),
                )
            return
        if not selection.options:
            answer = Answer(refusal=_missing_package(snapshot, problem, device))
        if answer.refusal:
            warn(
                f"recorded kernels cannot run on {device.name} and none is compiled: {answer.refusal}; "
                "tunegemm falls back to torch for their products",
            )
            return
        if answer.failure:
            why = f"its kernel does not compile here ({answer.failure})"
        # In mode online the product is tuned later, or a warning says why it could not be.
        if selection.outcome == "predicted":
            warn(
                f"a kernel that is predicted to be faster than torch cannot run on {device.name}: {why}; "
                "products like that fall back to torch",
                about=("predicted", why),
            )
        elif selection.options or (
            selection.advises_tuning
            and mode != "online"
            and not snapshot.warnings  # which may have its record
        ):
            self._notices.untuned(problem)
            warn(
                lambda: (
                    f"{problem} on {device.name}: {why}; {who(name)} falls back to torch. "
                    + advice(problem, "Tune it with")
                ),
                about=("untuned", *weight),
            )

    def compile(self, state: State, wanted: Wanted, options: Sequence[Record]) -> Answer:
        """What is done about the first of these records whose kernel can be compiled, in the background."""
        answer = Answer()
        if capturing(torch.device(self._device_type, wanted.device_index)):
            return answer
        for record in options:
            try:
                answer = self._compiler.ask(record, wanted.device)
            except Exception as error:  # likewise
                answer = Answer(failure=named_error(error))
            if answer.kernel:
                state.wait(wanted.problem, wanted.device_index, answer.kernel, record)
            if answer.kernel or answer.refusal:
                break
        return answer

    @contextmanager
    def guarded(self, state: State) -> Iterator[None]:
        """Whatever is raised inside, by our own mistake, too, costs a product its kernel and draws one
        warning: then torch computes it, or raises its own error."""
        try:
            yield
        except TunegemmWarning:  # which the user has made an error
            raise
        except Exception as error:
            _log.debug("planning failed", exc_info=error)
            if isinstance(error, OSError) and state.snapshot is not None and state.snapshot.warnings:
                return  # what could not be read was said
            what = raised(error)
            self._notices.warn(
                f"planning failed ({what}: {one_line(error)}); tunegemm falls back to torch for such "
                "products. Logging of `tunegemm` at level DEBUG has the traceback",
                about=("planning", what),
            )


def _missing_package(snapshot: Snapshot, problem: Problem, device: Device) -> str:
    """What has to be installed for the problem's record; empty where that is not what it lacks."""
    judged = snapshot.judged(problem, device.fingerprint)
    if not judged or judged[0][0].grade is not Grade.SEED:
        return ""
    try:
        return families.get(judged[0][1].candidate.family).unavailable(launching=True) or ""
    except TunegemmError:  # another package's family, which is not installed
        return ""
