"""Files of scores by node."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from dask_coded.scores import writer_for

NAMES = [("Кёльн", 0.5), ("a,b\tc", 0.25), ('"', 0.25)]
NUMBERS = [(7, 0.75), (2**64 - 1, 0.25)]


def written(name, ranking) -> bytes:
    file = io.BytesIO()
    writer_for(Path(name))(ranking, file)
    return file.getvalue()


@pytest.mark.parametrize("ranking", [NAMES, NUMBERS], ids=["names", "numbers"])
@pytest.mark.parametrize("name", ["r.csv", "R.CSV", "r", "r.tsv", "r.txt"])
def test_lines_are_read_back(name, ranking):
    separator = "\t" if name.startswith("r.t") else ","
    text = io.StringIO(written(name, ranking).decode("utf-8"), newline="")
    header, *rows = csv.reader(text, delimiter=separator)
    assert header == ["node", "score"]
    assert [(type(ranking[0][0])(node), float(score)) for node, score in rows] == ranking


@pytest.mark.parametrize("ranking", [NAMES, NUMBERS], ids=["names", "numbers"])
def test_json_is_read_back(ranking):
    records = json.loads(written("r.json", ranking))
    assert [(record["node"], record["score"]) for record in records] == ranking


@pytest.mark.extras
@pytest.mark.parametrize("ranking", [NAMES, NUMBERS], ids=["names", "numbers"])
def test_parquet_is_read_back(ranking):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(written("r.parquet", ranking)))
    assert table.column_names == ["node", "score"]
    assert list(zip(*table.to_pydict().values())) == ranking


def test_half_a_character_loses_no_scores():
    assert written("r.csv", [("\ud800", 1.0)]) == b"node,score\n\\ud800,1.0\n"


def test_an_unknown_ending_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"ends in \.csv, .*\.json or \.parquet, not in '\.xlsx'"):
        writer_for(Path("ranks.xlsx"))
