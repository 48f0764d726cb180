"""Generate kernels: which candidates are feasible, what the model expects of them, how they are compiled.

`families` finds a kernel family by name; each has a folder here. `feasibility` and `model` judge candidates,
`compile` and `artifacts` make and keep objects, `launching` prepares launches. Imports `describe`.
"""
