"""Programs in processes of their own that have torch imported already: a fork of a process that did it once.

Importing torch takes a second and a half of processor time, most of what a short program takes. All else is
the program's: its environment, folder, descriptors, and every other import, ours among them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

_SERVER = """
import gc, importlib, json, os, sys
gc.disable()  # it would search what is imported for garbage, for a fifth of the time that takes
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()
gc.enable()
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
for name in ("gc", "importlib", "json", "os", "inherited", "line", "request", "child", "stream",
             "number", "place", "own"):
    globals().pop(name, None)
exec(code)
"""


class Forks:
    """Runs programs, one after the other. What is forked from is started by the first."""

    def __init__(self, *modules: str) -> None:
        """modules: those imported already, beside torch."""
        self._modules = ("torch", *modules)
        self._server: subprocess.Popen[str] | None = None

    def run(self, code: str, *, env: Mapping[str, str], cwd: Path | None = None) -> CompletedProcess[str]:
        """As `subprocess.run` does with `python -c` and that text; it reads nothing from its stdin.

        env: not heeded are variables that Python reads as it starts, such as PYTHONWARNINGS.
        """
        with tempfile.TemporaryDirectory() as folder:
            streams = [os.devnull, *(str(Path(folder, name)) for name in ("stdout", "stderr"))]
            for place in streams[1:]:
                Path(place).touch()
            request = {
                "code": code,
                "environment": dict(env),
                "folder": str(cwd or Path.cwd()),
                "streams": streams,
            }
            ended = self._ask(json.dumps(request))
            said, complained = (Path(place).read_text() for place in streams[1:])
        return CompletedProcess(["python", "-c", code], ended, said, complained)

    def _ask(self, request: str) -> int:
        if self._server is None:
            pipe = subprocess.PIPE
            command = [sys.executable, "-c", _SERVER, *self._modules]
            self._server = subprocess.Popen(
                command, text=True, stdin=pipe, stdout=pipe, start_new_session=True
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        try:
            self._server.stdin.write(request + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())
        except BaseException:  # a test that ran out of time, say: its answer is not the next one's
            os.killpg(self._server.pid, signal.SIGKILL)
            self.close()
            raise

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=60)
            self._server = None
