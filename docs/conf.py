"""
The documentation site: the pages of this folder, and a reference that is generated from the docstrings.

    uv run --group docs sphinx-build -nW docs build/site

``-nW`` turns every warning into an error, so a link to a missing page, heading, picture or name stops the build.
The site loads nothing from other servers. It can be opened as files, without a web server.
"""

import re
import warnings
from pathlib import Path
from pydoc import locate

import django
from django.conf import settings
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import fencing_sdk
from fencing_sdk import _client, recipes

project = "fencing_sdk"
version = release = fencing_sdk.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_*"]

html_theme = "furo"
html_title = f"fencing_sdk {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
myst_heading_anchors = 4  # "#what-is-checked" leads to a heading, as on GitHub

default_role = "py:obj"  # `LockClient.lock` in a docstring is a link
add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # "DEFAULT_BACKOFF", and not the repr of an object
python_maximum_signature_line_length = 88

warnings.filterwarnings("ignore", "Unmanaged access of declarative attribute")  # autodoc looks at the mixin
settings.configure()
django.setup()  # no model can be imported before

# The client imports recipes for a type checker alone; here an annotation is a class.
vars(_client).update({name: getattr(recipes, name) for name in recipes.__all__})

OUT_OF_THIS_FOLDER = (
    (re.compile(r"\]\((\.\./)*CHANGELOG\.md"), "](/changelog.md"),
    (re.compile(r"\]\((\.\./)*benchmarks/(README\.md|\w+\.py)"), "](/performance.md"),
    (re.compile(r"\]\((\.\./)*examples/\)"), "](/examples.md)"),
    (re.compile(r"\]\((\.\./)*examples/(\w+)\.py"), r"](/examples.md#\2"),
    (re.compile(r"\]\(docs/decisions/\)"), "](/decisions/README.md)"),
)
"""Links to files beside this folder, and the pages that show those files in the site."""


def stay_in_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to files beside this folder lead to the pages that show them."""
    for link, page in OUT_OF_THIS_FOLDER:
        source[0] = link.sub(page, source[0])


def stay_in_the_site_from_an_included_file(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    """Do the same in a file that a page includes, such as the README."""
    stay_in_the_site(app, docname, source)


def keep_first_line(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """
    Stop napoleon from taking "Seconds since the start: ..." for a type, in the docstring of an attribute.

    It looks at the first line alone, so an empty comment goes there.
    """
    if what in {"attribute", "property", "data"}:
        lines[:0] = ["..", ""]


def mend_param_spec(  # the parameters are Sphinx's
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write ``Callable[..., R]`` and ``*args`` for a ParamSpec, which Sphinx prints in a way it cannot read again."""
    if signature is not None:
        signature = signature.replace(": ~typing.~P", "").replace("[~P]", "...")
    return signature, returns


def link_to_public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: Element) -> Element | None:
    """
    Link a name that Python's domain did not find.

    Docstrings say `LossReason` from any module, and annotations name the private module that defines a class. Both
    mean the public name. What an annotation names and this site does not document is shown without a link. Of a name
    that both worlds have, `Lock`, the one for tasks is meant.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    documented = env.domains.python_domain.objects
    meant = [name for name in documented if not documented[name].aliased and same(name, target)]
    meant = [name for name in meant if not name.startswith(("fencing_sdk.sync.", "fencing_sdk.rows.sync."))] or meant
    if len(meant) == 1:
        found = documented[meant[0]]
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, shown, meant[0])
    return shown if node["reftype"] == "class" else None


def same(public: str, target: str) -> bool:
    """Return whether *target* means the documented name *public*."""
    if target.startswith("fencing_sdk."):
        return public.endswith("." + target.rpartition(".")[2]) and locate(public) is locate(target)
    return public.endswith("." + target)


LOADED = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="?(?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
)


def warn_of_other_servers(app: Sphinx, error: Exception | None) -> None:
    """Warn of a page that would load something from another server."""
    for path in [*Path(app.outdir).rglob("*.html"), *Path(app.outdir).rglob("*.css")]:
        if LOADED.search(path.read_text(encoding="utf-8")):
            logging.getLogger(__name__).warning("%s loads something from another server", path)


def setup(app: Sphinx) -> None:
    """Connect these functions to the build."""
    app.connect("source-read", stay_in_the_site)
    app.connect("include-read", stay_in_the_site_from_an_included_file)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)  # before napoleon, at 500
    app.connect("autodoc-process-signature", mend_param_spec)
    app.connect("missing-reference", link_to_public_name)
    app.connect("build-finished", warn_of_other_servers)
