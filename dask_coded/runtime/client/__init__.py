"""What runs in the client's process: an array becomes pieces on the workers of a cluster.

``encoding`` has the pieces of an array made and holds them. ``source`` checks the user's matrix,
cuts it into row blocks and brings these into the cluster. ``install`` registers the plugins.
``waiting`` is for all code that waits for the cluster, which may itself run in a task.
"""
