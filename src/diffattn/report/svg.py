"""A matplotlib figure as one `<svg>` element that can stand in a page beside others."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from diffattn.report.style import STYLE
from diffattn.report.text import visible

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")


def inline_svg(figure: Figure, *, prefix: str, label: str) -> Markup:
    """The figure as SVG for the body of an HTML page; the same figure gives the same bytes.

    Args:
        figure: from `figures`.
        prefix: goes before every id, so that no two figures of a page share one.
        label: what a reader who cannot see the figure is told.

    Returns:
        an `svg` element without size (its style sheet gives it one), style sheet, metadata or namespaces.
    """
    content = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "diffattn"}):
        figure.savefig(
            content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    root = ElementTree.fromstring(content.getvalue())
    _tidy(root, prefix)
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-label", visible(label))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(element: ElementTree.Element, prefix: str) -> None:
    """Drop metadata and style sheets, and prefix ids and what refers to them."""
    for child in list(element):
        if not child.tag.startswith(_SVG) or child.tag.removeprefix(_SVG) in ("style", "title", "metadata"):
            element.remove(child)
        else:
            _tidy(child, prefix)
    for name, value in list(element.attrib.items()):
        if name == "id":
            element.set(name, f"{prefix}-{value}")
        elif name == _LINK:
            del element.attrib[name]
            element.set("href", f"#{prefix}-{value.removeprefix('#')}")
        elif "url(#" in value:
            element.set(name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value))
