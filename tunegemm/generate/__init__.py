"""Generates kernels: which families exist, which candidates are feasible, and how a kernel is launched.

`families` finds a kernel family by name; each has a folder here. `feasibility` judges candidates, `generator`
assembles a family, `launching` and `workspace` prepare launches. Imports `describe` and `compile`.
"""
