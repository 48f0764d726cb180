"""Predicts a kernel's cost by closed formulas, before any measurement. The predictions only rank kernels.

`terms` predicts times and bytes, `energy` predicts joules and the clock at the power cap, and `rank` orders
candidates by them. `feasible` and `verdicts` list a search space's candidates for a problem, `shortlist`
lists the kernels that ship, and `features` computes the inputs of the fitted trees. Imports `describe`,
`compile` and `generate`.
"""
