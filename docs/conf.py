"""Sphinx: `make docs` builds the manual, with warnings as errors."""

import re
from pathlib import Path

project = "recoup"
author = "The recoup authors"
copyright = "The recoup authors"  # Sphinx asks for this name
release = re.search(r'__version__ = "(.*)"', (Path(__file__).parents[1] / "src/recoup/__init__.py").read_text())[1]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # tests/test_tutorials.py runs the tutorials; pages show them as they are
myst_heading_anchors = 3
# Pages are read in the repository too, where links go to source files and folders.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures say them in the source; here they would hide the words
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
