"""Predicts a kernel's cost by closed formulas, before anything is measured. It only ranks.

`terms` predicts times and bytes, `energy` joules and the clock at the power cap, and `rank` orders by them.
`feasible` and `verdicts` list what a search space has for a problem, `shortlist` the kernels that ship, and
`features` what fitted trees read of a launch. Imports `describe`, `compile` and `generate`.
"""
