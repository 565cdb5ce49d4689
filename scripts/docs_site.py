"""Two additions to the generator of the site, which mkdocs.yml names: signatures in full, and a search from disk."""

import json
from pathlib import Path
from typing import Any

import griffe

_VALUES = {"funcpipe.training.recipe.RecipeKeywords": "Recipe", "funcpipe.core.settings.RunKeywords": "RunSettings"}
"""The class beside each typed dictionary of keywords that has their defaults."""

_OTHER_NAMES = {"run": "name"}

_WORKER = """\
if (location.protocol === "file:") {
  const FromFile = Worker, source = %s
  window.Worker = function () {
    return new FromFile(URL.createObjectURL(new Blob([source], {type: "text/javascript"})))
  }
}
"""


class Signatures(griffe.Extension):
    """Write `**keywords: Unpack[…]` as the keywords that it stands for, and the words of a choice below its text."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in list(func.parameters):
            kind = parameter.annotation
            if parameter.kind is griffe.ParameterKind.var_keyword and isinstance(kind, griffe.ExprSubscript):
                assert isinstance(kind.slice, griffe.Expr)
                keywords = func.modules_collection[kind.slice.canonical_path]
                values = keywords.parent[_VALUES[keywords.canonical_path]]
                del func.parameters[parameter.name]
                for name, field in keywords.attributes.items():
                    func.parameters[name] = griffe.Parameter(
                        name,
                        annotation=field.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=values[_OTHER_NAMES.get(name, name)].value,
                    )

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        words = [f"`{field.value}`" for field in cls.attributes.values() if "class-attribute" in field.labels]
        if cls.docstring is not None and [str(base) for base in cls.bases] == ["Enum"]:
            cls.docstring.value += f"\n\nOne of {', '.join(words)}."


def on_post_build(config: Any) -> None:
    """Write the script that `extra.polyfills` names, with the theme's search in it.

    A page that is opened from disk may start no worker from a file, and the search would wait for ever. It may from
    text.
    """
    site = Path(config["site_dir"])
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    (address,) = config["extra"]["polyfills"]
    (site / address).write_text(_WORKER % json.dumps(worker.read_text()))
