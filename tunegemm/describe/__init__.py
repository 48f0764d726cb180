"""Describes a product, a GPU and a candidate kernel as plain values; nothing here runs on a GPU.

`problem` and `epilogue` define a product, `device` and `clusters` a GPU's limits, `space` a candidate,
`workload` the products of a program. Imports only errors, files and resources.
"""
