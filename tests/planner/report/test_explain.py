"""Why a table is pooled where it is, in words."""

import re
from dataclasses import replace

import pytest

from fusedrec_torchrec.planner.cost.cluster import RatesConfig
from fusedrec_torchrec.planner.report.explain import Explanation, print_explanation
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
)
from tests.planner.cost.test_owners import ZIPF, repeated
from tests.planner.search.test_decide import FREE, quick, table


def test_it_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [
        table("one hot", 10**6, zipf=ZIPF),
        repeated("again", 100, 20.0),
        table("few rows", 50, pooling=20.0),
        table("s", 1000, pooling=3.0, pooled=False),
    ]
    search = SearchConfig()
    slow_ids = RatesConfig(ids=5.0, bag_ids=400.0)
    explanation = Explanation(decide(tables, 1024, quick(2, fused=slow_ids), search), search)
    print_explanation(explanation)
    text = capsys.readouterr().out
    assert "100 distinct bags are fewer than" in text and "25.0 KiB of rows" in text
    assert "work at the requester: 1,024 distinct bags, though 50 distinct rows" in text
    assert "a sequence" in text and "all fused_row_wise" in text
    assert explanation.price(3, FUSED_TABLE_WISE) is None
    assert explanation.price(0, FUSED_COLUMN_WISE) is not None
    bytes_decide = decide(tables, 1024, quick(2, fused=FREE), search)
    why = Explanation(bytes_decide, search).why(2)
    assert "50 distinct rows are no more than 1,024 distinct bags" in why
    tight = decide(tables[1:2], 64, quick(2, memory=0.7 * tables[1].size / 1e9))
    assert tight.systems == (FUSED_COLUMN_WISE,)
    why = Explanation(tight, search).why(0)
    assert re.search(r"distinct bags are fewer than .* columns on 2 ranks, as .* do not fit", why)


def test_every_fused_sharding_of_every_table_has_a_reason() -> None:
    tables = [table("one", 10**6, zipf=ZIPF), repeated("again", 100, 20.0)]
    tables.append(table("s", 1000, pooling=3.0, pooled=False))
    decision = decide(tables, 1024, quick(2))
    owners = {FUSED: (), FUSED_TABLE_WISE: (0,), FUSED_COLUMN_WISE: (0, 1)}
    for system, own in owners.items():
        chosen = replace(decision, systems=(system, system, FUSED), owners=(own, own, ()))
        explanation = Explanation(decision, SearchConfig())
        explanation.decision = chosen
        for t in range(2):
            why = explanation.why(t)
            assert "distinct rows" in why and "distinct bags" in why, (system, t)
            assert ("columns on 2 ranks" in why) == (system == FUSED_COLUMN_WISE)
        assert "a sequence" in explanation.why(2)
