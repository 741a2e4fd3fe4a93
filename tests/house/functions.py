"""Finds functions in C++ and CUDA code by matching braces: how long they are, what they take.

No parser: namespaces and classes are entered, everything else in braces is one function (with the
lambdas in it) or an initializer. That is enough for code that clang-format has laid out.
"""

import dataclasses
import re

CONTAINER = re.compile(r"^(?:inline\s+)?namespace\b|^extern\s*\"\"\s*$")
TYPE = re.compile(r"^(?:typedef\s+)?(class|struct|union|enum(?:\s+(?:class|struct))?)\b")
# Parenthesized words in front of a function that are not its parameters.
ATTRIBUTES = re.compile(
    r"\[\[.*?\]\]|\b(?:__launch_bounds__|__attribute__|__cluster_dims__|alignas|decltype|requires"
    r"|noexcept|explicit)\s*(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))", re.DOTALL)
NAME = re.compile(r"((?:~\s*)?[A-Za-z_][\w:]*|operator\s*(?:\(\)|[^\s\w(]+|\w+))\s*\(")


@dataclasses.dataclass
class Function:
    """A definition or declaration at namespace or class level."""

    name: str
    line: int  # where it begins
    body_lines: int  # from its opening brace to the closing one, both included; 0: no body
    parameters: list
    public: bool


@dataclasses.dataclass
class Scope:
    """A namespace or class that the scan is in."""

    is_class: bool
    public: bool
    hidden: bool  # within a class's private part, or an unnamed namespace


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def prepare(code):
    """Blanks what may hold braces that do not match: preprocessor lines, strings, characters."""
    code = re.sub(r'R"(\w*)\(.*?\)\1"', lambda match: '""' + blank(match)[2:], code, flags=re.DOTALL)
    code = re.sub(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, code)
    code = re.sub(r'"(?:\\.|[^"\\\n])*"', lambda match: '""' + " " * (len(match.group(0)) - 2), code)
    return re.sub(r"'(?:\\.[^']*|[^'\\\n])'", lambda match: " " * len(match.group(0)), code)


def closing(code, start):
    """Index of the bracket that closes the one at `start`."""
    pairs, depth = {"{": "}", "(": ")", "<": ">"}, 0
    opening, end = code[start], pairs[code[start]]
    for index in range(start, len(code)):
        depth += (code[index] == opening) - (code[index] == end)
        if depth == 0:
            return index
    return len(code) - 1


def without_template(head):
    """The head without `template <...>` in front."""
    while (match := re.match(r"\s*template\s*<", head)) is not None:
        head = head[closing(head, match.end() - 1) + 1:]
    return head.strip()


def split_parameters(text):
    """Parameters of a list, cut at the commas that are in no bracket."""
    parts, depth, last = [], 0, ""
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append(last)
            last = ""
        else:
            last += character
    parts.append(last)
    return [" ".join(part.split()) for part in parts if part.strip() not in ("", "void")]


def signature(head):
    """(name, parameters) of a function's head, or None for other statements."""
    head = without_template(ATTRIBUTES.sub(" ", without_template(head)))
    if re.match(r"(?:using|typedef|friend|static_assert|return|NIBBLE_\w+|[A-Z][A-Z_]{3,}\s*\()", head):
        return None
    match = NAME.search(head)
    if match is None or re.search(r"=", re.sub(r"operator\s*[^\s\w(]+", "", head[:match.start()])):
        return None
    begin = match.end() - 1
    inside = head[begin + 1:closing(head, begin)]
    if inside.startswith("*") or inside.startswith("&"):
        return None  # a pointer to a function
    return match.group(1), split_parameters(inside)


def functions(code):
    """Functions of code without comments, in the order of their beginnings."""
    code = prepare(code)
    found, scopes = [], [Scope(False, True, False)]
    head_start = index = 0
    while index < len(code):
        character, scope = code[index], scopes[-1]
        head = code[head_start:index]
        if character == ":" and scope.is_class:
            label = re.search(r"\b(public|private|protected)\s*$", head)
            if label and code[index + 1:index + 2] != ":":
                scope.public = label.group(1) == "public"
                head_start = index + 1
        elif character == "(":
            index = closing(code, index)
        elif character == ";":
            add(found, code, (head_start, index, 0), scope)
            head_start = index + 1
        elif character == "}":
            if len(scopes) > 1:
                scopes.pop()
            head_start = index + 1
        elif character == "{":
            inner = inner_scope(without_template(ATTRIBUTES.sub(" ", head)), scope)
            if inner is not None:
                scopes.append(inner)
                head_start = index + 1
            else:
                index, head_start = skip_block(found, code, (head_start, index), scope)
        index += 1
    return found


def inner_scope(head, scope):
    """The scope that the brace after `head` opens, or None when it is a function or a value."""
    if CONTAINER.match(head):
        return Scope(False, True, scope.hidden or re.search(r"namespace$", head) is not None)
    kind = TYPE.match(head)
    if kind is None or "(" in head or "=" in head or kind.group(1).startswith("enum"):
        return None
    return Scope(True, kind.group(1) != "class", scope.hidden or not scope.public)


def skip_block(found, code, where, scope):
    """Passes a function or an initializer: (index of its last brace, begin of the next head)."""
    head_start, index = where
    end = closing(code, index)
    while signature(code[head_start:index]) and (match := re.match(r"\s*[,{]", code[end + 1:])):
        # x_{...}, y_(...) {: members that a constructor sets in front of its body
        index = end + 1 + match.end() - 1
        if code[index] == ",":
            index = code.find("{", index)
        end = closing(code, index)
    if signature(code[head_start:index]):
        add(found, code, (head_start, index, code.count("\n", index, end) + 1), scope)
        return end, end + 1
    return end, head_start if re.match(r"\s*[;,]", code[end + 1:]) else end + 1


def add(found, code, where, scope):
    head_start, index, body_lines = where
    sign = signature(code[head_start:index])
    if sign is None:
        return
    begin = index - len(code[head_start:index].lstrip())
    found.append(Function(sign[0], code.count("\n", 0, begin) + 1, body_lines, sign[1],
                          scope.public and not scope.hidden))
