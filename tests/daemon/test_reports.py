"""What a daemon makes of its rank's reports."""

import pytest

from geotrain.daemon.reports import Reports

SLOW = {"kind": "compute", "where": "b", "text": "compute in b 1.5x its own since step 3"}


def test_seconds_add_up_and_the_newest_of_the_rest_counts():
    reports = Reports()
    for number in range(3):
        reports.on_report(
            {
                "num_tokens": 100.0,
                "attribution_s": {"compute": 1.0, "drain": 0.25},
                "regions_s": {"a": {"compute": float(number)}, "b": {"drain": 2.0}},
                "verdicts": [SLOW] if number == 2 else [],
            }
        )
    told = reports.summary()
    assert (told["total_s"]["compute"], told["total_s"]["drain"]) == (3.0, 0.75)
    assert told["total_s"]["loader"] == 0.0
    assert told["regions_s"] == {"a": {"compute": 2.0}, "b": {"drain": 2.0}}
    assert told["verdicts"] == [SLOW]
    assert reports.num_tokens == 300.0


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"num_tokens": -1.0, "attribution_s": 7, "regions_s": [1], "verdicts": 3},
        {"num_tokens": float("inf"), "attribution_s": {"compute": float("nan"), "else": 4.0}},
        {"attribution_s": {"compute": -1.0, "fill": "x"}, "verdicts": []},
    ],
)
def test_what_makes_no_sense_counts_for_nothing(report):
    reports = Reports()
    reports.on_report(report)
    told = reports.summary()
    assert set(told["total_s"].values()) == {0.0} and "else" not in told["total_s"]
    assert (told["regions_s"], told["verdicts"], reports.num_tokens) == ({}, [], 0.0)


def test_what_a_rank_tells_is_cut_to_a_size():
    reports = Reports()
    reports.on_report(
        {
            "regions_s": {f"region {n}": {"compute": 1.0} for n in range(500)},
            "verdicts": [SLOW | {"text": "x" * 10_000, "more": "y"}, None] * 100,
        }
    )
    told = reports.summary()
    assert len(told["regions_s"]) == 64 and len(told["verdicts"]) == 32
    assert max(len(text) for each in told["verdicts"] for text in each.values()) == 400
    assert set(told["verdicts"][0]) == {"kind", "where", "text"}
