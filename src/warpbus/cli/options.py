"""Options of a command from the fields of dataclasses: each option is declared once.

The field gives the type, the default and the lower limit of its option, the command the help text.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature
from types import EllipsisType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from warpbus.cli.completion import one_of
from warpbus.errors import UsageError, WarpbusError
from warpbus.language import translated

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N", autocompletion=one_of("auto", "cpu", "cuda"))]

Command = Callable[..., None]


@dataclass(frozen=True)
class FieldOption:
    """An option that the name and the type of its field and a help text do not describe completely.

    Attributes:
        help: the help text.
        field: the name of the field, if it differs from that of the option.
        metavar: the placeholder of the value in the help.
        least: the lower limit, if it differs from the field's in `least` of the dataclass.
        default: if it differs from the field's; None if it depends on other options.
        choices: values that the shell completes, if the type of the field does not list them.
    """

    help: str
    field: str | None = None
    metavar: str | None = None
    least: float | None = None
    default: Any = ...
    choices: tuple[str, ...] = ()


def options_of(
    sources: Mapping[str, type], /, **listed: str | FieldOption | EllipsisType
) -> Callable[[Command], Command]:
    """A decorator that gives a command options for fields of dataclasses.

    The option for a field of several types takes text; for a tuple of text, it can be given more than once; for a tuple
    of numbers, it takes numbers separated by commas. The attribute `field_options` of the decorated function has the
    class and the field of each option.

    Args:
        sources: dataclasses, by the parameter of the command that gets the values of their fields as a dict. A field is
            missing there if its option has no default and was not given.
        listed: the options in the order of the help. Text is the help of the option for the field with the same name;
            `...` stands for a parameter that the command declares. Of its other parameters, those without a default
            come first and those with one last.
    """

    def decorate(command: Command) -> Command:
        declared = {
            name: parameter.replace(kind=Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name not in sources
        }
        parameters = {name: parameter for name, parameter in declared.items() if parameter.default is Parameter.empty}
        targets: dict[str, tuple[str, str, Any]] = {}
        for name, value in listed.items():
            if isinstance(value, EllipsisType):
                parameters[name] = declared[name]
                continue
            option = FieldOption(value) if isinstance(value, str) else value
            target, field = _field(sources, option.field or name)
            kind = get_type_hints(sources[target])[field.name]
            targets[name] = target, field.name, kind
            parameters[name] = _parameter(name, option, field, kind, getattr(sources[target], "least", {}))
        for name, parameter in declared.items():
            parameters.setdefault(name, parameter)

        options = {field: option for option, (_, field, _) in targets.items()}

        @wraps(command)
        def run(**values: Any) -> None:
            filled: dict[str, dict[str, Any]] = {target: {} for target in sources}
            for name, (target, field, kind) in targets.items():
                value = values.pop(name)
                if value is not None and value != []:
                    filled[target][field] = _converted(name, kind, value)
            try:
                command(**values, **filled)
            except WarpbusError as error:
                error.args = tuple(_with_options(text, options) for text in error.args)
                raise

        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        run.__dict__["__signature__"] = Signature(list(parameters.values()))
        run.__dict__["field_options"] = {name: (sources[target], field) for name, (target, field, _) in targets.items()}
        return run

    return decorate


def _with_options(text: Any, options: Mapping[str, str]) -> Any:
    """A message that names options, not the fields behind them: `options` has the option for each field.

    `kv_dtype` becomes --kv-cache-dtype, `memory=8GB` --memory 8GB, and `restart=True` --restart. A field of one word
    may also be prose, and is only named before a value. A part of a path or of a dotted name stays as it is.
    """
    if not isinstance(text, str) or not any(field in text for field in options):
        return text
    named = re.compile(rf"(?<![\w./-])({'|'.join(options)})(=True\b|=(?=\w)|(?![\w./-]))", re.ASCII)

    def option(match: re.Match[str]) -> str:
        field, value = match.groups()
        if "_" not in field and not value:
            return match[0]
        return f"--{options[field].replace('_', '-')}" + (" " if value == "=" else "")

    return named.sub(option, translated(text))  # the catalogue has the text with the fields' names


def _field(sources: Mapping[str, type], name: str) -> tuple[str, Field[Any]]:
    """The first field with the name, after the key of its dataclass."""
    for target, source in sources.items():
        for field in fields(source):
            if field.name == name:
                return target, field
    raise LookupError(f"no field {name} in {', '.join(source.__name__ for source in sources.values())}")


def _parameter(name: str, option: FieldOption, field: Field[Any], kind: Any, limits: Mapping[str, float]) -> Parameter:
    """The parameter of a command that typer makes an option of."""
    least, default = option.least, field.default if option.default is ... else option.default
    if least is None and field.name in limits:
        least = next(iter(get_args(kind)), kind)(limits[field.name])  # int also of `int | None`
    choices = option.choices or (get_args(kind) if get_origin(kind) is Literal else ())
    if get_origin(kind) is tuple:
        kind, default = list[str] if get_args(kind)[0] is str else str, None
    elif get_origin(kind) is Literal or str in get_args(kind):
        kind = str
    if default is MISSING:  # the field has a factory
        default = None
    # Without an explicit flag, typer would also give a switch that is off a flag which negates it.
    flags = ["--" + name.replace("_", "-")] if default is False else []
    completion = one_of(*choices) if choices else None
    info = typer.Option(*flags, help=option.help, metavar=option.metavar, min=least, autocompletion=completion)
    hint = kind | None if default is None else kind
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _converted(name: str, kind: Any, value: Any) -> Any:
    """The value of a field of type `kind`, from the value of its option."""
    if get_origin(kind) is not tuple:
        return value
    element = get_args(kind)[0]
    return tuple(value) if element is str else parse_numbers(name, value, element)


def parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Distinct numbers, separated by commas in `text`, ascending: whole ones, or positive ones if `kind` is float.

    Raises:
        UsageError: `text` is something else.
    """
    pieces = text.split(",")
    if kind is int:
        if not all(piece.isascii() and piece.isdigit() for piece in pieces):
            raise UsageError(f"--{option} {text}: expected whole numbers separated by commas, such as 1,2,4")
        return tuple(sorted(set(map(int, pieces))))
    try:
        found = sorted(set(map(float, pieces)))
    except ValueError:
        found = [0.0]
    if not all(0 < number < math.inf for number in found):
        raise UsageError(f"--{option} {text}: expected positive numbers separated by commas")
    return tuple(found)
