"""What runs in every worker: it makes pieces, holds them, and computes stripes of them.

``plugin`` is the worker plugin; it takes the messages of coordinators. ``operands`` gets the
operand of a round, ``jobs`` computes the stripes, and ``output`` has room for their rows. ``disk``
holds pieces that do not fit into memory. ``pieces`` and ``checks`` are the tasks that make pieces
and the checks of blocks. ``keeper`` keeps states of loops that run on other workers. ``probe``
measures the worker's speed before any round.
"""
