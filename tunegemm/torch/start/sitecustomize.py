"""Starts tunegemm in every Python process of `tunegemm record` and `tunegemm run`.

`record` counts products, `run` serves them. Both put this folder on PYTHONPATH, and Python imports
`sitecustomize` when it starts. Nothing else is loaded until the process itself has imported torch.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

from after_import import AfterImport  # type: ignore[import-not-found]  # of this folder

_HERE = Path(__file__).resolve().parent


def _is_wanted() -> bool:
    on = os.environ.get("TUNEGEMM_ENABLE") not in (None, "", "0")
    return bool(os.environ.get("TUNEGEMM_RECORD_PARTS")) or on


def _begin() -> None:
    if not _is_wanted():  # one of tunegemm's own commands, which unset it
        return
    try:
        if folder := os.environ.get("TUNEGEMM_RECORD_PARTS"):
            from tunegemm.torch.recording import record_process

            record_process(folder)
        else:
            from tunegemm.torch.enabled import serve_process

            serve_process()
    except ImportError:  # an interpreter without tunegemm: the command reports missing results
        return


def _run_the_one_behind() -> None:
    """This file hides a `sitecustomize` of the environment: run it as Python would have."""
    folders = [folder for folder in sys.path if Path(folder).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _is_wanted():
    sys.meta_path.insert(0, AfterImport("torch", _begin))
_run_the_one_behind()
