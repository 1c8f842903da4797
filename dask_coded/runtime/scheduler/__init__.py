"""What runs in the scheduler: the knowledge of all workers, arrays and coordinators.

``plugin`` is the scheduler plugin; it predicts speeds and plans rounds. ``arrays`` knows the coded
arrays and where their pieces are, and ``replicas`` keeps each piece on its own worker while Dask
moves data. ``supervisor`` places coordinators and has others take over when one is silent.
``loops`` names the workers that keep the states of loops. ``extension`` installs the package's
scheduler plugins.
"""
