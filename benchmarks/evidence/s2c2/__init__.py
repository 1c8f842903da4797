"""S2C2, "slack squeeze coded computing" (Narra et al., SC'19), over the fluid bound.

Cases and contenders are in `cases`; `simulated` and `processes` run them, `sections` says which.
Whole algorithms are in `algorithms`, the published figures in `claims`, the page's tables in
`tables`.
"""

from benchmarks.evidence.papers import Paper
from benchmarks.evidence.s2c2 import tables
from benchmarks.evidence.s2c2.claims import CLAIMS
from benchmarks.evidence.s2c2.plots import write_plots
from benchmarks.evidence.s2c2.results import Results
from benchmarks.evidence.s2c2.sections import SECTIONS

PAPER = Paper(
    name="s2c2",
    title="Evidence: S2C2",
    intro=(
        'S2C2 ("slack squeeze", Narra et al., SC\'19) stores coded pieces and gives each worker '
        "stripes of its piece by predicted speed. [How it works](../how-it-works.md) explains it "
        "and the policies, [Predicting speeds](../prediction.md) measures predictors."
    ),
    claims=CLAIMS,
    sections=SECTIONS,
    parts=tables.PARTS,
    kept=Results,
    plot=write_plots,
)
