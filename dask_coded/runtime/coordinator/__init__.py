"""What runs in the worker of a task that needs rounds: the task coordinates them.

``tasks`` are what Dask runs: one round, or an algorithm. The algorithm sees ``operators``, and each
of their products is a round. ``rounds`` runs the rounds of one array by the scheduler's plans, and
``live_round`` carries out one of them: commands become messages, messages become events.
``delivery`` sends the operand, ``checks`` verify the shares, and ``loop`` has other workers keep
the state of the algorithm.
"""
