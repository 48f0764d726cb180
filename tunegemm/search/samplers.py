"""Samplers by name: the project's, some of Optuna's, and any class of a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

from tunegemm.errors import SpaceError, one_line
from tunegemm.search.search import quiet_optuna
from tunegemm.untrusted import shown

if TYPE_CHECKING:
    import optuna

    Sampler = str | optuna.samplers.BaseSampler

ROOFLINE = "roofline"
#: The class that each name stands for, and the packages that it needs in addition to Optuna's own.
_OPTUNAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tpe": ("optuna.samplers:TPESampler", ()),
    "gp": ("optuna.samplers:GPSampler", ("scipy", "torch")),
    "random": ("optuna.samplers:RandomSampler", ()),
    "cmaes": ("optuna.samplers:CmaEsSampler", ("cmaes",)),
}
NAMES = (ROOFLINE, *_OPTUNAS)


def sampler_of(sampler: Sampler | None, *, seed: int) -> optuna.samplers.BaseSampler | None:
    """Return an Optuna sampler by name, or the sampler passed; None for the project's own, which is the
    default.

    A name is one of `NAMES` or a class, ``package.module:Class``. The sampler gets `seed`, if it takes one.
    Raises SpaceError if the name is unknown, the object is not a sampler, or a required package is missing.
    """
    if sampler is None or sampler == ROOFLINE:
        return None
    if not isinstance(sampler, str):
        from optuna.samplers import BaseSampler

        if not isinstance(sampler, BaseSampler):
            raise SpaceError(
                f"sampler {shown(sampler)}: give one of {', '.join(NAMES)}, package.module:Class, "
                "or an instance of Optuna's BaseSampler"
            )
        return sampler
    path, packages = _OPTUNAS.get(sampler, (sampler, ()))
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SpaceError(f"sampler {sampler} needs {package}: pip install 'tunegemm[samplers]'")
    module, _, name = path.partition(":")
    if not module or not name.isidentifier():
        raise SpaceError(f"sampler {shown(sampler)}: use {', '.join(NAMES)} or package.module:Class")
    return _made(sampler, module, name, seed)


def _made(sampler: str, module: str, name: str, seed: int) -> optuna.samplers.BaseSampler:
    from optuna.samplers import BaseSampler

    try:
        maker: Any = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # the user's module may raise anything
        raise SpaceError(
            f"sampler {shown(sampler)}: importing {module} fails ({one_line(error, 150)}); "
            "it must be on the path (PYTHONPATH)"
        ) from None
    if maker is None:
        raise SpaceError(f"sampler {shown(sampler)}: {module} has no {name}")
    is_sampler = inspect.isclass(maker) and issubclass(maker, BaseSampler)
    if not is_sampler:
        raise SpaceError(
            f"sampler {shown(sampler)}: {name} is not a sampler; give a subclass of Optuna's BaseSampler"
        )
    try:
        takes_seed = "seed" in inspect.signature(maker).parameters
        with quiet_optuna():
            return maker(seed=seed) if takes_seed else maker()
    except Exception as error:  # a user's class may raise anything or be abstract
        raise SpaceError(
            f"sampler {shown(sampler)} cannot be created: {one_line(error, 150)}; "
            "create it in Python: tunegemm.tune(sampler=...)"
        ) from None
