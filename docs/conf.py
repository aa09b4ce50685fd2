"""How Sphinx builds the site; CONTRIBUTING says by which command.

The source folder is the repository, so that a link that works in its files works on the site.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# `python` in a tutorial is the one that builds, its environment active or not.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
sys.path.insert(0, str(Path(__file__).parent))
os.environ["TQDM_DISABLE"] = "1"  # no progress bars on the pages of tutorials

import fedjax_sim

project = "fedjax_sim"
author = "The fedjax_sim maintainers"
copyright = author
version = release = fedjax_sim.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "api",
    "formulas",
]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/**.md",
    "docs/**",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "runs"]
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore = [("py:class", "jax.jaxlib._jax.Array")]  # jax.Array, as JAX itself calls it

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
html_math_renderer = "mathml"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
# The notebooks are stored with what they show and .ci/run executes them; a tutorial says of itself
# that it is executed here.
nb_execution_mode = "off"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables too
nb_output_stderr = "remove"  # warnings of the machine that builds

napoleon_custom_sections = [("Attributes", "params_style")]  # a list, like Args
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
viewcode_follow_imported_members = True
