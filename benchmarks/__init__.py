"""Benchmarks that report ratios of cases run side by side; no test depends on their times.

Run one with ``python -m benchmarks.NAME``. Each has the option ``--smoke`` and, except `lstm`,
``--json FILE``. `benchmarks.report` is the shared harness. `benchmarks.cluster.Lab` starts workers
of given speeds, which `benchmarks.lab` enforces. `benchmarks.traces` reads the speeds of real
machines.
"""
