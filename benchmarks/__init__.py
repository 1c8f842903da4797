"""Benchmarks: ratios of things that were run side by side, never a timed test.

Run one with ``python -m benchmarks.NAME``; each knows ``--json FILE``, ``--png FILE`` and
``--smoke``. `benchmarks.report` is the harness they share, `benchmarks.lab` makes workers slow on
purpose.
"""
