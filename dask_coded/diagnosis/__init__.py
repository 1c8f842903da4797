"""What ``dask-coded check`` finds out about a cluster, before or after arrays were encoded on it.

- ``facts`` says what can be known of a cluster.
- ``findings`` judges these facts: what must be fixed, and how. It needs no cluster.
- ``remote`` is what the scheduler and the workers are asked.
- ``collect`` asks them, through a client.
- ``tables`` shows the facts.
"""
