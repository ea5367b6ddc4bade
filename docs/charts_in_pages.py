"""Puts charts where a page asks for them: ``<!-- plot speeds of mlperf -->``.

An image in the line after the mark is for those who read the page elsewhere, or without JavaScript.
"""

import html
import re

from charts import chart, json_of

__all__ = ["MARK", "with_charts", "with_places"]

MARK = re.compile(r"^<!-- plot (\w+) of ([\w ]+) -->$", re.MULTILINE)
PLACE = re.compile(
    r'<div class="chart" data-plot="(\w+) of ([\w ]+)"></div>\s*(<p><img[^>]*></p>)?'
)


def with_places(markdown: str) -> str:
    """Returns a page's Markdown with a place for each chart.

    The chart itself comes later, since Markdown would change it.
    """
    return MARK.sub(r'<div class="chart" data-plot="\1 of \2"></div>\n', markdown)


def with_charts(content: str) -> str:
    """Returns the HTML of a page with charts in their places."""

    def filled(place: re.Match[str]) -> str:
        kind, suites, image = place.groups()
        figure = chart(kind, suites)
        return (
            f'<figure class="chart" style="width:100%;max-width:none;margin:1em 0" '
            f'aria-label="{html.escape(f"{kind} of {suites}")}">'
            f'<div style="min-height:{figure.layout.height}px"></div>'
            f'<script type="application/json">{json_of(figure)}</script>'
            f"<noscript>{image or ''}</noscript></figure>"
        )

    return PLACE.sub(filled, content)
