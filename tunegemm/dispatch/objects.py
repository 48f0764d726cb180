"""Objects of kernels that no record names: those that ship, or else compiled in the background."""

from __future__ import annotations

from functools import partial

from tunegemm.compile.artifacts import Artifact, Key
from tunegemm.dispatch import api
from tunegemm.dispatch.background import BackgroundCompiler, make_pool
from tunegemm.errors import ArtifactError
from tunegemm.generate import families
from tunegemm.store import packs

_compilers: dict[str, BackgroundCompiler] = {}


def compiled(family: str, key: Key, module: str = families.__name__) -> Artifact | None:
    """The object of a kernel; None while it is compiled. Raises ArtifactError where it will not be.

    module: what a compile pool asks for the family, as of `CompilePool`.
    """
    artifact = packs.find(key)
    if artifact is None:
        compiler = _compilers.get(module)
        if compiler is None:
            made = BackgroundCompiler(lambda kernel: None, partial(make_pool, module))
            compiler = _compilers.setdefault(module, made)
        compiler.is_on = api.dispatcher.planner.compiler.is_on
        answer = compiler.ask_for(family, key)
        if not answer.kernel:
            why = answer.failure or answer.refusal or "none is compiled, and TUNEGEMM_COMPILE=0"
            raise ArtifactError(why)
    return artifact
