from __future__ import annotations

from diffattn.report.text import distinct, joined, number, percent, percent_interval, shorten, visible


def test_control_and_direction_characters_become_visible():
    assert visible("a\x00b\x1b[0m") == "a\ufffdb\ufffd[0m"
    assert visible("abc\u202egnp.exe") == "abc\ufffdgnp.exe"
    assert visible("lone \ud800") == "lone \ufffd"
    assert visible("λ·A₂ 漢字") == "λ·A₂ 漢字"


def test_names_that_collide_are_told_apart():
    assert distinct(["vit", "diffvit"]) == ["vit", "diffvit"]
    assert distinct(["vit", "vit", "vit #1"]) == ["vit #2", "vit #3", "vit #1"]
    assert distinct(["", "\n "]) == ["unnamed #1", "unnamed #2"]
    long = distinct(["a" * 500, "a" * 499])
    assert len(set(long)) == 2
    assert max(map(len, long)) < 70


def test_shorten_keeps_both_ends():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("start" + "x" * 50 + "end", 12) == "startxx…xend"


def test_numbers_as_the_page_prints_them():
    assert percent(0.5) == "50.0\u00a0%"
    assert percent(None) == "–"
    assert percent_interval(0.481, 0.539) == "[48.1,\u00a053.9]"
    assert percent_interval(None, 0.5) == ""
    assert number(-0.12345) == "−0.123"
    assert number(None) == "–"
    assert joined(["a"]) == "a"
    assert joined(["a", "b", "c"]) == "a, b and c"
