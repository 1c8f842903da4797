"""The command line: ``dask-coded``, also available as ``dask coded``.

Results go to standard output. Progress goes to standard error: as one line that changes if that is
a terminal (with ``rich``), as plain lines otherwise. What a terminal cannot show is written as
escapes.

=========  ===============================================================
exit code  meaning
=========  ===============================================================
0          done
1          the computation failed or did not converge; a check has found something to fix
2          wrong usage, bad input or a scheduler that cannot be reached
130        interrupted
=========  ===============================================================
"""

from dask_coded.cli import commands, matrices  # noqa: F401  their commands
from dask_coded.cli.group import coded

__all__ = ["coded"]
