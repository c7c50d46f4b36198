from __future__ import annotations

import dataclasses

import pytest

from diffattn.report.comparison import alone, compare, difference, overlap, settings
from report.synthetic import BUDGETS, attack_facts, make_record

NAMES = ["vit", "diffvit"]


def pair(first, second, **shared):
    """Two records that differ in the given counts under one budget."""
    records = []
    for n, broken in (first, second):
        facts = attack_facts(n, broken, total=2000, **shared)
        records.append(dataclasses.replace(make_record(bare=True), attacks=(facts,)))
    return records


def test_difference_is_newcombes_method_10():
    # Newcombe (1998), Statistics in Medicine 17, table II, example (a): 56/70 - 48/80 in [.0524, .3339].
    found = difference(attack_facts(70, 56, total=100), attack_facts(80, 48, total=100))
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_difference_changes_sign_with_its_sides():
    one, other = attack_facts(100, 40, total=200, error=4), attack_facts(90, 20, total=200, error=9)
    gap, low, high = difference(one, other)
    assert difference(other, one) == pytest.approx((-gap, -high, -low))


def test_errors_widen_the_difference_by_their_share():
    without = difference(attack_facts(100, 40, total=200), attack_facts(100, 20, total=200))
    withal = difference(attack_facts(100, 40, total=200, error=10), attack_facts(100, 20, total=200))
    assert withal[0] == pytest.approx(without[0])
    assert withal[1] == pytest.approx(without[1])
    assert withal[2] > without[2] + 0.09


def test_no_clean_correct_sample_is_no_difference():
    assert difference(attack_facts(0, 0, total=10), attack_facts(10, 5, total=10)) is None
    assert overlap(attack_facts(0, 0, total=10), attack_facts(10, 5, total=10))


def test_a_clear_difference_names_who_breaks_more_by_how_much():
    records = pair((1000, 400), (1000, 500))
    text = compare(0, 1, settings(records), NAMES)
    assert text.replace("\u00a0", " ") == (
        "diffvit breaks more often than vit under PGD-20 at eps 4/255 (Linf): "
        "10.0 percentage points more [5.6, 14.3] (diffvit 50.0 % [46.9, 53.1], vit 40.0 % [37.0, 43.1])."
    )
    turned = compare(0, 1, settings(records[::-1]), NAMES)
    assert turned.startswith(
        "diffvit breaks less often than vit under PGD-20 at eps 4/255 (Linf): 10.0 percentage points fewer"
    )
    assert "[5.6,\u00a014.3]" in turned


def test_overlapping_intervals_are_neutral():
    text = compare(0, 1, settings(pair((1000, 400), (1000, 420))), NAMES)
    assert text.startswith("No clear difference between diffvit and vit under PGD-20 at eps 4/255 (Linf)")
    assert "more" not in text


def test_several_settings_are_counted():
    records = [make_record("vit", strength=0.3, bare=True), make_record("diffvit", strength=0.6, bare=True)]
    text = compare(0, 1, settings(records), NAMES)
    assert text.startswith("diffvit breaks more often than vit in all 10 attack settings. The widest gap is under")
    weaker = dataclasses.replace(
        records[1],
        attacks=(
            *records[1].attacks[:-1],
            dataclasses.replace(attack_facts(1043, 10, total=2000, eps=("0.5", 0.5), norm="L2")),
        ),
    )
    text = compare(0, 1, settings([records[0], weaker]), NAMES)
    assert "in 9 of 10 attack settings and less often in 1. The widest gap" in text


def test_records_without_a_common_setting_are_not_compared():
    records = pair((1000, 400), (1000, 500))
    other = attack_facts(1000, 500, total=2000, eps=("8/255", 8 / 255))
    records[1] = dataclasses.replace(records[1], attacks=(other,))
    rows = settings(records)
    assert (
        compare(0, 1, rows, NAMES)
        == "diffvit and vit share no attack and budget, so their figures cannot be compared."
    )
    assert [row.facts.count(None) for row in rows] == [1, 1]


def test_attacks_with_other_options_are_other_settings():
    records = pair((1000, 400), (1000, 500))
    other = dataclasses.replace(
        records[1].attacks[0], attack={"name": "pgd", "steps": 20, "restarts": 1, "loss": "margin"}
    )
    records[1] = dataclasses.replace(records[1], attacks=(other,))
    rows = settings(records)
    assert len(rows) == 2
    assert [row.label for row in rows] == ["PGD-20 (loss None)", "PGD-20 (loss margin)"]


def test_another_seed_is_the_same_setting_but_not_within_a_record():
    one, other = (
        dataclasses.replace(attack_facts(1000, 400, total=2000), attack={"name": "pgd", "seed": seed})
        for seed in (0, 1)
    )
    records = [dataclasses.replace(make_record(bare=True), attacks=(facts,)) for facts in (one, other)]
    (row,) = settings(records)
    assert row.facts == (one, other)
    twice = settings([dataclasses.replace(records[0], attacks=(one, other))])
    assert [row.label for row in twice] == ["PGD (seed 0)", "PGD (seed 1)"]


def test_options_that_follow_from_the_budget_do_not_clutter_the_label():
    facts = tuple(
        dataclasses.replace(
            attack_facts(1000, 400, total=2000, eps=eps),
            attack={"name": "pgd", "steps": 20, "step_size": eps[1] / 10},
        )
        for eps in BUDGETS
    )
    record = dataclasses.replace(make_record(bare=True), attacks=facts)
    assert {row.label for row in settings([record, record])} == {"PGD-20"}


def test_settings_go_by_attack_and_then_by_budget():
    rows = settings([make_record(bare=True)])
    assert [(row.label, row.norm, row.eps) for row in rows[:5]] == [
        ("PGD-20", "Linf", "1/255"),
        ("PGD-20", "Linf", "2/255"),
        ("PGD-20", "Linf", "4/255"),
        ("PGD-20", "Linf", "8/255"),
        ("FGSM", "Linf", "1/255"),
    ]


def test_a_model_alone_gets_its_ends():
    record = make_record(bare=True)
    text = alone(settings([record]), "vit")
    assert "FGSM at eps 1/255 (Linf) breaks 40.0" in text
    assert "PGD-20 at eps 8/255 (Linf) breaks 93.7" in text
    empty = dataclasses.replace(record, attacks=())
    assert "was not attacked" in alone(settings([empty]), "vit")
