"""Defaults of the API reference as values: `QuantizationOptions.seqlen` becomes `2048`.

An extension of griffe, which reads the sources for mkdocstrings without running them.
"""

from typing import Any

import griffe


class FieldDefaults(griffe.Extension):
    """Replaces a parameter's default that names a field of a class by that field's value."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        self._replace(pkg)

    def _replace(self, found: griffe.Module | griffe.Class) -> None:
        for member in found.members.values():
            if isinstance(member, griffe.Module | griffe.Class):
                self._replace(member)
            elif isinstance(member, griffe.Function):
                for parameter in member.parameters:
                    if isinstance(parameter.default, griffe.ExprAttribute):
                        parameter.default = _value(found, str(parameter.default)) or parameter.default


def _value(scope: griffe.Module | griffe.Class, name: str) -> str | griffe.Expr | None:
    """The value of the field `Class.field`, as the names of this module or class resolve it; None if there is none."""
    owner, _, field = name.partition(".")
    try:
        attribute = scope.modules_collection[scope.resolve(owner)][field]
    except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
        return None
    return attribute.value if attribute.is_attribute else None
