"""Programs in processes of their own that have torch imported already: a fork of a process that did it once.

Importing torch takes a second and a half of processor time, most of what a short program takes. All else is
the program's: its environment, folder, descriptors, and every other import, ours among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_SERVER = """
import json, os, sys
import torch
inherited = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
for line in sys.stdin:
    request = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        break
else:
    sys.exit()
# From here on this is the program.
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["folder"])
for number, place in enumerate(request["streams"]):
    stream = os.open(place, os.O_RDWR)
    os.dup2(stream, number)
    os.close(stream)
own = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
sys.path[:] = ["", *own, *(place for place in sys.path[1:] if place not in (*inherited, *own))]
code = request["code"]
for name in ("json", "os", "inherited", "line", "request", "child", "stream", "number", "place", "own"):
    globals().pop(name, None)
exec(code)
"""


class Forks:
    """Runs programs, one after the other."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, "-c", _SERVER], text=True, **pipes)  # type: ignore[call-overload]

    def run(self, code: str, *, env: Mapping[str, str], cwd: Path) -> CompletedProcess[str]:
        """As `subprocess.run` of `python -c` with that text, which may not import torch otherwise than so."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [os.devnull, *(str(Path(folder, name)) for name in ("stdout", "stderr"))]
            for place in streams[1:]:
                Path(place).touch()
            request = {"code": code, "environment": dict(env), "folder": str(cwd), "streams": streams}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            ended = int(self._server.stdout.readline())
            said, complained = (Path(place).read_text() for place in streams[1:])
        return CompletedProcess(["python", "-c", code], ended, said, complained)

    def close(self) -> None:
        self._server.communicate(timeout=60)
