"""The outlook of a problem: what is predicted of it on a device, by the model that is for such products."""

from __future__ import annotations

import sys
import warnings
from functools import cache

from tunegemm.choose.fitted import Allows, Fitted, Outlook, anything
from tunegemm.choose.plain import Selector
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.errors import FileError, TunegemmWarning, one_line


def outlook(problem: Problem, device: Device, allows: Allows = anything) -> Outlook:
    """What the device's model says of a problem. A file that is of no use is one warning."""
    model = _model_for(problem)
    if not model.covers(problem):
        return Outlook(decides=False, rows=(1, sys.maxsize))
    fitted = load(model, device.name)
    if isinstance(fitted, str):
        return Outlook(refusal=fitted, decides=False, rows=(1, sys.maxsize))
    fingerprint = device.fingerprint
    if fingerprint.mig or fingerprint.sm_budget < fingerprint.sm_count:
        return Outlook(refusal="predictions are for whole GPUs", decides=False, rows=(1, sys.maxsize))
    return fitted.outlook(problem, device, allows)


def _model_for(problem: Problem) -> type[Fitted]:
    if not problem.epilogue:
        return Selector
    from tunegemm.choose.fused import Gains  # a plain product does without what it imports

    return Gains


@cache
def load(model: type[Fitted], gpu: str) -> Fitted | str:
    """The model of a kind of GPU, or why there is none."""
    try:
        fitted = model.of(gpu)
    except (FileError, OSError) as error:  # the miss says so, and so does the layer of shipped records
        return f"nothing is predicted: {one_line(error)}"
    except Exception as error:  # a truncated list, for one
        warnings.warn(f"{one_line(error)}; nothing is predicted until then", TunegemmWarning, stacklevel=2)
        return one_line(error)
    return fitted or f"nothing is predicted for {gpu}, which was not measured"
