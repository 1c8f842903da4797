"""The package on a system without what only Linux or Unix has, as far as one process can tell."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, sys
import numpy as np
from dask.distributed import Client

for name in ("fcntl", "resource", "pwd", "grp", "termios"):  # which Windows lacks
    sys.modules[name] = None
for module, name in ((os, "memfd_create"), (os, "posix_fallocate"), (signal, "pthread_sigmask")):
    vars(module).pop(name, None)

import dask_coded as coded

A = np.random.default_rng(0).random((3000, 400))
x = np.ones((400, 30))
options = {"n_workers": 3, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
with Client(**options) as client:
    C = coded.encode(A, coded.MDS(3, 2), client)
    products = (C @ x).compute(), coded.submit(lambda operator: operator @ x, C).result()
    assert all(np.allclose(product, A @ x) for product in products)
"""


def test_without_shared_memory_and_the_modules_of_unix():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=200)
