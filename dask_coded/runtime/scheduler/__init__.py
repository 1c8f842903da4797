"""What runs in the scheduler: the knowledge of all workers, arrays and coordinators.

``plugin`` is the scheduler plugin; it predicts speeds and plans rounds. ``arrays`` says how to make
the pieces of an array, whose ``state`` it knows. ``homes`` knows where pieces are and belong, and
``replicas`` keeps them there while Dask moves data. ``supervisor`` places coordinators and has
others take over when one is silent. ``loops`` names the workers that keep the states of loops.
``extension`` installs the package's scheduler plugins.
"""
