"""Generate kernels: which candidates are feasible, how fast the model expects them to be, how to compile.

`families` finds a kernel family by name; each has a folder here. `feasibility` and `model` judge candidates,
`compile` and `artifacts` make and keep objects, `launching` prepares launches. Imports `describe`.
"""
