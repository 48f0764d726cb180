"""The compiled kernels of db/grouped.toml, joined.toml and blocks.toml: those that are missing in the user's
store are compiled first. No GPU is needed.
"""

from __future__ import annotations

from tunegemm.compile.artifacts import Key
from tunegemm.generate import along_k, blocks, joined, routing
from tunegemm.model.blocks import listed as listed_of_blocks
from tunegemm.model.grouped import configs, listed_along_k, maker_of
from tunegemm.model.grouped import listed as listed_of_groups
from tunegemm.model.joined import listed as listed_of_weights
from tunegemm.store.packing import Provided, provide_keys

__all__ = ["Provided", "provide_blocks", "provide_grouped", "provide_joined"]


def provide_grouped(kind: str = "", *, every: bool = False) -> Provided:
    """The objects of grouped products' kernels that ship, or of a kind; ``routing``: of those around them;
    ``along_k``: of those for groups along k, served or not. every: those of a kind that no choice names, too.
    As `provide`.
    """
    return provide_keys(_grouped(kind, every))


def provide_joined() -> Provided:
    """The objects of the kernels of several weights (db/joined.toml). As `provide`."""
    return provide_keys(_joined())


def provide_blocks() -> Provided:
    """The objects of the kernels of block-scaled products (db/blocks.toml). As `provide`."""
    return provide_keys(_blocks())


def _grouped(kind: str = "", every: bool = False) -> dict[str, tuple[str, Key]]:
    """By its name each kernel of grouped products, and around them, that ships; or of a kind, or `every` one
    of the table.
    """
    found = {
        f"grouped {config.label}": (maker_of(config).FAMILY.name, maker_of(config).kernel_key(config))
        for config in (configs(kind).values() if every else listed_of_groups(kind=kind))
    }
    if kind in ("", "along_k"):
        for config in listed_along_k(every=bool(kind)):
            found[f"along k {config.label}"] = "along_k", along_k.kernel_key(config)
    for name, key in routing.kernels().items():
        if kind == "routing" or (not kind and name.split()[0] in routing.SERVED):
            found[name] = "routing", key
    return found


def _joined() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of several weights."""
    return {
        " ".join(filter(None, ("joined", config.in_dtype, config.label, config.epilogue))): (
            "joined", joined.kernel_key(config),
        )
        for config in listed_of_weights()
    }  # fmt: skip


def _blocks() -> dict[str, tuple[str, Key]]:
    """By its name each kernel of block-scaled products."""
    return {
        f"blocks {config.label} {config.out_dtype}": ("blocks", blocks.kernel_key(config))
        for config in listed_of_blocks()
    }
