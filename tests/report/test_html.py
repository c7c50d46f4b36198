from __future__ import annotations

import dataclasses
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from diffattn.audit.facts import Skipped
from diffattn.audit.record import write_record
from diffattn.report.html import render_report, write_report
from diffattn.report.panels import Pen, lipschitz_panels
from diffattn.report.style import looks
from diffattn.report.view import galleries, warnings
from report.synthetic import make_record

CHROMIUM = Path(os.environ.get("DIFFATTN_CHROMIUM", "/usr/bin/chromium"))
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Collects what a page refers to, its ids, its text, and whether its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references, self.ids, self.tags, self.headings = [], [], [], []
        self.open, self.text, self.handlers, self.images = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.references += [
            attributes[name] for name in ("src", "href", "action", "data", "srcset") if name in attributes
        ]
        self.handlers += [name for name in attributes if name.startswith("on")]
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "img":
            self.images.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(self.open[-1])


def two():
    return [make_record("vit", strength=0.4), make_record("diffvit", differential=True, strength=0.6, seed=1)]


def light(name, **options):
    return make_record(name, figures=False, depth=2, examples=1, **options)


@pytest.fixture(scope="module")
def page():
    return render_report(two())


def check_self_contained(text: str) -> Page:
    found = Page(text)
    assert found.open == []
    assert not [one for one in found.references if not one.startswith(("#", "data:"))]
    assert "script" not in found.tags
    assert found.handlers == []
    assert len(found.ids) == len(set(found.ids))
    assert {one[1:] for one in found.references if one.startswith("#")} <= set(found.ids)
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#f\d)|@import", text)
    return found


def test_two_records_tell_the_whole_story(page):
    found = check_self_contained(page)
    text = " ".join("".join(found.text).split())
    assert text.index("diffvit breaks more often than vit in all 10 attack settings") < text.index("Models")
    for wanted in (
        "ASR is counted over the clean-correct samples only",
        "estimates: lower bounds found by search",
        "Alignment is the cosine",
        "starts at 0.8, now 0.80",
        "Theorems 2 and 3: diffvit against vit",
        "1 unreadable image was left out",
        "A₁ − λ·A₂",
        "× 31.9",
        "airplane → cat",
        "diffattn audit runs/vit --data cifar10",
        "cd" * 32,
    ):
        assert wanted in text
    assert found.headings[0] == "h1"
    assert found.headings.count("h1") == 1
    assert all(image.get("alt") is not None for image in found.images)
    assert page.count('role="img"') == page.count("<svg")
    assert len(page.encode()) < 2_000_000


def test_the_same_records_give_the_same_page():
    first, second = (render_report([light("diffvit", differential=True)]) for _ in range(2))
    assert first == second


def test_one_bare_record_is_enough():
    found = check_self_contained(render_report([make_record("vit", bare=True)]))
    text = "".join(found.text)
    assert "PGD-20 at eps 8/255 (Linf) breaks" in text
    assert not {"alignment", "lipschitz", "examples", "training"} & set(found.ids)


def test_seven_models_with_colliding_hostile_names():
    hostile = '</title><script>alert(1)</script><img src="http://evil/x" onerror=alert(1)>'
    names = ["vit", "vit", hostile, "\u202e\x00evil", "$\\frac{", "{{ 7*7 }}", "x" * 5000]
    records = [
        make_record(name, differential=bool(seed % 2), seed=seed, depth=2) for seed, name in enumerate(names)
    ]
    found = check_self_contained(render_report(records))
    text = "".join(found.text)
    assert "vit #1" in text
    assert "vit #2" in text
    assert "<script>alert(1)</script>" in text
    assert "{{ 7*7 }}" in text
    assert "\x00" not in text
    assert "\u202e" not in text


def test_every_text_of_a_record_is_escaped():
    bad = "\x07\u202e\ud800<script>x</script>\" onload='x' {{ x }}"
    record = make_record(bad, differential=True, flags=(bad,), examples=1)
    record = dataclasses.replace(
        record,
        command=bad,
        created=bad,
        environment={bad: bad, "nested": {bad: [bad]}},
        model=dataclasses.replace(record.model, path=bad, sha256=bad, config={"attention": bad, bad: bad}),
        data=dataclasses.replace(
            record.data, name=bad, split=bad, fingerprint=bad, class_names=(bad,) * 10, skipped=(Skipped(bad, bad),)
        ),
        examples=(dataclasses.replace(record.examples[0], sample_id=bad, layer=bad, map_note=bad, attack=bad),),
        attacks=tuple(
            dataclasses.replace(one, attack={"name": bad, "steps": bad}, norm=bad, eps=bad)
            for one in record.attacks[:1]
        ),
        sensitivity=tuple(dataclasses.replace(row, layer=bad) for row in record.sensitivity),
        reference=dataclasses.replace(
            record.reference,
            model=bad,
            rows=tuple(dataclasses.replace(row, layer=bad) for row in record.reference.rows),
        ),
        history=({"epoch": 1, "train_loss": bad},),
    )
    page = render_report([record], title=bad)
    check_self_contained(page)
    assert not {"\x07", "\u202e", "\ud800"} & set(page)


def test_errors_and_flags_are_shown():
    record = make_record(error=12, flags=("zero gradients: 31 % of them are exactly 0",))
    text = "".join(Page(render_report([record])).text)
    assert "up to 12 images ended in an error" in text
    assert "12 errors" in text
    assert "1 of 10 attack settings are flagged" in text
    assert "31 % of them are exactly 0" in text


def test_other_images_are_a_warning():
    one, other = light("vit"), light("diffvit")
    assert not [text for text in warnings([one, other], [], ["vit", "diffvit"]) if "different images" in text]
    other = dataclasses.replace(other, data=dataclasses.replace(other.data, fingerprint="00"))
    assert "made on different images" in warnings([one, other], [], ["vit", "diffvit"])[0]


def test_large_images_stay_within_the_page():
    records = [light("vit", seed=0), light("diffvit", seed=1)]
    records = [
        dataclasses.replace(one, **dict(zip(("examples", "tensors"), large(one), strict=True))) for one in records
    ]
    text = render_report(records)
    assert len(text.encode()) < 1_600_000
    assert "more in the record" in text


def test_examples_take_turns_and_the_common_ones_lead():
    record = light("vit")
    (shown,) = record.examples

    def variant(sample, eps, status="broken"):
        return dataclasses.replace(shown, sample_id=sample, eps=eps, status=status, key=f"{sample}{eps}")

    mine = (variant("a", "1"), variant("b", "1"), variant("c", "1", "survived"), variant("d", "2"))
    theirs = (variant("b", "1"), variant("d", "1"))
    records = []
    for examples in (mine, theirs):
        images = {
            f"{one.key}.{which}": record.tensors[f"{shown.key}.clean"]
            for one in examples
            for which in ("clean", "adversarial")
        }
        records.append(dataclasses.replace(record, examples=examples, tensors=images))
    found = galleries(records, looks(["vit", "diffvit"]))
    assert [[card.example.sample_id for card in gallery.cards] for gallery in found] == [
        ["b", "d", "a", "c"],
        ["b", "d"],
    ]
    assert [card.example.key for card in galleries([make_record(examples=3)], looks(["vit"]))[0].with_maps] == [
        "example-0",
        "example-1",
    ]
    assert [card.factor for card in found[0].cards] == ["no change"] * 4


def test_balls_of_every_layers_own_radius_share_a_panel():
    record = light("vit")
    row = record.lipschitz[0]
    rows = [
        dataclasses.replace(row, index=index, radius=radius)
        for index, radius in ((0, 0.0), (0, 0.5), (1, 0.0), (1, 2.0))
    ]
    record = dataclasses.replace(record, lipschitz=tuple(rows))
    panels = lipschitz_panels(Pen(), [record], looks(["vit"]))
    assert [re.search(r'aria-label="([^:]*):', panel.svg).group(1) for panel in panels] == [
        "Attention map, at the point",
        "Attention map, radius 0.5 to 2",
    ]


def large(record):
    """Twelve examples of pictures that no PNG makes small."""
    rng = np.random.default_rng(0)
    examples = tuple(dataclasses.replace(record.examples[0], key=f"e{index}") for index in range(12))
    names = [f"{one.key}.{which}" for one in examples for which in ("clean", "adversarial")]
    return examples, {name: rng.random((3, 128, 128), dtype=np.float32) for name in names}


def test_directories_and_records_mix(tmp_path):
    one, other = make_record("vit", bare=True, figures=False), make_record("diffvit", bare=True, figures=False)
    directory = write_record(tmp_path / "vit", one)
    path = write_report([directory, other], tmp_path / "out" / "report.html", title="A title")
    assert path == tmp_path / "out" / "report.html"
    assert path.read_text() == render_report([one, other], title="A title")
    assert write_report(str(directory), tmp_path / "one.html").read_text() == render_report([one])


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="records must hold at least one record; got none"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="is no record directory"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.is_file():
        pytest.skip(f"no browser at {CHROMIUM}: install chromium or set DIFFATTN_CHROMIUM")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_browser_shows_it_quietly_and_without_sideways_scrolling(browser, tmp_path, count):
    names = ["diffvit", "vit", "n" * 200, "<script>alert(1)</script>", "e", "f", "g"][:count]
    records = [light(name, differential=not seed % 2, seed=seed) for seed, name in enumerate(names)]
    path = write_report(records if count != 2 else two(), tmp_path / "report.html")
    for width in (375, 1280):
        context = browser.new_context(viewport={"width": width, "height": 800})
        shown = context.new_page()
        said, asked = [], []
        shown.on("console", lambda message, said=said: said.append(message.text))
        shown.on("pageerror", lambda error, said=said: said.append(str(error)))
        shown.on("requestfailed", lambda request, said=said: said.append(f"failed: {request.url}"))
        shown.on("request", lambda request, asked=asked: asked.append(request.url))
        shown.goto(path.as_uri())
        shown.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        wide, fits = shown.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        broken = shown.evaluate("[...document.images].filter(one => !one.complete || !one.naturalWidth).length")
        empty = shown.evaluate(
            "[...document.querySelectorAll('svg')].filter(one => one.getBBox().width < 10).length"
        )
        shown.keyboard.press("Tab")
        focused = shown.evaluate("document.activeElement.tagName")
        context.close()
        assert said == []
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert wide <= fits == width
        assert (broken, empty) == (0, 0)
        assert focused == "A"


@pytest.mark.parametrize("name", [r"$\bad{$", "costs $5 and $6", r"\$", "_hidden"])
def test_a_name_that_looks_like_mathematics_is_drawn_as_it_stands(name):
    record = make_record(name, differential=True)
    assert len(render_report([make_record("vit"), record])) > 10_000
