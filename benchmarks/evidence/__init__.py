"""Evidence for papers: what each claims, what was measured of it, and the page that says so.

A paper is a module here that declares claims and sections, see `benchmarks.evidence.papers`::

    python -m benchmarks.evidence pipe-sgd --section steps        # measure, and keep
    python -m benchmarks.evidence pipe-sgd --section steps --minutes 4   # a few pieces of it
    python -m benchmarks.evidence pipe-sgd --page                 # make the page from saved results
    python -m benchmarks.evidence --page                          # the pages of all papers
    python -m benchmarks.evidence s2c2 --simulation-only          # without worker processes

Sections are kept in ``benchmarks/results``, with date, machine, versions and command. What is kept
is not measured again unless ``--again`` is given, so that an interrupted section resumes. No figure
is typed into a page.

==========  ==========================================================================
verdicts    published and measured figures, intervals, verdicts: pure
kept        the rows of a section, and their file
papers      `Paper`, `Claim`, `Section`
page        a page of the manual, from kept sections
command     the command line
s2c2        one package or module for each paper
==========  ==========================================================================
"""
