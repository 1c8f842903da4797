"""The messages that workers send each other: one frozen dataclass each.

A message belongs to a run: a round, a loop, or a group of a training. Its run id comes first. A
message of a run that is over finds no listener and is dropped.

The worker that opens a channel, and sends requests through it, is the *coordinator* of a round or
the *leader* of a training. The worker at the other end is a *participant*; it answers through the
same channel. Arrays travel as they are, and arrive read-only. Sequences arrive as tuples.

- ``message`` has what all of them have, and the messages of channels themselves.
- ``rounds`` has those of rounds, operands and loops.
- ``trainings`` has those of trainings.
"""
