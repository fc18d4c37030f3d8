"""Tells from a chat template's source whether it puts contents into its output as they are.

Such a template makes the same text around the contents for all conversations with the same roles. The test is
strict: it accepts only what it understands, and a template that it refuses is merely rendered in full each time.
"""

from __future__ import annotations

from jinja2 import nodes

# With one of these a text can be caught and changed after it was put out.
_REFUSED = (
    nodes.Macro,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.AssignBlock,
    nodes.Block,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.With,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
_COUNTS = ("length", "count")
_PICKS = ("first", "last")
_LOOP_COUNTS = ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0")


def is_verbatim(template: nodes.Template) -> bool:
    """Whether contents of messages, in conversations of role and content alone, only ever go to the output as they are.

    Followed are `messages` and every name that is set to, or loops over, something made from it. Each use of such a
    name has to end in a role (free to use), in a content that is put out alone or joined with other text, in a loop or
    assignment (which the followed names cover), or in a count.
    """
    if any(True for _ in template.find_all(_REFUSED)):
        return False
    if any(name.name == "strftime_now" for name in template.find_all(nodes.Name)):
        return False
    parents = {child: node for node in (template, *template.find_all(nodes.Node)) for child in node.iter_child_nodes()}
    for name in template.find_all(nodes.Name):
        if name.name == "loop" and not _is_plain_loop(parents[name]):
            return False
    followed = _followed(template)
    uses = (name for name in template.find_all(nodes.Name) if name.ctx == "load" and name.name in followed)
    return all(_harmless(use, parents) for use in uses)


def _followed(template: nodes.Template) -> set[str]:
    """`messages`, and the names that hold something made from it."""
    names = {"messages"}
    while True:
        found = set(names)
        for loop in template.find_all(nodes.For):
            if names & _names(loop.iter):
                found |= _names(loop.target)
        for assignment in template.find_all(nodes.Assign):
            if names & _names(assignment.node):
                found |= _names(assignment.target)
        if found == names:
            return names
        names = found


def _names(node: nodes.Node) -> set[str]:
    inner = {name.name for name in node.find_all(nodes.Name)}
    return inner | {node.name} if isinstance(node, nodes.Name) else inner


def _harmless(use: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> bool:
    """Whether one use of messages, or of one message, ends in something that does not depend on a content's text."""
    node = use
    while True:
        parent = parents[node]
        if isinstance(parent, nodes.Getattr):
            return _harmless_key(parent, parent.attr, parents)
        if isinstance(parent, nodes.Getitem) and parent.node is node:
            if isinstance(parent.arg, nodes.Const) and isinstance(parent.arg.value, str):
                return _harmless_key(parent, parent.arg.value, parents)
            if not _is_position(parent.arg):
                return False
        elif isinstance(parent, nodes.Filter) and parent.node is node and not parent.args:
            if parent.name in _COUNTS:
                return True
            if parent.name not in _PICKS:
                return False
        elif isinstance(parent, nodes.For):
            return parent.iter is node
        elif isinstance(parent, nodes.Assign):
            return isinstance(parent.target, nodes.Name)
        else:
            return False
        node = parent


def _harmless_key(node: nodes.Node, key: str, parents: dict[nodes.Node, nodes.Node]) -> bool:
    """Whether a value of a message may be used as it is; of other keys than role and content there is none."""
    if key == "role":
        return True
    if key != "content":
        return not any(hasattr(kind, key) for kind in (dict, list, str))
    while isinstance(parents[node], (nodes.Concat, nodes.Add)):
        node = parents[node]
    return isinstance(parents[node], nodes.Output)


def _is_position(node: nodes.Node | None) -> bool:
    """Whether an index is sure to be a number or a slice of numbers, and so picks messages, not a message's content."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, int)
    if isinstance(node, nodes.Slice):
        return all(part is None or _is_position(part) for part in (node.start, node.stop, node.step))
    if isinstance(node, nodes.Neg):
        return _is_position(node.node)
    if isinstance(node, (nodes.Add, nodes.Sub)):
        return _is_position(node.left) and _is_position(node.right)
    return isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop"


def _is_plain_loop(node: nodes.Node) -> bool:
    """Whether `loop` is used for what it counts, not for the messages that it can also give."""
    return isinstance(node, nodes.Getattr) and node.attr in _LOOP_COUNTS
