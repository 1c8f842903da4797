"""What runs in every worker: it makes pieces, holds them, and computes stripes of them.

- ``plugin`` is the worker plugin: it acts on the messages of coordinators.
- ``operands`` gets the operand of a round, and passes it on to other workers.
- ``jobs`` computes the stripes that a coordinator asks for.
- ``output`` is the memory that it computes them into.
- ``disk`` has pieces in files if they do not fit into memory.
- ``stored`` reads pieces from stores, and writes them there.
- ``pieces`` and ``checks`` are the tasks that make pieces, and the checks of blocks.
- ``keeper`` keeps the states of loops that run on other workers.
- ``probe`` measures how fast the worker is before any round.
- ``metrics`` shows what the worker has computed, as Prometheus metrics.
"""
