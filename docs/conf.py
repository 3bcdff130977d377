"""Settings of the two documentation sites that `make docs` builds with Sphinx: the English one, and
in its folder zh/ the Chinese one (`sphinx-build -t zh`)."""

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
html_static_path = ["_static"]
html_js_files = ["sidebar.js"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
IS_CHINESE = tags.has("zh")  # noqa: F821  Sphinx defines it
#: Folder of the pages of this site. The Chinese site is in the same place below the English one.
SITE = DOCS / "zh" if IS_CHINESE else DOCS
language = "zh_CN" if IS_CHINESE else "en"
html_search_language = "zh-pairs" if IS_CHINESE else "en"
exclude_patterns = [] if IS_CHINESE else ["zh"]
#: Pages whose text is a file outside docs/, relative to docs/.
PAGES = {
    "index.md": "README.md",
    "zh/index.md": "README.zh-CN.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
}
#: Link to a file: its text, path and anchor.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
#: Link at the top of a page to the same page in the other language.
_OTHER_LANGUAGE = re.compile(r"^\[(?:English|中文)\]\(([^)\s]+)\)$", re.MULTILINE)


class SearchEnglishAndChinese(SearchEnglish):
    """Search for English words and for pairs of Chinese characters, which need no dictionary."""

    lang = "zh-pairs"
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
    page = SITE / f"{docname}.md"
    text = _relinked(source[0], page.parent, page.parent)
    outside = PAGES.get(str(page.relative_to(DOCS)))
    if outside is not None:
        file = ROOT / outside
        text = _relinked(file.read_text(encoding="utf-8"), file.parent, page.parent) + "\n" + text
    source[0] = text


def _relinked(text: str, file_folder: Path, page_folder: Path) -> str:
    """Rewrite the links of a file in ``file_folder`` for a page in ``page_folder``."""

    def relink(match: re.Match[str]) -> str:
        image, label, path, anchor = match.groups(default="")
        if re.match(r"[a-z]+:", path):
            return match[0]
        target = _page_of(file_folder / path)
        link = os.path.relpath(target, page_folder)
        if target.suffix == ".md" and DOCS in target.parents and not _is_in_site(target):
            # Sphinx knows the pages of one site only.
            return f'<a href="{Path(link).with_suffix(".html")}{anchor}">{label}</a>'
        return f"{image}[{label}]({link}{anchor})"

    return _LINK.sub(relink, text)


def _page_of(file: Path) -> Path:
    """Return the page that has the text of a file, or the file."""
    pages = {(ROOT / outside).resolve(): DOCS / page for page, outside in PAGES.items()}
    target = file.resolve()
    return pages.get(target, target)


def _is_in_site(page: Path) -> bool:
    return (DOCS / "zh" in page.parents) == IS_CHINESE


def add_other_language(
    app: "Sphinx", docname: str, template: str, context: dict[str, object], doctree: object
) -> None:
    """Give the template the address of the page in the other language, or else of its start."""
    page = SITE / f"{docname}.md"
    outside = PAGES.get(str(page.relative_to(DOCS)))
    file = page if outside is None else ROOT / outside
    other = DOCS / "index.md" if IS_CHINESE else DOCS / "zh/index.md"
    if file.is_file() and (match := _OTHER_LANGUAGE.search(file.read_text(encoding="utf-8"))):
        other = _page_of(file.parent / match[1])
    context["other_language"] = Path(os.path.relpath(other, page.parent)).with_suffix(".html")
    context["other_language_name"] = "English" if IS_CHINESE else "中文"
    context["other_language_code"] = "en" if IS_CHINESE else "zh-CN"


def setup(app: "Sphinx") -> None:
    app.add_search_language(SearchEnglishAndChinese)
    app.add_lexer("nft", TextLexer)  # Pygments does not know rules of nftables
    app.connect("source-read", read_page)
    app.connect("html-page-context", add_other_language)
