"""What a kernel will cost by closed formulas, before anything is measured: for ranking, for nothing else.

`terms` predicts times and bytes, `energy` joules and the clock at the power cap, `rank` orders by them.
`feasible` and `verdicts` list what a search space has for a problem, `shortlist` the kernels that ship, and
`features` is what fitted trees read of a launch. Imports `describe`, `compile` and `generate`.
"""
