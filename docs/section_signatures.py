"""Tells mkdocstrings how sections are made, since griffe knows dataclasses of Python only."""

from typing import Any

from griffe import (
    Class,
    Expr,
    ExprCall,
    ExprSubscript,
    Extension,
    Function,
    Parameter,
    ParameterKind,
    Parameters,
)

SECTION = "fusedrec_torchrec.core.config.section"
WRAPPERS = ("OwnWords", "Annotated")


class SectionSignatures(Extension):
    """Gives sections a constructor with their fields, and fields the types that users know."""

    def on_class(self, *, cls: Class, **kwargs: Any) -> None:
        """Is called for each class, with all of its members."""
        paths = [d.value.canonical_path for d in cls.decorators if isinstance(d.value, Expr)]
        if SECTION not in paths:
            return
        parameters = [Parameter("self", kind=ParameterKind.positional_or_keyword)]
        for name, field in cls.attributes.items():
            if field.annotation is None or "property" in field.labels:
                continue
            field.annotation = _known(field.annotation)
            default = _default(field.value)
            kind = ParameterKind.keyword_only
            parameters.append(
                Parameter(name, annotation=field.annotation, kind=kind, default=default)
            )
        init = Function("__init__", parameters=Parameters(*parameters), returns="None", parent=cls)
        cls.set_member("__init__", init)
        cls.labels.add("dataclass")


def _known(annotation: Any) -> Any:
    """Returns a type without what it is wrapped in for checks."""
    if isinstance(annotation, ExprSubscript) and str(annotation.left) in WRAPPERS:
        inner = annotation.slice
        return inner.elements[0] if str(annotation.left) == "Annotated" else inner
    return annotation


def _default(value: Any) -> Any:
    """Returns the default of a field; None if it must be given."""
    if isinstance(value, ExprCall) and str(value.function) == "Field":
        given = {argument.name: argument.value for argument in value.arguments}
        return given.get("default")
    return value
