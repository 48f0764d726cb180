"""Files that are replaced as a whole: by a full disk or a killed process nothing is lost that was there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, of the same suffix; what is written takes the place of `path` at the end.

    Not if an exception passes: then `path` is what it was. What is no regular file, such as a pipe or
    ``/dev/stdout``, is written to as it is, and so is a file in a folder that takes no other; a link stays,
    and what it names is replaced. Raises OSError.
    """
    path = path.resolve()
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        yield path
        return
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}.{path.name}")
    try:
        yield part
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
