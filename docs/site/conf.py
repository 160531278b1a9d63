"""The documentation site. Sphinx reads pages where they are: links hold here and on a forge.

Sphinx with MyST and Furo, since it checks links and anchors between pages and with docstrings, and
can make every warning an error, as the sites of NumPy, attrs and pip do.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

project = "shmacc"
version = release = metadata.version("shmacc")
copyright = "the authors of shmacc; MIT licence"  # noqa: A001  the name is Sphinx's

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "pages",
]  # fmt: skip
root_doc = "README"
exclude_patterns = [".*", "build", "dist", "**/__pycache__"]
_WRITTEN = [
    "*.md", "docs/*.md", "docs/*/*.md", "docs/reference/*.rst", "shmacc/native/README.md",
    "tests/README.md", "tools/model/README.md", "tools/model/litmus/README.md",
]  # fmt: skip
# Source files are pages if a page links to them. Files to install are downloads.
_PAGES = [page for pattern in _WRITTEN for page in ROOT.glob(pattern)]
_LINKS = {
    (page.parent / link.partition("#")[0]).resolve()
    for page in _PAGES
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
}
source_suffix = {
    ".md": "markdown", ".rst": "restructuredtext", ".hpp": "cpp", ".py": "python",
    ".pml": "promela",
}  # fmt: skip
include_patterns = [
    *_WRITTEN,
    *(
        str(file.relative_to(ROOT))
        for file in sorted(_LINKS)
        if file.suffix in source_suffix.keys() - {".md", ".rst"}
    ),
]

myst_heading_anchors = 4

smartquotes_action = "De"  # dashes and ellipses; in docstrings, quotes are Python's
toc_object_entries_show_parents = "hide"
default_role = "py:obj"
# Not installed here: the reference shows what shmacc adds to them.
autodoc_mock_imports = ["jax", "torch", "ray"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autoclass_content = "both"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"shmacc {version}"
html_favicon = "static/favicon.svg"
html_additional_pages = {"index": "index.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_domain_indices = False
html_copy_source = False
html_show_sphinx = False
# Without links to edit a page: the project knows no public address of its repository.
html_theme_options = {"navigation_with_keys": True}
# Every colour of these has a contrast of at least 4.5, also those of what a console printed.
pygments_style = "default"
pygments_dark_style = "github-dark"
# Of a console, commands are copied; of a program, all of it.
copybutton_prompt_text = "$ "
