"""What runs in the worker that has a task which needs rounds: the task coordinates them.

- ``tasks`` is what Dask runs: one round, or a whole algorithm.
- ``operators`` is what the algorithm sees of a coded array: each product is a round.
- ``loop`` sends the state of the algorithm to other workers, and resumes it from there.
- ``rounds`` runs the rounds of one array, by plans of the scheduler plugin.
- ``alone`` computes products here, where a round takes longer.
- ``live_round`` carries out one round: commands become messages, messages become events.
- ``run_spec`` says what that round does, and begins it at a participant.
- ``delivery`` sends the operand to the workers.
- ``checks`` fetches what shares are verified by, and makes again what is wrong of it.
- ``verdict`` verifies the shares of a round.
- ``report`` is what a round tells about itself.
"""
