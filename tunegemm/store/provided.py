"""Compiled kernels by key: those of records, and those that db/grouped.toml, joined.toml, blocks.toml and
block_groups.toml list.

Kernels that neither the user's object store, a loaded pack nor the package has are compiled first. No GPU is
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunegemm.compile.artifacts import Artifact, ArtifactStore, Key
from tunegemm.compile.pool import CompilePool
from tunegemm.errors import PackError
from tunegemm.generate import along_k, block_groups, blocks, joined, quantize, routing
from tunegemm.model.block_groups import listed as listed_of_block_groups
from tunegemm.model.blocks import listed as listed_of_blocks
from tunegemm.model.grouped import configs, listed_along_k, maker_of
from tunegemm.model.grouped import listed as listed_of_groups
from tunegemm.model.joined import listed as listed_of_weights
from tunegemm.store import packs


@dataclass(frozen=True)
class Provided:
    """The objects of records or of listed kernels."""

    artifacts: Mapping[tuple[tuple[str, str | int], ...], Artifact]
    """By the items of their kernel keys."""
    failures: Mapping[Any, str]
    """Why a kernel could not be compiled, by the item that needs it."""
    compiled: int

    def of(self, key: Key) -> Artifact | None:
        """The object of a kernel key; None where it could not be compiled."""
        return self.artifacts.get(_name(key))


def provide_keys(
    keys: Mapping[Any, tuple[str, Key]], *, compile_missing: bool = True, workers: int | None = None
) -> Provided:
    """As `packing.provide`, by families and kernel keys of records, or of kernels by name."""
    store = ArtifactStore()
    # By the whole key, unlike `packs.find`: a pack names one version of each compiler.
    stores = (store, *(pack.store for pack in (*packs.loaded([]), packs.shipped()) if pack))

    def find(key: Key) -> Artifact | None:
        return next((artifact for each in stores if (artifact := each.find(key)) is not None), None)

    missing = {of: pair for of, pair in keys.items() if find(pair[1]) is None}
    failures: dict[Any, str] = {}
    compiled = 0
    if missing and not compile_missing:
        first = next(iter(missing))
        raise PackError(
            f"{len(missing)} of {len(keys)} kernels are missing in {store.root}, first "
            f"{getattr(first, 'problem', first)}; leave out --no-compile, or tune again"
        )
    if missing:
        with CompilePool(store, workers=workers) as pool:
            futures = {of: pool.submit(*pair) for of, pair in missing.items()}
            results = {of: future.result() for of, future in futures.items()}
            failures = {of: result.failure for of, result in results.items() if not result.artifact}
            compiled = pool.compiled
    answer = {_name(key): find(key) for of, (_, key) in keys.items() if of not in failures}
    return Provided({name: item for name, item in answer.items() if item is not None}, failures, compiled)


def provide_grouped(kind: str = "", *, every: bool = False) -> Provided:
    """The objects of shipped kernels for grouped products, or of one kind. ``routing``: of the kernels around
    them; ``along_k``: of all kernels for groups along k. every: also those of the kind that no choice names.
    As `packing.provide`.
    """
    result = {
        f"grouped {config.label}": (maker_of(config).name, maker_of(config).key_of(config))
        for config in (configs(kind).values() if every else listed_of_groups(kind=kind))
    }
    if kind in ("", "along_k"):
        for config in listed_along_k():
            result[f"along k {config.label}"] = "along_k", along_k.FAMILY.key_of(config)
    if kind in ("", "routing"):
        result |= {name: ("routing", key) for name, key in routing.kernels().items()}
    return provide_keys(result)


def provide_joined() -> Provided:
    """The objects of the kernels of several weights (db/joined.toml). As `packing.provide`."""
    keys: dict[str, tuple[str, Key]] = {}
    for config in listed_of_weights():
        name = " ".join(filter(None, ("joined", config.in_dtype, config.label, config.epilogue)))
        keys[name] = "joined", joined.FAMILY.key_of(config)
    return provide_keys(keys)


def provide_blocks(path: Path | None = None) -> Provided:
    """The objects of the kernels of block-scaled products (db/blocks.toml or a table like it, and
    db/block_groups.toml), and of the kernels that quantise. As `packing.provide`.
    """
    result = {
        f"blocks {config.label} {config.out_dtype}": ("blocks", blocks.FAMILY.key_of(config))
        for config in listed_of_blocks(path)
    }
    for of_groups in listed_of_block_groups():
        result[f"blocks of groups {of_groups.label}"] = "block_groups", block_groups.FAMILY.key_of(of_groups)
    for of_rows in quantize.CONFIGS:
        result[f"quantize {of_rows.label}"] = "quantize", quantize.FAMILY.key_of(of_rows)
    return provide_keys(result)


def _name(key: Key) -> tuple[tuple[str, str | int], ...]:
    return tuple(sorted(key.items()))
