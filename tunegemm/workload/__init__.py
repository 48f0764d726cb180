"""A program's products and how often it computes each: `tunegemm record` writes, `tune --from` reads."""

from tunegemm.workload.demand import Demand, demands
from tunegemm.workload.foreign import read
from tunegemm.workload.products import Product, Workload, merge

__all__ = ["Demand", "Product", "Workload", "demands", "merge", "read"]
