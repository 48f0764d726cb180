"""Generate kernels: which families there are, which candidates are feasible, and how a kernel is launched.

`families` finds a kernel family by name; each has a folder here. `feasibility` judges candidates, `generator`
puts a family together, `launching` and `workspace` prepare launches. Imports `describe` and `compile`.
"""
