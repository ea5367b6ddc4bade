"""A hook of mkdocs that puts interactive charts into the site; mkdocs.yml lists it.

plotly's JavaScript comes out of the Python package and becomes a file of the site, so that nothing
is fetched from other servers when a page is looked at.
"""

from charts_in_pages import with_charts, with_places
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from plotly.offline import get_plotlyjs

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown"]

SCRIPT = "javascripts/charts.js"
LIBRARY = "javascripts/plotly.min.js"  # charts.js looks for it in its own folder


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Has all pages load what draws charts; it loads plotly on pages that have some."""
    config.extra_javascript.append(SCRIPT)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds plotly's JavaScript to the site."""
    files.append(File.generated(config, LIBRARY, content=get_plotlyjs()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes a place for each chart of a page."""
    return with_places(markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills the places with charts."""
    return with_charts(content)
