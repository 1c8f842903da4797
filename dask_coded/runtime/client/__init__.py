"""What runs in the client's process: it turns a matrix into pieces on the workers of a cluster.

- ``encoding`` has the pieces made, and holds them.
- ``source`` checks the matrix, cuts it into row blocks, and brings these into the cluster.
- ``install`` registers the plugins on the cluster.
- ``waiting`` is for all code that waits for a cluster; such code may itself run in a task.
"""
