"""What runs in the scheduler: it knows all arrays, all workers and all coordinators.

- ``plugin`` is the scheduler plugin: it predicts speeds and plans rounds.
- ``extension`` is its base class, and installs it only once.
- ``arrays`` says how to make the pieces of each array; ``state`` is what it knows of one.
- ``homes`` knows where pieces are, and on which workers they belong.
- ``holding`` keeps pieces while rounds need them, also if their owner releases them.
- ``replicas`` keeps pieces there while Dask moves and copies data.
- ``supervisor`` has another worker take over when that of a coordinator is silent.
- ``awaited`` knows what clients wait for.
- ``stuck`` finds what tasks fetch from silent workers, and what to compute again.
- ``placing`` chooses the workers that coordinators may run on.
- ``standings`` says which workers are there: it asks them, and drives the membership.
- ``records`` says how fast workers are, and which of them compute wrongly.
- ``versions`` says why workers cannot take part.
- ``recipes`` says from what pieces and checks are made again, or where they are read.
- ``observer`` asks coordinators what rounds have done, for ``dashboard`` and, as Prometheus
  metrics, for ``showing``.
- ``loops`` names the workers that keep the states of loops.
"""
