"""The command line: ``dask-coded``, also available as ``dask coded``.

Results go to standard output. Progress is also shown there if it is a terminal (with ``rich``), and
as plain lines on standard error otherwise. What a terminal cannot show is written as escapes.

=========  ===============================================================
exit code  meaning
=========  ===============================================================
0          done
1          the computation failed or did not converge; a check has found something to fix
2          wrong usage, bad input or a scheduler that cannot be reached
130        interrupted
=========  ===============================================================
"""

from dask_coded.cli.commands import coded

__all__ = ["coded"]
