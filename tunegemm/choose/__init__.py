"""Chooses the kernel for a problem from records, predictions and neighbours, or falls back to torch.

`selection.select` answers for dispatch and `explain` alike: a record from a `snapshot`, or the candidate that
a policy (`policies`) prefers; a prediction (`predictions`); a near hit (`neighbours`); or, under policy
`batch_invariant`, a kernel of one class (`invariance`). `operators` lists torch's operators and says how much
a kernel must gain in compiled code.
"""
