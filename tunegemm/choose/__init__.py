"""Chooses the kernel for a problem from records, predictions and neighbours, or falls back to torch.

`selection.select` answers for dispatch and `explain` alike: a record from a `snapshot`, or what a policy
(`policies`) prefers to it; a prediction (`predictions`, or `fused` for products with an epilogue); a near hit
(`neighbours`); or, under policy `batch_invariant`, a kernel of one class (`invariance`). `compiled_code` asks
for more where a compiler writes the code around a product. `operators` are torch's own.
"""
