"""Measure candidates on a real GPU, in a process of its own that may die.

`worker` is the parent's side, `child` and its `session` the other, `messages` what they say; `backend` knows
CUDA, `race` the order of rounds, `operands` data and correctness, `statistics` what samples say, `evidence`
which results compare. `replay` answers out of recorded `sweeps` where there is no GPU. Torch loads in the
child only. Imports `describe` and `generate`; this file imports nothing, as dispatch starts through it.
"""
