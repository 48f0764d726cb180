"""Measures candidates on a real GPU, in a process of its own that may die.

`worker` is the parent's side, `session` the child's; `backend` knows CUDA, `race` the order of rounds,
`operands` data and correctness, `statistics` what the samples say. Torch loads in the child only.
"""

from tunegemm.measure.policy import FINAL, HEAT, SCREEN, Job, Policy
from tunegemm.measure.statistics import ratio_interval, tie, winner
from tunegemm.measure.worker import MeasureWorker

__all__ = ["FINAL", "HEAT", "SCREEN", "Job", "MeasureWorker", "Policy", "ratio_interval", "tie", "winner"]
