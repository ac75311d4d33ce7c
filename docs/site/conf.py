"""The documentation as a site: `make docs` builds it in build/site.

Sphinx reads the pages where they are, from the root of the repository, so the links between them
work in the site as they do on GitHub. The navigation is the table below.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

NAVIGATION = {
    "Getting started": ["docs/install", "docs/quickstart", "docs/migrating"],
    "Guides": [
        "docs/using",
        "docs/observing",
        "docs/launching",
        "docs/frameworks",
        "docs/elastic",
        "docs/model-parallel",
        "docs/model-parallel-scripts",
        "docs/model-parallel-memory",
        "docs/model-parallel-tensor",
        "docs/model-parallel-checkpoints",
        "docs/operations",
        "docs/numpy",
        "docs/tensorflow",
        "docs/tensorflow-model-parallel",
        "docs/gpu",
        "docs/wire",
        "docs/performance",
    ],
    "Reference": [
        "docs/settings",
        "docs/model-parallel-reference",
        "docs/troubleshooting",
        "docs/faults",
        "docs/security",
        "CHANGELOG",
    ],
    "API reference": [
        "docs/api/smddp",
        "docs/api/modelparallel",
        "docs/api/dataparallel",
        "docs/api/numpy",
        "docs/api/tensorflow",
    ],
    "Contributing": [
        "CONTRIBUTING",
        "docs/architecture",
        "docs/threads",
        "docs/model-parallel-design",
        "docs/testing",
        "docs/torch-suite",
        "benchmarks/README",
        "benchmarks/results/README",
    ],
}

project = "smddp"
author = "the authors of smddp"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "repository"]

root_doc = "README"
include_patterns = [f"{root_doc}.md", "docs/*.md"]
include_patterns += [f"{page}.*" for pages in NAVIGATION.values() for page in pages]
# Sphinx would look for pages in environments and builds, too, which takes it a minute.
exclude_patterns = [
    folder.name
    for folder in ROOT.iterdir()
    if folder.is_dir() and folder.name not in {page.split("/")[0] for page in include_patterns}
]
templates_path = ["templates"]

# The anchors of headings are those of GitHub.
myst_heading_anchors = 6
default_role = "literal"

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "smddp"
html_copy_source = False
html_show_sourcelink = False
