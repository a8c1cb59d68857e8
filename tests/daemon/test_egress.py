"""What the links cost."""

import logging
from pathlib import Path

import pytest

from geotrain.daemon.egress import EgressMeter, Spent
from geotrain.daemon.egress_file import EgressFile

GB = 10**9


def make_meter(limit: float | None = None) -> EgressMeter:
    return EgressMeter({"b": 0.02, "c": 0.1}, limit)


def test_bytes_are_priced_by_the_peer_they_go_to() -> None:
    meter = make_meter()
    meter.on_bytes({"b": 0, "c": 0, "d": 0}, now=0.0, day="2026-01-01")
    meter.on_bytes({"b": 10 * GB, "c": 2 * GB, "d": GB}, now=60.0, day="2026-01-01")
    meter.on_tokens(4_000_000)
    summary = meter.summary()
    assert summary["bytes_today"] == 13 * GB
    assert summary["usd_today"] == pytest.approx(0.4)
    assert summary["usd_per_hour"] == pytest.approx(24.0)
    assert summary["usd_per_million_tokens"] == pytest.approx(0.1)


def test_nothing_is_known_before_tokens_and_time_have_passed() -> None:
    summary = make_meter().summary()
    assert summary["usd_per_million_tokens"] is None
    assert summary["usd_per_hour"] == 0.0


def test_a_new_utc_day_starts_from_zero() -> None:
    meter = make_meter()
    meter.on_bytes({"b": 10 * GB}, now=0.0, day="2026-01-01")
    meter.on_bytes({"b": 11 * GB}, now=1.0, day="2026-01-02")
    assert meter.summary()["bytes_today"] == GB
    assert meter.summary()["usd_today"] == pytest.approx(0.02)


def test_the_limit_of_a_day_gives_a_reason_to_stop_until_the_day_is_over() -> None:
    meter = make_meter(limit=0.5)
    meter.on_bytes({"c": 4 * GB}, now=0.0, day="2026-01-01")
    assert meter.stop_reason is None
    meter.on_bytes({"c": 5 * GB}, now=1.0, day="2026-01-01")
    assert meter.stop_reason == ("egress of 0.5 USD today reached limits.egress_usd_per_day = 0.5")
    meter.on_bytes({"c": 5 * GB}, now=2.0, day="2026-01-02")
    assert meter.stop_reason is None


def test_the_hourly_rate_looks_back_five_minutes_only() -> None:
    meter = make_meter()
    for minute in range(20):
        sent = 10 * GB * min(minute, 5)
        meter.on_bytes({"b": sent}, now=60.0 * minute, day="2026-01-01")
    assert meter.summary()["usd_per_hour"] == 0.0


def test_a_restart_does_not_renew_the_budget_and_midnight_does(tmp_path: Path) -> None:
    kept = EgressFile(tmp_path / "a.sock")
    assert kept.read() is None
    before = make_meter(limit=0.5)
    before.on_bytes({"c": 4 * GB}, now=0.0, day="2026-01-01")
    kept.write(before.spent)
    found = EgressFile(tmp_path / "a.sock").read()
    assert found == Spent(day="2026-01-01", bytes=4 * GB, usd=pytest.approx(0.4))
    for day, reason in (("2026-01-01", True), ("2026-01-02", False)):
        after = EgressMeter({"c": 0.1}, 0.5, earlier=found)
        after.on_bytes({"c": GB}, now=0.0, day=day)
        assert (after.stop_reason is not None) == reason
        assert after.summary()["bytes_today"] == (5 * GB if reason else GB)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]"]
    + [
        '{{"day": "2026-01-01", "bytes": {}, "usd": {}}}'.format(*sums)
        for sums in (('"x"', 1), (1, "NaN"), (1, "Infinity"), (-1, 1), (1, -0.5))
    ],
)
def test_a_file_that_makes_no_sense_is_told_and_counts_as_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    kept = EgressFile(tmp_path / "a.sock")
    kept.path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept.read() is None
    assert "egress counts from 0 today" in caplog.text
    kept.write(Spent(day="2026-01-02", bytes=1, usd=0.5))
    assert kept.read() == Spent(day="2026-01-02", bytes=1, usd=0.5)


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = EgressFile(tmp_path / "gone" / "a.sock")
    for number in range(3):
        kept.write(Spent(day="2026-01-02", bytes=number, usd=0.0))
    assert caplog.text.count("egress is lost with this daemon") == 1
