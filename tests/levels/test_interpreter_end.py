# SPDX-License-Identifier: Apache-2.0
"""Note [Levels outlive the interpreter]: what is left of one when a process ends crashes nothing.

Each script ends in a child of its own by the interpreter's usual way out. All index with NumPy
arrays, and leave ready nodes behind in the thread's queue.
"""

import signal

import pytest
from processes import Ended, forked, once

PRELUDE = """
import ctypes, functools, gc, os, signal, sys, threading, time
import numpy as np
import torch
import rematfn
from rematfn.testing import EvictEverything

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
rows, columns = np.tril_indices(8, k=-1)
some = np.arange(5)
w = torch.full((28,), 0.1, requires_grad=True)
x = torch.ones(16, 8)
libc = ctypes.CDLL(None)

def in_c(name, argument):
    # A hook that runs no line of Python: what a signal asks for waits until somebody looks.
    function = getattr(libc, name)
    function.argtypes, function.restype = [ctypes.c_int, ctypes.py_object], None
    return functools.partial(function, argument)

def fails(grad):
    raise ValueError

def program(*hooks):
    aside = w[some].sum()  # is ready, and still to be run, when the hooks are called
    h = x
    for _ in range(3):
        L = torch.eye(8)
        L[rows, columns] = w
        h = torch.tanh(h @ L)
    for hook in hooks:
        h.register_hook(hook)
    return h.sum() + aside

INTERRUPT = in_c("raise", signal.SIGINT), in_c("usleep", 150_000)
evict = EvictEverything()
ways = {
    "remat": functools.partial(rematfn.remat, policy=evict),
    "move or drop": functools.partial(rematfn.remat, policy=evict, offload=True),
    "offload": functools.partial(rematfn.offload, policy=evict),
}
g = ways[sys.argv[1]](program)
"""

SCRIPTS = {
    "interrupted": """
loss = g(*INTERRUPT)
try: loss.backward()
except KeyboardInterrupt: pass
del loss
""",
    "interrupted, and nobody catches it": "g(*INTERRUPT).backward()",
    "interrupted, and kept": """
torch.kept = g, g(*INTERRUPT)
try: torch.kept[1].backward(retain_graph=True)
except KeyboardInterrupt: pass
""",
    "a hook raises": """
try: g(fails).backward()
except ValueError: pass
""",
    "a hook raises, and nobody catches it": "g(fails).backward()",
    "a hook exits": "g(lambda grad: sys.exit(3)).backward()",
    # After all exit handlers.
    "a hook raises in a destructor": """
class Last:
    def __init__(self): self.loss = g(fails)
    def __del__(self): self.loss.backward()
last = Last()
""",
    "an array of DLPack's": """
some = torch.from_dlpack(np.arange(5))
rows, columns = (torch.from_dlpack(i.copy()) for i in (rows, columns))
try: g(fails).backward()
except ValueError: pass
""",
    "an array that is a buffer": """
x = torch.frombuffer(bytearray(4 * 16 * 8), dtype=torch.float32).view(16, 8)
try: g(fails).backward()
except ValueError: pass
del x
""",
}
CODES = {"interrupted, and nobody catches it": -signal.SIGINT, "a hook exits": 3}
CODES["a hook raises, and nobody catches it"] = 1
JOBS = {f"remat: {name}": ("remat", name) for name in SCRIPTS} | {
    f"{way}: {name}": (way, name)
    for way, name in (("move or drop", "interrupted"), ("offload", "a hook raises"))
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run all scripts, and return how each ended."""
    jobs = {job: (PRELUDE + SCRIPTS[name], way) for job, (way, name) in JOBS.items()}
    return once(tmp_path_factory, "ends", lambda folder: forked(folder, jobs, ()))


@pytest.mark.forking
@pytest.mark.parametrize("job", JOBS)
def test_a_process_ends_as_it_should(job: str, ended: dict[str, Ended]) -> None:
    assert ended[job].code == CODES.get(JOBS[job][1], 0), ended[job].err
