"""What live.py asks Prometheus is what panels and alerts ask, but for what would hide that there is nothing."""

import pytest

import live


@pytest.mark.parametrize(
    ("expression", "asked"),
    [
        ("sum(a) or vector(0)", "sum(a)"),
        ('count(a) or label_replace(vector(0), "x", "none", "", "")', "count(a)"),
        ('a or label_replace(up{instance=~".+"}, "rank", "leader", "", "")', "a"),
        ("sum(a) or sum(b)", "sum(a) or sum(b)"),
    ],
)
def test_what_stands_in_for_nothing_is_not_asked(expression, asked):
    assert live.filled_in(expression, {"templating": {"list": []}}) == asked


def test_no_panel_has_another_way_to_stand_in():
    ways = ("vector(", "label_replace(")
    assert not [where for where, expression in live.asked().items() if any(way in expression for way in ways)]


@pytest.mark.parametrize(
    ("alert", "asked"),
    [
        ("a > 0", "a > bool 0"),
        ('a{x!="y", z=~"a>b"} >= 2', 'a{x!="y", z=~"a>b"} >= bool 2'),
        ("a < 0.5 * (b > 0.1)", "a < bool 0.5 * (b > bool 0.1)"),
        ("a == bool 1", "a == bool 1"),
        ("a unless b offset 15m", "a unless b offset 15m"),
    ],
)
def test_comparisons_of_alerts_keep_what_does_not_hold(alert, asked):
    assert live.loosened(alert) == asked
