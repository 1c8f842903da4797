"""Benchmarks: ratios of things that were run side by side, never a timed test.

Run one with ``python -m benchmarks.NAME``; each knows ``--json FILE`` and ``--smoke``.
`benchmarks.report` is the harness they share; in a `benchmarks.cluster.Lab` workers are as slow as
wanted, by the means of `benchmarks.lab`; `benchmarks.traces` reads the speeds of real machines.
"""
