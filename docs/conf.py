"""Settings of the documentation site, which `make docs` builds with Sphinx."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer
from sphinx.search.en import SearchEnglish

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
napoleon_use_ivar = True  # `Attributes:` beside the members that autodoc lists
html_theme = "furo"
html_title = f"Paceline {release}"
html_search_language = "en-zh"

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


class SearchEnglishAndChinese(SearchEnglish):
    """Search for English words and for pairs of Chinese characters, which need no dictionary."""

    lang = "en-zh"
    _chinese = re.compile("[\u4e00-\u9fff]+")
    js_splitter_code = """
function splitQuery(query) {
  const terms = [];
  for (const [run] of query.matchAll(/[\\u4e00-\\u9fff]+|[a-zA-Z0-9_]+/g)) {
    if (!/[\\u4e00-\\u9fff]/.test(run) || run.length === 1) terms.push(run);
    else [...run].slice(1).forEach((character, at) => terms.push(run[at] + character));
  }
  return terms;
}
"""

    def split(self, input: str) -> list[str]:
        """Return the terms of a text."""
        pairs = [
            run[at : at + 2] for run in self._chinese.findall(input) for at in range(len(run) - 1)
        ]
        return re.findall(r"[a-zA-Z0-9_]+", input) + pairs


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
    app.add_search_language(SearchEnglishAndChinese)
    app.add_lexer("nft", TextLexer)  # Pygments does not know rules of nftables
    app.connect("source-read", read_page)
