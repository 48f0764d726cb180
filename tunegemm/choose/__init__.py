"""Which kernel serves a problem, by records, predictions and neighbours; torch where none does.

`selection.select` answers, for dispatch and `explain` alike: with a record of a `snapshot` or what a policy
(`policies`) prefers to it, a prediction (`predictions`; `fused` of products with an epilogue), a near hit
(`neighbours`), or, under policy `batch_invariant`, a kernel of one class (`invariance`). `compiled_code` asks
for more where a compiler writes what surrounds a product. `operators` are torch's own.
"""
