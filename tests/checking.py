"""Run-time checks of the package's functions on arrays: shapes as annotated, with jaxtyping, and
types, with beartype.

jaxtyping's own hook decorates all functions, also those without arrays and those that are made anew
with every call: tests of small models spend two thirds of their time in it. Those are left to the
static checker.
"""

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

_types = beartype(
    conf=BeartypeConf(is_pep484_tower=True)
)  # an int is a float, as the type system says


def check_imports_of(package: str) -> None:
    """Whatever is imported of a package from now on is checked."""
    sys.meta_path.insert(0, _Finder(package))


def checked(function_or_class):
    """Arguments and result are of their types, and sizes of one name are the same everywhere."""
    return jaxtyped(function_or_class, typechecker=_types)


class _Finder:
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = (
            PathFinder.find_spec(name, path, target)
            if name.partition(".")[0] == self.package
            else None
        )
        if (
            spec
            and type(spec.loader) is SourceFileLoader
            and b"jaxtyping" in Path(spec.origin).read_bytes()
        ):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def path_stats(self, path):
        raise OSError("Code with checks is neither read from __pycache__ nor kept there.")

    def source_to_code(self, data, path, *, _optimize=-1):
        return compile(
            _Decorated().visit(ast.parse(data)), path, "exec", dont_inherit=True, optimize=_optimize
        )


class _Decorated(ast.NodeTransformer):
    """Functions and data classes of a module decorated, those that have to do with arrays."""

    def __init__(self) -> None:
        self.arrays: set[str] = set()  # what jaxtyping's annotations are called in this module

    def visit_ImportFrom(self, node):
        if node.module == "jaxtyping":
            self.arrays.update(name.asname or name.name for name in node.names)
        return node

    def visit_Assign(self, node):
        if self._has_arrays(node.value):  # a name for an annotation
            self.arrays.update(target.id for target in node.targets if isinstance(target, ast.Name))
        return node

    def visit_FunctionDef(self, node):
        if self._has_arrays(node.args, node.returns):
            node.decorator_list.append(_decorator(node))
        return node  # without what is inside

    def visit_ClassDef(self, node):
        fields = (each.annotation for each in node.body if isinstance(each, ast.AnnAssign))
        if self._has_arrays(*fields) and any(
            "dataclass" in ast.unparse(each) for each in node.decorator_list
        ):
            node.decorator_list.insert(0, _decorator(node))
        return self.generic_visit(node)

    def _has_arrays(self, *nodes) -> bool:
        names = (
            each
            for node in nodes
            if node is not None
            for each in ast.walk(node)
            if isinstance(each, ast.Name)
        )
        return any(name.id in self.arrays for name in names)


def _decorator(place: ast.AST) -> ast.expr:
    found = ast.parse("__import__('checking').checked", mode="eval").body
    for node in ast.walk(found):
        ast.copy_location(node, place)
    return found
