"""Settings of the documentation site, which `make docs` builds with Sphinx."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.version import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Paceline"
author = "The Paceline developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
html_theme = "furo"
html_title = f"Paceline {release}"
# Splits Chinese text into words, and English text as usual.
html_search_language = "zh"

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
#: Pages of the site whose text is a file outside docs/.
PAGES = {
    "index": "README.md",
    "zh/index": "README.zh-CN.md",
    "contributing": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def read_page(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Put the text of a file outside docs/ before that of its page, and make links between files
    of the repository links between pages."""
    folder = DOCS / Path(docname).parent
    text = _relinked(source[0], folder, folder)
    if docname in PAGES:
        file = ROOT / PAGES[docname]
        text = _relinked(file.read_text(encoding="utf-8"), file.parent, folder) + "\n" + text
    source[0] = text


def _relinked(text: str, file_folder: Path, page_folder: Path) -> str:
    """Rewrite the links of a file in ``file_folder`` for a page in ``page_folder``."""
    pages = {(ROOT / file).resolve(): DOCS / f"{docname}.md" for docname, file in PAGES.items()}

    def relink(match: re.Match[str]) -> str:
        before, path, anchor = match.groups(default="")
        if re.match(r"[a-z]+:", path):
            return match[0]
        target = (file_folder / path).resolve()
        target = pages.get(target, target)
        return f"{before}{os.path.relpath(target, page_folder)}{anchor})"

    return _LINK.sub(relink, text)


def setup(app: "Sphinx") -> None:
    app.connect("source-read", read_page)
