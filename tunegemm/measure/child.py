"""The measuring process: a session on one device, answering its parent until their pipe closes."""

from __future__ import annotations

import gc
import importlib
import os
import queue
import sys
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from tunegemm.describe.device import Device
from tunegemm.errors import TunegemmError, one_line
from tunegemm.measure.backend import CudaBackend
from tunegemm.measure.messages import Broken, Done
from tunegemm.measure.session import Session


def main(descriptor: int, backend_name: str) -> None:
    """Entry point of the child: serve the pipe at a file descriptor until it closes.

    backend_name: ``module:attribute`` of a class with the methods of CudaBackend.
    """
    gc.disable()  # until all is imported: collections would scan modules for 0.1 to 0.2 s
    connection = Connection(descriptor)
    opened: Future[Device] = Future()
    requests: queue.Queue[Any] = queue.Queue()

    def receive() -> None:
        # In its own thread, so that the process ends with its parent even if it hangs in a kernel.
        try:
            opened.set_result(connection.recv())
            while True:
                requests.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    module, _, attribute = backend_name.partition(":")
    kind: type[CudaBackend] = getattr(importlib.import_module(module), attribute)
    kind.prepare(opened.result)
    device = opened.result()
    backend = kind(device)
    try:
        backend.open(warm_up_s=0.0)  # each interleave waits for the clocks to settle
    except (TunegemmError, RuntimeError) as error:
        connection.send(Broken(None, one_line(error)))
        _leave()
    connection.send(Done())
    gc.freeze()  # each later collection would scan modules and the like for 0.2 s
    gc.enable()
    try:
        Session(device, backend, connection.send).serve(requests.get)
    except Exception:  # a bug: its last line is for the parent, which does not wait for the interpreter's end
        traceback.print_exc()
    _leave()


def _leave() -> None:
    """End the process without tearing down the device: if the device is lost, that can hang or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
