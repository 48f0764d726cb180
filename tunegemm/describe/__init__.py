"""Describes a product, a GPU and a candidate kernel as plain values; nothing here runs on a GPU.

`problem` and `epilogue` say what is multiplied, `device` and `clusters` what a GPU can hold, `space` what a
candidate is, `workload` which products a program computes. Imports only errors, files and resources.
"""
